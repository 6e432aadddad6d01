"""All-reduces that become reduce-scatters and all-gathers, with each rank's own rows between: against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import AG, RS, applied, c10d, copied, fake_ranks
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weft.fused_ops import FusionPass
from weft.fused_ops.dispatch import profitability

GATHER, SCATTER = "weft::one_shot_all_gather", "weft::one_shot_reduce_scatter"
REDUCE = "weft::one_shot_all_reduce"
HIDDEN = 8


def name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def ar(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, name()))


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def own_rows(x: Tensor, dim: int = 0) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def behind_a_product(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return norm(r + ar(x @ w), n) @ v


def of_no_product(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return norm(r + ar(x.sin() @ w + r.cos()), n) @ v


def unrounded(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """vLLM's norm; what it stores goes on to the next layer."""

    def normed(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) + r
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * n, wide.to(x.dtype)

    y, r = normed(ar(x @ w), r)
    y, r = normed(ar((y @ v) @ v.mT), r)
    return (y @ v,)


def average_and_layer_norm(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(ar(x @ w, "avg"), (HIDDEN,), n, n.cos()) @ v


def layers(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    for _ in range(2):
        r = r + ar(x @ w)
        r = r + ar((norm(r, n) @ v).sin() @ v.mT)
        x = norm(r, n) @ w.mT
    return x


def residual_returned(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    r = r + ar(x @ w)
    return norm(r, n) @ v, r


def two_of_a_norm(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One gather of the norm, not two of what is made of it."""
    y = norm(ar(x @ w), n)
    return y.sin() @ v, y.cos() @ v


def a_chunk(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return own_rows(norm(r + ar(x @ w), n))


def a_chunk_of_the_sequence(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    y = r.view(2, -1, HIDDEN) + ar((x @ w).view(2, -1, HIDDEN))
    return own_rows(norm(y, n), 1)


def a_chunk_of_another_rank(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    y = norm(r + ar(x @ w), n).chunk(dist.get_world_size())
    return y[dist.get_rank() - 1] @ v


def three_of_one_sum(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return norm(ar(x @ w) + ar(x.sin() @ w) + ar(x.cos() @ w), n) @ v


def gradient_of_a_weight(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = ar(x @ w)
    z = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return z @ v, (z * r).sum(0, keepdim=True)


def broadcast(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    """A number of each row, one row for all, and a number."""
    y = torch.where(r[:, :1] > 0, ar(x @ w) * n.view(1, -1), r.new_full((), 0.5))
    return norm(y * r.sum(-1, keepdim=True), n) @ v


# Of the entries of the pass.
TAKEN: dict[Callable[..., Any], list[str]] = {
    behind_a_product: [RS, AG],
    of_no_product: [SCATTER, AG],
    unrounded: [RS, AG, RS, AG],
    average_and_layer_norm: [RS, AG],
    layers: [RS, AG, RS, AG] * 2,
    residual_returned: [RS, GATHER, AG],
    two_of_a_norm: [RS, GATHER],
    a_chunk: [RS],
    three_of_one_sum: [RS, AG],
    gradient_of_a_weight: [RS, AG, REDUCE],
    broadcast: [RS, AG],
    a_chunk_of_another_rank: [RS, GATHER],
}


def inputs(rank: int, dtype: torch.dtype, rows: int = 12) -> list[Tensor]:
    """A rank's own x and w, and the residual and weights of all."""
    own = torch.Generator().manual_seed(17 + rank)
    x, w = torch.randn(rows, 5, generator=own), torch.randn(5, HIDDEN, generator=own)
    shared = torch.Generator().manual_seed(16)
    r, n = torch.randn(rows, HIDDEN, generator=shared), torch.randn(HIDDEN, generator=shared)
    return [t.to(dtype) for t in (x, w, r, n, torch.randn(HIDDEN, 7, generator=own))]


def graph_of(fn: Callable[..., Any], given: list[Tensor]) -> fx.GraphModule:
    traced = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    view_to_reshape(traced)
    return traced


def results(graph: fx.Graph, given: list[Tensor]) -> list[Tensor]:
    for question in graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
        graph.erase_node(question)
    got = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*given)
    return [got] if isinstance(got, Tensor) else list(got)


def compared(rank: int, world: int, fn: Callable[..., Any], dtype: torch.dtype) -> Any:
    """What became of the collectives, and the errors with the pass and without."""
    given = inputs(rank, dtype)
    traced, fusion = graph_of(fn, given), FusionPass(sequence_parallel=True)
    after = copied(traced.graph)
    fusion(after)
    exact_inputs = [t.double() for t in given]
    exact = results(graph_of(fn, exact_inputs).graph, exact_inputs)
    errors = []
    for graph in (after, traced.graph):
        got = results(graph, given)
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, dtype) for t in exact]
        parts = zip(got, exact, strict=True)
        errors.append(max(((a.double() - b).norm() / b.norm()).item() for a, b in parts))
    return [e.fused_into for e in fusion.report().entries], errors, str(fusion.report())


def check(fn: Callable[..., Any], want: list[str], world: int = 2, dtype: torch.dtype = torch.float32) -> str:
    eps = torch.finfo(dtype).eps
    for fused, (with_it, without), text in run_ranks(compared, world, fn, dtype):
        assert fused == want, text
        # As many roundings, in another order.
        assert with_it <= 1.5 * without + eps, (with_it, without)
    return str(text)


@pytest.mark.parametrize("fn", TAKEN)
def test_it_computes_the_same_on_own_rows(fn: Callable[..., Any]) -> None:
    text = check(fn, TAKEN[fn])
    assert "of an all-reduce, sequence parallel" in text


@pytest.mark.parametrize("fn", [unrounded, layers, residual_returned])
def test_between_three_ranks_of_16_bits(fn: Callable[..., Any]) -> None:
    check(fn, TAKEN[fn], 3, torch.bfloat16)


def test_a_chunk_of_the_second_dimension() -> None:
    check(a_chunk_of_the_sequence, [RS])


def test_a_residual_in_front_of_the_norm_is_added_by_the_op() -> None:
    with fake_ranks(2):
        graph = graph_of(layers, inputs(0, torch.float32)).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel=True))
    assert sum("residual added" in e.detail for e in seen.entries) == 4
    assert {e.detail for e in seen.entries if e.fused_into == AG} == {"1 product"}
    full = [n for n in seen.after.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
    rows = [n.name for n in full if tuple(n.meta["val"].shape) == (12, HIDDEN)]
    assert not rows, "all rows of the residual stream"


# What looks like that and is none.


def dropped_out(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """What each rank drops is its own affair."""
    return norm(r + F.dropout(ar(x @ w), 0.5, training=True), n)


def of_columns(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    y = ar(x @ w) + r
    return y * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + 1e-6)


def summed_up(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return (ar(x @ w) + r).cumsum(0)


def a_residual_of_its_own(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return norm(ar(x @ w) + x.sin() @ w, n)


def a_weight_of_its_own(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return norm(ar(x @ w), (n[None] @ n[:, None])[0].expand(HIDDEN)) * 0


def another_reduction(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    return norm(ar(x @ w, "max"), n)


def written_to(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    y = ar(x @ w)
    z = norm(y, n)
    y.add_(1)
    return z


def written_to_by_a_view(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
    y = ar(x @ w) + r
    y.select(0, 1).mul_(2)
    return norm(y, n)


NO_NORM = "no norm of its rows follows it"
LEFT: dict[Callable[..., Any], str] = {
    dropped_out: NO_NORM,
    of_columns: NO_NORM,
    summed_up: NO_NORM,
    a_residual_of_its_own: NO_NORM,
    another_reduction: "it reduces by 'max'",
    written_to_by_a_view: "writes to memory that may be that of add",
    written_to: "writes to memory that may be that of wait_tensor",
}


def left(fn: Callable[..., Any], rows: int = 12, **settings: Any) -> str:
    """What the pass says of a graph in which it put nothing on rows."""
    with fake_ranks(2):
        given = inputs(0, torch.float32, rows)[:4]
        settings = {"agree": False, "sequence_parallel": True, **settings}
        graph = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given).graph
        seen = applied(graph, FusionPass(**settings))
        plain = applied(graph, FusionPass(**{**settings, "sequence_parallel": False}))
    assert seen.fused == plain.fused
    assert str(seen.after) == str(plain.after)
    return "\n".join(map(str, seen.entries))


@pytest.mark.parametrize("fn", LEFT)
def test_near_misses_stay(fn: Callable[..., Any]) -> None:
    assert LEFT[fn] in left(fn)


def test_a_weight_that_a_product_made_is_not_taken_for_the_same() -> None:
    """The norm in front of it is of a rank's own rows, the weight is multiplied where all rows are."""
    with fake_ranks(2):
        given = inputs(0, torch.float32)[:4]
        graph = make_fx(a_weight_of_its_own, tracing_mode="fake")(*given).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel=True))
    assert seen.fused == [RS, GATHER]


def test_uneven_rows_stay() -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
        return norm(r + ar(x @ w), n)

    assert "not sequence parallel: its 7 rows are no multiple of 2 ranks" in left(fn, 7)


def norm_between(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    y = r + ar(x @ w)
    wide = y.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype) * n) @ v


@pytest.mark.parametrize(
    ("hidden", "columns", "rows", "taken"),
    [
        (4096, 6144, 16, False),
        (4096, 6144, 512, False),
        (4096, 6144, 2048, True),
        (4096, 6144, 8192, True),
        (8192, 10240, 512, False),
        (8192, 10240, 2048, True),
        (4096, 28672, 4096, False),
    ],
)
def test_auto_takes_what_the_measured_ops_say(
    hidden: int, columns: int, rows: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output projection, and that of queries, keys and values behind it: the sum of what each took on 2 H100."""
    monkeypatch.setattr(profitability, "_is_hopper", lambda: True)
    shapes = (rows, hidden // 2), (hidden // 2, hidden), (rows, hidden), (hidden,), (hidden, columns // 2)
    with fake_ranks(2):
        with FakeTensorMode():
            given = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
            graph = make_fx(norm_between)(*given).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel="auto"))
    assert (seen.fused == [RS, AG]) == taken, seen.entries
    if not taken:
        assert "not sequence parallel: by the estimate it would save" in str(seen.entries[0])


def test_where_ranks_cannot_be_asked_nothing_changes() -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
        return norm(r + ar(x @ w), n)

    with torch._inductor.config.patch(
        reorder_for_compute_comm_overlap=True,
        reorder_for_compute_comm_overlap_passes=["sink_waits_iterative"],
    ):
        assert "with which ranks may communicate in different orders" in left(fn)


def test_the_setting() -> None:
    assert FusionPass().sequence_parallel is False
    with pytest.raises(TypeError, match="sequence_parallel: is 1, must be True, False or 'auto'"):
        FusionPass(sequence_parallel=1)  # type: ignore[typeddict-item]
    with fake_ranks(2):
        keys = {FusionPass(sequence_parallel=s).uuid() for s in (False, True, "auto")}
    assert len(keys) == 3
    ranks = set()
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=dist.HashStore())
        ranks.add(FusionPass(sequence_parallel=True).uuid())
        dist.destroy_process_group()
    assert len(ranks) == 2, "a graph that takes a rank's own rows is that rank's"


def differing(rank: int, world: int) -> tuple[list[float], str, str]:
    """Rank 0 has no sequence parallelism, then all ranks have it."""
    x, w, r, n, v = inputs(rank, torch.float32)
    want = behind_a_product(*(t.double() for t in (x, w, r, n, v)))
    errors, said = [], []
    for setting in (rank != 0, True):
        torch._dynamo.reset()
        fusion = FusionPass(sequence_parallel=setting)
        with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
            got = torch.compile(behind_a_product, options=fusion.options)(x, w, r, n, v)
        errors.append(((got.double() - want).norm() / want.norm()).item())
        said.append(str(fusion.report()))
    return errors, said[0], said[1]


def test_ranks_of_which_one_has_it_run_as_they_were() -> None:
    for rank, (errors, first, second) in enumerate(run_ranks(differing, 2)):
        assert max(errors) < 1e-5
        assert f"rank {1 - rank} runs another graph" in first, first
        assert ("sequence parallel" in first) == (rank != 0)
        assert "2 of 2 collectives fused" in second and "unfused" not in second, second
