"""All-reduces that look as if they could be on own rows and cannot, and those that had better not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import AG, RS, applied, c10d, captured, fake_ranks
from ranks import run_ranks
from spelled import ar
from test_sequence_parallel import GATHER, HIDDEN, after_a_product, inputs, norm
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.agreement.guard import GraphGuard
from weft.fused_ops.passes.agreement.signature import Signature
from weft.fused_ops.passes.sequence_parallel.find import put_sequences_on_rows
from weft.fused_ops.passes.sequence_parallel.same import same_on_all_ranks
from weft.fused_ops.passes.settings import PassSettings


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
    """The norm before it is of a rank's own rows, the weight is multiplied where all rows are."""
    with fake_ranks(2):
        given = inputs(0, torch.float32)[:4]
        graph = make_fx(a_weight_of_its_own, tracing_mode="fake")(*given).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel=True))
    assert seen.fused == [RS, GATHER]


@pytest.mark.parametrize("on_rows", [True, False])
def test_all_reduces_that_are_merged_are_all_said(on_rows: bool) -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
        y = r + ar(x @ w) + ar(x.sin() @ w)
        return norm(y, n) @ v if on_rows else norm(y, n).cumsum(0) + y.cumsum(0)

    with fake_ranks(2):
        graph = make_fx(fn, tracing_mode="fake")(*inputs(0, torch.float32)).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel=True))
    how = (
        "sequence parallel, 2 all-reduces as one"
        if on_rows
        else "2 all-reduces as one, not sequence parallel: it"
    )
    assert how in seen.entries[0].detail, seen.entries


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
        (4096, 28672, 4096, True),
    ],
)
def test_auto_takes_what_the_measured_ops_say(hidden: int, columns: int, rows: int, taken: bool) -> None:
    """An output projection, and that of queries, keys and values after it: the sum of what each took on 2 H100."""
    shapes = (rows, hidden // 2), (hidden // 2, hidden), (rows, hidden), (hidden,), (hidden, columns // 2)
    with fake_ranks(2):
        with FakeTensorMode():
            given = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
            graph = make_fx(norm_between)(*given).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel="auto"))
    assert (seen.fused == [RS, AG]) == taken, seen.entries
    if not taken:
        assert "not sequence parallel: by the estimate it would save" in str(seen.entries[0])


