"""Graphs of forward and backward are changed before ranks vote: if numbers then differ that were taken to be the same
on all ranks, each rank raises an error; and no rank does in programs that are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gathered_losses import own_gradient, summed_gradient
from opcommon import BOUND, check
from ranks import run_ranks
from test_ranks_that_differ import compiler
from torch import Tensor, fx
from torch.distributed import _functional_collectives as funcol
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement import fallback_graph
from weft.fused_ops.passes.agreement.guard import GraphGuard
from weft.fused_ops.passes.agreement.signature import NUMBERS, _computed, compare, note_numbers
from weft.fused_ops.passes.graph.nodes import aten, c10d
from weft.symm_mem import WeftError

HIDDEN, INNER, WIDTH = 8, 12, 10
Program = Callable[..., Any]


class Summed(torch.autograd.Function):
    """After a row-parallel layer, or backward in front of a column-parallel one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, backward: bool) -> Tensor:
        ctx.group, ctx.backward = group, backward
        return x.view_as(x) if backward else funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Summed.forward(ctx, grad, ctx.group, not ctx.backward), None, None


def inner(group: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return Summed.apply(F.silu(Summed.apply(x, group, True) @ a) @ b, group, False)


def head(group: Any, y: Tensor, norm: Tensor, c: Tensor) -> Tensor:
    return Summed.apply(F.rms_norm(y, (HIDDEN,), norm), group, True) @ c


def of_rows(number: float, group: Any, x: Tensor, norm: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return head(group, (x + inner(group, x, a, b)).sin() * number, norm, c)


def met(number: float, group: Any, x: Tensor, norm: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return head(group, x * number + inner(group, x, a, b), norm, c)


def broken(number: float, group: Any, x: Tensor, norm: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    """Rank 0 computes outside of the graph what meets own rows inside of the others', in the backward."""
    for _ in range(2):
        x = x + inner(group, F.rms_norm(x, (HIDDEN,), norm), a, b)
    if dist.get_rank() == 0:
        torch._dynamo.graph_break()
    return x, number * x


def with_data(number: float, group: Any, x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
    """And a reduction over another group."""
    y = of_rows(number, group, x, norm, *weights)
    return y * funcol.all_reduce((norm @ norm.outer(norm)).exp(), "sum", DATA[0]).sum()


def loss(gathered: Program, number: float, group: Any, x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
    """The graph of its forward has no collective but the loss."""
    logits = gathered(x * norm, weights[-1].t()) * number
    return F.cross_entropy(logits.flatten(0, -2), torch.arange(x[..., 0].numel()) % WIDTH)


def loss_by_temperature(number: float, group: Any, x: Tensor, *weights: Tensor) -> Tensor:
    """Of each row."""
    logits = own_gradient(x, weights[-1].t()) * (x.detach().mean(-1, keepdim=True) + number)
    return F.cross_entropy(logits.flatten(0, -2), torch.arange(x[..., 0].numel()) % WIDTH)


DATA: list[Any] = []


def tensors(group: Any, rows: int) -> tuple[Tensor, ...]:
    """The input, and weights: those of products are a rank's own, the others the group's."""
    given = [torch.randn(rows, 6, HIDDEN), torch.rand(HIDDEN)]
    for t in given:
        dist.broadcast(t, dist.get_global_rank(group, 0), group)
    given += [torch.randn(shape) / 3 for shape in ((HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, WIDTH))]
    return tuple(t.requires_grad_() for t in given)


def trained(fn: Program, number: float, group: Any, sizes: tuple[int, ...] = (2,)) -> tuple[str, int, bool]:
    """The error; how many collectives were fused; whether ranks disagreed."""
    with compiler():
        fusion = FusionPass(fuse="always", sequence_parallel=True, loss_parallel=True)
        fusion.clear()
        ours = torch.compile(partial(fn, number, group), options=fusion.options, dynamic=len(sizes) > 1)
        for rows in sizes * 2:
            given = tensors(group, rows)
            exact = [t.detach().double().requires_grad_() for t in given]
            try:
                got = ours(*given)
            except WeftError as e:
                return str(e), fusion.report().fused, bool(fusion.report().disagreements)
            want = fn(number, group, *exact)
            last = [y[-1] if isinstance(y, tuple) else y for y in (got, want)]
            check("result", *last, 4 * BOUND[torch.float32])
            for y in (got, want):
                sum(t.square().sum() for t in (y if isinstance(y, tuple) else (y,))).backward()
            for i, (t, e) in enumerate(zip(given, exact, strict=True)):
                if e.grad is not None:
                    assert t.grad is not None
                    check(f"gradient {i}", t.grad, e.grad, 8 * BOUND[torch.float32])
        return "", fusion.report().fused, bool(fusion.report().disagreements)


PROGRAMS: dict[str, Program] = {
    "of rows": of_rows,
    "of what meets them": met,
    "of logits": partial(loss, own_gradient),
    "of logits, summed": partial(loss, summed_gradient),
    "of rows of logits": loss_by_temperature,
}


def one_by_one(rank: int, world: int, name: str) -> list[tuple[str, int, bool]]:
    """Numbers that differ, one of which changes nothing, and then the same."""
    return [trained(PROGRAMS[name], number, dist.group.WORLD) for number in (1 + rank, 1.5)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_ranks(name: str) -> None:
    """Votes after the error have no posts of before."""
    for (other, *_), (error, fused, differed) in run_ranks(one_by_one, 2, name):
        assert "has other numbers than another rank" in other
        assert not error and fused and not differed, (error, fused)


def unfused(rank: int, world: int) -> list[str]:
    with mock.patch.object(fallback_graph, "why_not_voted", return_value="not here"):
        found = [trained(of_rows, 1.5 + each * rank, dist.group.WORLD) for each in (0, 2)]
    assert not any(fused for _, fused, _ in found)
    return [error for error, *_ in found]


def test_where_nothing_is_fused() -> None:
    for same, other in run_ranks(unfused, 2):
        assert not same and "results would be wrong" in other


def turns_of_a_loss(rank: int, world: int) -> list[bool]:
    """Of the forward's graph, where nothing is left that the pass could fuse."""
    taken, turn = [], GraphGuard.turn

    def noted(self: GraphGuard, sizes: tuple[int, ...] = ()) -> Any:
        found = turn(self, sizes)
        taken.append(found is not None and not self._unasked)
        return found

    with mock.patch.object(GraphGuard, "turn", noted):
        assert not trained(partial(loss, own_gradient), 1.5, dist.group.WORLD)[0]
    return taken


def test_a_loss_alone_takes_its_turn() -> None:
    """So that its calls meet where those of other graphs do, also where Inductor records it in CUDA graphs. And it asks
    each time: where nothing is fused nobody runs ahead."""
    for taken in run_ranks(turns_of_a_loss, 2):
        assert taken and all(taken)


def right(rank: int, world: int, fn: Program, sizes: tuple[int, ...]) -> tuple[str, int, bool]:
    return trained(fn, 1.5, dist.group.WORLD, sizes)


def test_where_a_rank_has_less_in_its_graph() -> None:
    """What the others' graphs take and return is something else."""
    for error, _, differed in run_ranks(right, 2, broken, (2,)):
        assert not error and differed


def test_dynamic_sizes() -> None:
    for error, fused, differed in run_ranks(right, 2, of_rows, (2, 4, 3)):
        assert not error and fused and not differed


def of_two_dimensions(rank: int, world: int) -> tuple[str, int, bool]:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    DATA[:] = [groups[2 + rank % 2]]
    return trained(with_data, 1.5 + rank // 2, groups[rank // 2])


def test_numbers_and_rows_of_each_group() -> None:
    """They are compared among the ranks for which they are to be the same."""
    for error, fused, differed in run_ranks(of_two_dimensions, 4, fresh=True):
        assert not error and fused and not differed


def numbers_of(rows: int, number: float, device: str, returned: int = 1) -> int:
    graph = fx.Graph()
    x = graph.placeholder("x")
    full = graph.call_function(aten.full.default, ([rows, 4], number), {"device": torch.device(device)})
    flat = graph.call_function(aten.view.default, (full, [4 * rows]))
    total = graph.call_function(c10d.all_reduce.default, (flat, "sum", "g"))
    graph.output([x, total][:returned])
    compare([flat], "g")
    note_numbers(graph)
    assert NUMBERS not in full.meta
    return int(total.meta[NUMBERS])


def test_functions_of_sizes_have_no_addresses() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.sym_max, (graph.placeholder("size"), 64))
    assert " at 0x" in str(node.target) and " at 0x" not in _computed(node) and "64" in _computed(node)


def test_what_counts() -> None:
    """Neither sizes nor the rank's device; what the graph takes and returns is apart."""
    one = numbers_of(2, 1.5, "cuda:0")
    assert one == numbers_of(3, 1.5, "cuda:1") and one != numbers_of(2, 2.5, "cuda:0")
    assert one >> 32 == numbers_of(2, 2.5, "cuda:0") >> 32
    less = numbers_of(2, 1.5, "cuda:0", 2)
    assert less >> 32 != one >> 32 and less & 0xFFFFFFFF == one & 0xFFFFFFFF
