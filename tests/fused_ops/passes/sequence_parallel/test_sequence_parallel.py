"""All-reduces that become reduce-scatters and all-gathers, with each rank's own rows between: against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import AG, RS, applied, copied, fake_ranks
from ranks import run_ranks
from spelled import ar
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.proxy_tensor import make_fx
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.agreement.guard import GraphGuard

GATHER, SCATTER = "weft::one_shot_all_gather", "weft::one_shot_reduce_scatter"
REDUCE = "weft::one_shot_all_reduce"
HIDDEN = 8


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def own_rows(x: Tensor, dim: int = 0) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def after_a_product(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
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
    y = r + ar(x.sin() @ w)
    return norm(y, n) @ v, r


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


def the_first_half(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor) -> Tensor:
    """The same rows on all ranks, which on rank 0 are its own chunk."""
    return norm(r + ar(x @ w), n).chunk(dist.get_world_size())[0] @ v


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
    after_a_product: [RS, AG],
    of_no_product: [SCATTER, AG],
    unrounded: [RS, AG, RS, AG],
    average_and_layer_norm: [RS, AG],
    layers: [RS, AG, RS, AG] * 2,
    residual_returned: [RS, GATHER, RS, AG],
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


def compared(rank: int, world: int, fn: Callable[..., Any], dtype: torch.dtype, agree: bool = True) -> Any:
    """What became of the collectives, and the errors with the pass and without."""
    given = inputs(rank, dtype)
    traced, fusion = graph_of(fn, given), FusionPass(sequence_parallel=True, agree=agree)
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
    return [e.fused_into for e in fusion.report().entries], errors, fusion.report().details()


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


@pytest.mark.parametrize("fn", [a_chunk, the_first_half])
def test_a_chunk_that_is_not_compared_is_of_all_rows(fn: Callable[..., Any]) -> None:
    """Rank 0 cannot tell the two apart."""
    found = run_ranks(compared, 2, fn, torch.float32, False)
    assert {tuple(fused) for fused, _, _ in found} == {(RS, GATHER)}, found[0][-1]
    for _, (with_it, without), _ in found:
        assert with_it <= 1.5 * without + 1e-7, (with_it, without)


def questions_about(rank: int, world: int, fn: Callable[..., Any]) -> list[str]:
    graph = graph_of(fn, inputs(rank, torch.float32)).graph
    FusionPass(sequence_parallel=True)(graph)
    asked = graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default)
    return [GraphGuard(str(question.args[0])).name for question in asked]


def test_ranks_that_take_a_chunk_differently_are_told_apart() -> None:
    first, second = run_ranks(questions_about, 2, the_first_half)
    assert first and first != second
    first, second = run_ranks(questions_about, 2, a_chunk)
    assert first and first == second


def test_a_residual_before_the_norm_is_added_by_the_op() -> None:
    with fake_ranks(2):
        graph = graph_of(layers, inputs(0, torch.float32)).graph
        seen = applied(graph, FusionPass(agree=False, sequence_parallel=True))
    assert sum("residual added" in e.detail for e in seen.entries) == 4
    assert {e.detail for e in seen.entries if e.fused_into == AG} == {"1 product"}
    full = [n for n in seen.after.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
    rows = [n.name for n in full if tuple(n.meta["val"].shape) == (12, HIDDEN)]
    assert not rows, "all rows of the residual stream"
