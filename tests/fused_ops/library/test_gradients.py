"""Gradients, and gradients of gradients, against those of the whole computation in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opcommon import DEVICES, world
from ranks import on_ranks
from references import held_gradients, held_second_gradients
from torch import Tensor
from weft import fused_ops

EPS = 0.1
Call = tuple[Callable[..., Any], dict[str, Any]]


def wanted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def collectives(size: int) -> Iterator[Call]:
    for dtype in (torch.float32, torch.float64):
        for dim in (0, 1, -1):
            yield fused_ops.one_shot_all_gather, {"x": wanted(4, 3, 2, dtype=dtype), "gather_dim": dim}
        for scatter, gather in ((0, 1), (1, 0), (-1, 1), (0, 0)):
            x = wanted(2 * size, size, size, dtype=dtype)
            yield fused_ops.one_shot_all_to_all, {"x": x, "scatter_dim": scatter, "gather_dim": gather}
    for reduce_op in ("sum", "avg"):
        yield fused_ops.one_shot_all_reduce, {"x": wanted(4, 3), "reduce_op": reduce_op}
        for dim in (0, 1, -1):
            shape = [2, 3, 2]
            shape[dim] *= size
            scattered = {"x": wanted(*shape), "reduce_op": reduce_op, "scatter_dim": dim}
            yield fused_ops.one_shot_reduce_scatter, scattered
    rows = {"x": wanted(4, 6), "residual": wanted(4, 6), "weight": wanted(6), "eps": EPS}
    yield fused_ops.fused_all_reduce_rms_norm, rows
    rows = {"x": wanted(4, 6), "residual": wanted(4, 6), "weight": wanted(6), "bias": wanted(6), "eps": EPS}
    yield fused_ops.fused_all_reduce_layer_norm, rows


def products(size: int) -> Iterator[Call]:
    for dim in (0, 1):
        yield (
            fused_ops.fused_matmul_all_to_all,
            {"A": wanted(2, 3, 5), "B": wanted(5, 4 * size), "gather_dim": dim},
        )
        heads = {"A": wanted(2 * size, 3 * size, 5), "B": wanted(5 * size, 4)}
        yield fused_ops.fused_all_to_all_matmul, {**heads, "scatter_dim": dim}
    yield fused_ops.fused_matmul_all_gather, {"A": wanted(2, 3, 5), "B": wanted(5, 4)}
    for reduce_op in ("sum", "avg"):
        given: dict[str, Any] = {"A": wanted(2, 5, 4), "B": wanted(4, 3), "reduce_op": reduce_op}
        yield fused_ops.fused_matmul_all_reduce, given
        for shape, n, dim in (((2 * size, 6), 5, 0), ((3, 4), 2 * size, 1), ((2, size, 5), 4, 1)):
            own = [*shape[:-1], n]
            own[dim] //= size
            for terms in ({}, {"bias": own[-1:]}, {"residual": own}, {"bias": own[-1:], "residual": own}):
                given = {"A": wanted(*shape), "B": wanted(shape[-1], n)}
                given |= {name: wanted(*of) for name, of in terms.items()}
                yield (
                    fused_ops.fused_matmul_reduce_scatter,
                    {**given, "reduce_op": reduce_op, "scatter_dim": dim},
                )
    for shape, dim, columns in (((4, 6), 0, [5]), ((4, 6), 1, [3, 8]), ((2, 3, 5), 1, [4, 2, 7])):
        for return_A in (True, False):
            k = shape[-1] * (size if dim == len(shape) - 1 else 1)
            given = {"A_shard": wanted(*shape), "Bs": [wanted(k, n) for n in columns]}
            yield fused_ops.fused_all_gather_matmul, {**given, "gather_dim": dim, "return_A": return_A}


def calls(size: int) -> Iterator[Call]:
    """Products also where the gradient of one of both operands alone is wanted."""
    yield from collectives(size)
    for constant in ("", "A", "B"):
        for function, given in products(size):
            yield function, {name: x.detach() if name == constant else x for name, x in given.items()}


@pytest.mark.parametrize("held", [held_gradients, held_second_gradients])
@on_ranks([1, 2, 3], device=DEVICES)
def test_gradients(rank: int, world_size: int, held: Callable[..., None]) -> None:
    for function, arguments in calls(world_size):
        more = {}
        if held is held_second_gradients:
            if (
                "A" in arguments
                and "bias" in arguments
                and arguments["scatter_dim"] < arguments["A"].dim() - 1
            ):
                continue  # a bias that all ranks hold alike is that of a row-parallel layer
            more = {"bound": 1e-5 if "all_to_all" in function.__name__ else 2e-5}
        held(function, **more, **arguments, group=world())
