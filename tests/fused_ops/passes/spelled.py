"""Collectives as traced graphs spell them, and what the pass makes of functions that are written with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graphs import Seen, applied, c10d, check_same, traced
from torch import Tensor, fx
from weft.fused_ops.passes import FusionPass

aten = torch.ops.aten
wait = c10d.wait_tensor
Fn = Callable[..., Any]
Shape = tuple[int, ...]


def group() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def gathering(x: Tensor, world: int | None = None) -> Tensor:
    return c10d.all_gather_into_tensor(x, world or dist.get_world_size(), group())


def scattering(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.reduce_scatter_tensor(x, op, dist.get_world_size(), group())


def reducing(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.all_reduce(x, op, group())


def ag(x: Tensor, world: int | None = None) -> Tensor:
    return wait(gathering(x, world))


def rs(x: Tensor, op: str = "sum") -> Tensor:
    return wait(scattering(x, op))


def ar(x: Tensor, op: str = "sum") -> Tensor:
    return wait(reducing(x, op))


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    """As programs spell it."""
    return funcol.all_reduce(x, op, dist.distributed_c10d._get_default_group())


def seen_of(
    fn: Fn, *given: Tensor | Shape, fusion: FusionPass | None = None, dtype: torch.dtype = torch.float32
) -> Seen:
    """The graph as the function is written, with the pass and without."""
    tensors = [x if isinstance(x, Tensor) else torch.randn(x, dtype=dtype) for x in given]
    return applied(traced(fn, *tensors), fusion)


def only(fn: Fn, *given: Tensor | Shape, **named: Any) -> Seen:
    """The same; both compute the same."""
    seen = seen_of(fn, *given, **named)
    check_same(seen, dist.get_world_size())
    return seen


def check_left(fn: Fn, reason: str, *given: Tensor | Shape, fusion: FusionPass | None = None) -> None:
    """The graph does not change at all."""
    found = seen_of(fn, *given, fusion=fusion)
    assert found.entries
    assert set(found.fused) == {None}
    assert reason in found.reasons, found.reasons
    assert str(found.after) == str(found.before)


def taken(seen: Seen) -> list[set[str]]:
    """What each op of the graph adds after a reduce-scatter."""
    ops = seen.after.find_nodes(op="call_function", target=torch.ops.weft.fused_matmul_reduce_scatter.default)
    return [{*n.kwargs} & {"bias", "residual"} for n in ops]


def additions(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=aten.add.Tensor))
