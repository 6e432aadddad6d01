"""What the tests of what is added after a reduce-scatter share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import Seen, applied, c10d, check_same, fake_ranks, traced
from torch import Tensor, fx

aten = torch.ops.aten
wait = c10d.wait_tensor
Fn = Callable[..., Any]
Shape = tuple[int, ...]

# Operands, a bias and a residual of one of two ranks.
X, W, B, R = (12, 8), (8, 6), (6,), (6, 6)
RESIDUAL, BOTH = {"residual"}, {"bias", "residual"}


@pytest.fixture
def two() -> Iterator[None]:
    with fake_ranks(2):
        yield


def group() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def scattering(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.reduce_scatter_tensor(x, op, dist.get_world_size(), group())


def rs(x: Tensor, op: str = "sum") -> Tensor:
    return wait(scattering(x, op))


def only(fn: Fn, *shapes: Shape, dtype: torch.dtype = torch.float32) -> Seen:
    """The graph as the function is written, with the pass and without: both compute the same."""
    seen = applied(traced(fn, *(torch.randn(s, dtype=dtype) for s in shapes)))
    check_same(seen, dist.get_world_size())
    return seen


def taken(seen: Seen) -> list[set[str]]:
    """What each op of the graph adds."""
    ops = seen.after.find_nodes(op="call_function", target=torch.ops.weft.fused_matmul_reduce_scatter.default)
    return [{*n.kwargs} & {"bias", "residual"} for n in ops]


def additions(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.add.Tensor))
