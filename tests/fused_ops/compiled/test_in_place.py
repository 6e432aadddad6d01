"""Compiled calls that write where they are told: to parts of a tensor, and to what autograd has saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opcommon import world
from ranks import on_ranks
from torch import Tensor
from weft.fused_ops import one_shot_all_gather, one_shot_all_reduce_, one_shot_reduce_scatter

W = 2
CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: one_shot_all_reduce_(x, "sum", world()),
    "all_gather": lambda x: one_shot_all_gather(x[: len(x) // W] + 1, 0, world(), out=x),
    "reduce_scatter": lambda x: one_shot_reduce_scatter(x.repeat(W, 1), "sum", 0, world(), out=x),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(W)
def test_a_part_of_a_tensor(rank: int, world_size: int, name: str) -> None:
    """Its value is needed before and after each call, and what lies beside it stays."""
    write = CALLS[name]

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        before = x.sin()
        write(x)
        between = (x.clone() * w).cos()
        write(x)
        return before, between, x * w

    for first, train in ((4, True), (0, False)):
        torch._dynamo.reset()
        whole = torch.randint(-9, 9, (9, 5)).float()
        kept, w = whole.clone(), torch.rand(5, requires_grad=train)
        mine, theirs = (t[first : first + 4] for t in (whole, kept))
        for got, want in zip(torch.compile(step, fullgraph=True)(mine, w), step(theirs, w), strict=True):
            torch.testing.assert_close(got, want, rtol=2**-20, atol=2**-20)
        assert torch.equal(whole, kept)


@pytest.mark.parametrize("name", CALLS)
@on_ranks(W)
def test_what_a_gradient_needs_is_not_overwritten(rank: int, world_size: int, name: str) -> None:
    """Refused as it is in eager mode."""
    w = torch.full((5,), 0.5, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = (x * w).sum()
        CALLS[name](x)
        return y

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="modified by an inplace operation"):
            torch.compile(step, backend=backend)(torch.ones(4, 5)).backward()
