"""Numbers that a rank alone multiplies by: what is moved from one side of a collective to the other is compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opcommon import BOUND, check
from ranks import run_ranks
from test_pass_on_gpus import gather, scatter, world
from test_ranks_that_differ import compiler
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from weft.fused_ops import cross_entropy_of_sharded_logits
from weft.fused_ops.passes import FusionPass

PROGRAMS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "a gathered tensor": lambda x, w, c: (gather(x) * c) @ w,
    "a gathered tensor, divided": lambda x, w, c: (gather(x) / c) @ w,
    "a part of a sum": lambda x, w, c: scatter((x @ w) * c),
    "one of two products": lambda x, w, c: scatter(x @ w + c * ((x + 1) @ w)),
    "both of them, less": lambda x, w, c: scatter((x @ w) * c - c * ((x + 1) @ w)),
    "a part of a sum for all": lambda x, w, c: funcol.all_reduce((x @ w) / c, "sum", world()),
}
# What each rank does to its own result stays there.
LOCAL: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "a product": lambda x, w, c: (gather(x) @ w) * c,
    "its part": lambda x, w, c: scatter(x @ w) * c,
    "the sum": lambda x, w, c: funcol.all_reduce(x @ w, "sum", world()) * c,
}


def fused_and_told(rank: int, size: int, name: str, c: float, each: float) -> tuple[int, bool]:
    fn, number = (PROGRAMS | LOCAL)[name], c + each * rank
    with compiler():
        fusion = FusionPass(fuse="always")
        fusion.clear()
        ours = torch.compile(lambda x, w: fn(x, w, number), options=fusion.options, dynamic=False)
        x, w = torch.randn(6, 8), torch.randn(8, 10)
        for _ in range(2):
            got, want = ours(x, w), fn(x.double(), w.double(), number)
            check("result", got, want, 4 * BOUND[torch.float32])
        report = fusion.report()
        return report.fused, any("addends or factors" in d.reason for d in report.disagreements)


@pytest.mark.parametrize("name", [*PROGRAMS, *LOCAL])
def test_equal_numbers(name: str) -> None:
    for fused, told in run_ranks(fused_and_told, 2, name, 1.5, 0.0):
        assert fused >= 1
        assert not told


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_ranks(name: str) -> None:
    """The ranks run such a graph as it is, and the report says why."""
    for fused, told in run_ranks(fused_and_told, 2, name, 1.5, 2.0):
        assert not fused
        assert told


@pytest.mark.parametrize("name", LOCAL)
def test_numbers_of_results(name: str) -> None:
    for fused, told in run_ranks(fused_and_told, 2, name, 1.5, 2.0):
        assert fused >= 1
        assert not told


def own_columns(rank: int, size: int) -> None:
    """Where a rank's columns of a vocabulary start, and how many it has, is its own affair."""

    def fn(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_of_sharded_logits(gather(x) @ w, targets, world(), vocab_start=10 * rank)

    x, w = torch.randn(6, 8), torch.randn(8, 10 - 3 * rank)
    targets = torch.arange(6 * size) % 10
    with compiler():
        fusion = FusionPass(fuse="always")
        ours = torch.compile(fn, options=fusion.options, dynamic=False)
        for _ in range(2):
            check("loss", ours(x, w, targets), fn(x, w, targets), 1e-5)
    report = fusion.report()
    assert report.fused == 1 and not report.disagreements, report


def test_columns_of_ranks() -> None:
    run_ranks(own_columns, 2)
