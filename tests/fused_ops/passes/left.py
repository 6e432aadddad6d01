"""What the tests of near misses share: the collectives as ops, and the check that nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Seen, applied, c10d, fake_ranks, traced
from torch import Tensor
from weft.fused_ops.passes import FusionPass

GROUP: list[str] = []


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_ranks(2) as group:
        GROUP[:] = [group]
        yield


def ag(x: Tensor, world: int = 2) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, world, GROUP[0]))


def rs(x: Tensor, op: str = "sum", world: int = 2) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, world, GROUP[0]))


def seen(fn: Callable[..., Any], *inputs: Tensor, fusion: FusionPass | None = None) -> Seen:
    return applied(traced(fn, *inputs), fusion)


def check_left(
    fn: Callable[..., Any], reason: str, *inputs: Tensor, fusion: FusionPass | None = None
) -> None:
    found = seen(fn, *inputs, fusion=fusion)
    assert found.entries
    assert set(found.fused) == {None}
    assert reason in found.reasons, found.reasons
    assert str(found.after) == str(found.before)


W3 = torch.randn(3, 8)
X3, X2, W8 = torch.randn(2, 6, 8), torch.randn(6, 8), torch.randn(8, 5)
