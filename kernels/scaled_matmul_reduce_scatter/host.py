"""CPU ranks: as matmul_reduce_scatter (its host.py); what travels is rounded to the result's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.copy_thread import sum_of_products

OP = "fused_scaled_matmul_reduce_scatter"


def host_scaled_scatter_layout(numel: int, itemsize: int, world_size: int) -> Layout:
    """The workspace; a result has ``numel`` numbers."""
    return Layout(world_size, 1, world_size * numel * itemsize)


def host_scaled_matmul_reduce_scatter(
    workspace: Workspace,
    product_for: Callable[[int], torch.Tensor],
    reduce_op: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The sum over ranks of the partial results for this one, in ``out_dtype``.

    Args:
        product_for: computes the partial result that a rank shall own, in float32, all of one shape.
    """
    return sum_of_products(workspace, OP, product_for, reduce_op, out_dtype).to(out_dtype)