def gathered_for_more(x: Tensor, residual: Tensor, n: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Something needs all rows of the sum, too, as a backward does that is not computed by rows."""
    y = residual + ar(x)
    return norm(y, n) @ v, y.cumsum(0)


@pytest.mark.parametrize("setting", ["auto", True])
def test_what_sends_more_is_left(setting: Any) -> None:
    """A reduce-scatter and two gathers, in place of an all-reduce, which sends as much as one of each."""
    with fake_ranks(2), FakeTensorMode():
        given = [torch.empty(s) for s in ((64, HIDDEN), (64, HIDDEN), (HIDDEN,), (HIDDEN, 6))]
        more, as_much = (make_fx(fn)(*given).graph for fn in (gathered_for_more, norm_of_sum))
        seen, other = (
            applied(g, FusionPass(agree=False, sequence_parallel=setting)) for g in (more, as_much)
        )
    assert "times the bytes" not in str(other.entries) and len(other.entries) == 2
    assert "not sequence parallel: it would send 1.5 times the bytes" in str(seen.entries[0])
    assert [e.collective for e in seen.entries] == ["all_reduce"]


def whole(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Of a softmax, say."""
    return ar(tangents @ v) + ((tangents * g).sum(-1, keepdim=True) * g.softmax(-1)) @ w


def two_routers(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(tangents @ v) + ((tangents * g) @ w + (tangents * g) @ v)


def of_two_weights(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(tangents @ v) + (tangents @ v) @ w


def of_a_part(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Each rank's own columns of a gradient that all have."""
    return ar(tangents @ v) + ar(tangents @ v)[:, : HIDDEN // 2] @ w[: HIDDEN // 2]


def of_a_derived_weight(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(tangents @ v) + tangents @ w.sin()


def not_reduced(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return tangents * g + tangents @ w


def reduced_by_max(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(tangents @ v, "max") + tangents @ w


def of_the_forward(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(x @ v) + (x * g) @ w


def of_own_tokens(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Of a vocabulary that the ranks share each rank has another part."""
    return ar(tangents @ v).where((g.long() < 3) | (g.long() >= 5), 0)


def of_a_relu(tangents: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ar(tangents @ v).where(g > 0, 0)


def of_own_tokens_forward(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The ranks compare their numbers before they run it."""
    return of_own_tokens(x, g, w, v)


@pytest.mark.parametrize(
    ("fn", "alike"),
    [
        (whole, True),
        (of_own_tokens, False),
        (of_a_relu, True),
        (of_own_tokens_forward, True),
        (two_routers, True),
        (of_two_weights, False),
        (of_a_part, False),
        (of_a_derived_weight, False),
        (not_reduced, False),
        (reduced_by_max, False),
        (of_the_forward, False),
    ],
)
def test_which_gradients_are_whole(fn: Callable[..., Tensor], alike: bool) -> None:
    with fake_ranks(2) as name, FakeTensorMode():
        given = [torch.empty(s) for s in ((12, HIDDEN), (12, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN))]
        graph = make_fx(fn, decomposition_table=select_decomp_table())(*given).graph
        (result,) = graph.output_node().all_input_nodes
        assert (result in same_on_all_ranks(graph, name)) == alike, graph


def norm_of_sum(x: Tensor, residual: Tensor, n: Tensor, v: Tensor) -> Tensor:
    return norm(residual + ar(x), n) @ v


def decoder(x: Tensor, residual: Tensor, *weights: Tensor) -> Tensor:
    """As bench/sequence_layers.py, with something else that mixes rows in the place of attention."""

    def normed(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        wide = residual.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * weight, residual

    for i in range(0, len(weights), 6):
        before, qkv, out, between, up, down = weights[i : i + 6]
        y, residual = normed(x, residual, before)
        x = ar((y @ qkv).unflatten(-1, (3, -1)).sum(1).cumsum(0) @ out)
        y, residual = normed(x, residual, between)
        gate, other = (y @ up).chunk(2, -1)
        x = ar((gate.sigmoid() * gate * other) @ down)
    return normed(x, residual, weights[0])[0] @ weights[1]


@pytest.mark.parametrize(("rows", "taken"), [(64, False), (1024, True), (4096, True)])
def test_auto_takes_the_layers_that_were_faster(rows: int, taken: bool) -> None:
    """Two layers of Llama 8B's sizes on 2 H200: bench/results/h200-x2-sequence-layers.txt. (8192 rows were 0.4 % slower
    on own rows, with gathers that have become 2 % faster since.)"""
    hidden, width, inner = 4096, 2048, 7168
    layer = [(hidden,), (hidden, 3 * width), (width, hidden), (hidden,), (hidden, 2 * inner), (inner, hidden)]
    with fake_ranks(2):
        with FakeTensorMode():
            shapes = [(rows, hidden), (rows, hidden), *layer, *layer]
            given = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
            graph = make_fx(decoder)(*given).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel="auto"))
    assert (seen.fused == [RS, AG] * 4) == taken, seen.entries
    assert taken or (len(seen.fused) == 4 and AG not in seen.fused)


@pytest.mark.parametrize("divisible", [True, False])
def test_dynamic_sizes(divisible: bool) -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
        if divisible:
            torch._check(x.shape[0] % 2 == 0)
        y = r + ar((x @ w).view(1, -1, HIDDEN))
        return norm(y, n) @ v

    with fake_ranks(2):
        x, w, r, n, v = inputs(0, torch.float32)
        given = x, w, r[None], n, v
        torch._dynamo.mark_dynamic(given[0], 0)
        torch._dynamo.mark_dynamic(given[2], 1)
        fusion = FusionPass(agree=False, sequence_parallel=True)
        with torch.no_grad():
            (seen,) = captured(fn, *given, fusion=fusion, dynamic=True)
    if divisible:
        assert seen.fused == [RS, AG] and "residual added" in seen.entries[0].detail
    else:
        assert (
            "rows are not known to be a multiple of 2 ranks" in seen.entries[0].detail
            and len(seen.fused) == 1
        )


def test_where_ranks_cannot_be_asked_nothing_changes() -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Tensor:
        return norm(r + ar(x @ w), n)

    with torch._inductor.config.patch(
        reorder_for_compute_comm_overlap=True,
        reorder_for_compute_comm_overlap_passes=["sink_waits_iterative"],
    ):
        assert "with which ranks may communicate in different orders" in left(fn)


def test_a_graph_that_takes_its_own_rows_is_that_ranks() -> None:
    ranks = set()
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=dist.HashStore())
        ranks.add(FusionPass(sequence_parallel=True).uuid())
        dist.destroy_process_group()
    assert len(ranks) == 2


def differing(rank: int, world: int) -> tuple[list[float], str, str]:
    """Rank 0 has no sequence parallelism, then all ranks have it."""
    x, w, r, n, v = inputs(rank, torch.float32)
    want = after_a_product(*(t.double() for t in (x, w, r, n, v)))
    errors, said = [], []
    for setting in (rank != 0, True):
        torch._dynamo.reset()
        fusion = FusionPass(sequence_parallel=setting)
        with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
            got = torch.compile(after_a_product, options=fusion.options)(x, w, r, n, v)
        errors.append(((got.double() - want).norm() / want.norm()).item())
        said.append(fusion.report().details())
    return errors, said[0], said[1]


def test_ranks_of_which_one_has_it_run_as_they_were() -> None:
    for rank, (errors, first, second) in enumerate(run_ranks(differing, 2)):
        assert max(errors) < 1e-5
        assert f"rank {1 - rank} runs another graph" in first, first
        assert ("sequence parallel" in first) == (rank != 0)
        assert "2 of 2 collectives fused" in second and "unfused" not in second, second


def names(rank: int, world: int, numbers: tuple[float, float]) -> str:
    """What the ranks compare, where a rank multiplies the residual by its own one of the numbers."""

    def fn(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
        return norm(r * numbers[rank] + ar(x @ w), n) @ v

    graph = make_fx(fn, tracing_mode="fake")(*inputs(rank, torch.float32)).graph
    fusion = FusionPass(sequence_parallel=True)
    fusion(graph)
    assert fusion.report().fused == 2
    (question,) = graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default)
    return GraphGuard(str(question.args[0])).name


def test_numbers_of_what_is_taken_for_the_same_are_compared() -> None:
    assert len({*run_ranks(names, 2, (2.0, 2.0))}) == 1
    assert len({*run_ranks(names, 2, (2.0, 3.0))}) == 2


def test_what_meets_own_rows_is_compared() -> None:
    """Ranks that scale a residual by other numbers do not have it alike: their graphs must differ for the vote."""

    def scaled(number: float) -> Callable[..., Tensor]:
        return lambda x, r, n, v: norm_of_sum(x, r * number, n, v)

    digests = []
    with fake_ranks(2) as name, FakeTensorMode():
        given = [torch.empty(s) for s in ((64, HIDDEN), (64, HIDDEN), (HIDDEN,), (HIDDEN, 6))]
        for number in (2.0, 2.0, 3.0):
            graph = make_fx(scaled(number))(*given).graph
            put_sequences_on_rows(graph, PassSettings(sequence_parallel=True))
            assert graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)
            of_all = Signature(graph, {name: 0}, {name}, [], [], before={*graph.nodes})
            digests.append(of_all.digest)
    assert digests[0] == digests[1] != digests[2]
