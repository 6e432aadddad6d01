"""Gradients of gradients, against those of the whole computation in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from opcommon import DEVICES, world
from ranks import on_ranks
from references import held_second_gradients
from torch import Tensor
from weft import fused_ops

EPS = 0.1


def calls(size: int) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    def wanted(*shape: int) -> Tensor:
        return torch.randn(shape).requires_grad_()

    for dim, return_A in product((0, 1), (False, True)):
        Bs = [wanted(3 * size if dim else 3, 5)]
        given = {"A_shard": wanted(4, 3), "Bs": Bs, "gather_dim": dim, "return_A": return_A}
        yield fused_ops.fused_all_gather_matmul, given
    # A bias of columns that are cut. One that all ranks hold alike is that of a row-parallel layer.
    more = {"bias": wanted(5), "residual": wanted(4, 5)}
    product_of = {"A": wanted(4, 3), "B": wanted(3, 5 * size)}
    yield fused_ops.fused_matmul_reduce_scatter, {**product_of, "reduce_op": "avg", "scatter_dim": 1, **more}
    of_B = {"A": torch.randn(4, 3), "B": wanted(3, 5 * size), "reduce_op": "sum", "scatter_dim": 1}
    yield fused_ops.fused_matmul_reduce_scatter, of_B
    yield fused_ops.fused_matmul_all_reduce, {"A": wanted(4, 3), "B": wanted(3, 5), "reduce_op": "sum"}
    yield fused_ops.fused_matmul_all_to_all, {"A": wanted(4, 5), "B": wanted(5, 2 * size), "gather_dim": 0}
    yield fused_ops.fused_all_to_all_matmul, {"A": wanted(4, 5), "B": wanted(5 * size, 3), "scatter_dim": 0}
    yield fused_ops.one_shot_all_reduce, {"x": wanted(4, 3), "reduce_op": "avg"}
    yield fused_ops.one_shot_all_gather, {"x": wanted(4, 3), "gather_dim": 1}
    yield fused_ops.one_shot_reduce_scatter, {"x": wanted(4, 3 * size), "reduce_op": "avg", "scatter_dim": 1}
    yield fused_ops.one_shot_all_to_all, {"x": wanted(4, 3 * size), "scatter_dim": 1, "gather_dim": 0}
    rows = {"x": wanted(4, 6), "residual": wanted(4, 6), "weight": wanted(6), "eps": EPS}
    yield fused_ops.fused_all_reduce_rms_norm, rows
    rows = {"x": wanted(4, 6), "residual": wanted(4, 6), "weight": wanted(6), "bias": wanted(6), "eps": EPS}
    yield fused_ops.fused_all_reduce_layer_norm, rows


@on_ranks(2, device=DEVICES)
def test_second_gradients(rank: int, world_size: int) -> None:
    for function, arguments in calls(world_size):
        around_all_to_all = "all_to_all" in function.__name__
        held_second_gradients(function, 1e-5 if around_all_to_all else 2e-5, **arguments, group=world())
