"""weft::moe_route: where the tokens of a mixture of experts go; ``experts.moe_route`` documents it."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.device.capability import why_no_kernel_on
from ....kernels.moe_route.reference import MOST_EXPERTS, reference_route
from ..op import define


def validate_route(ids: Tensor, num_experts: int, first: int, count: int) -> None:
    """Refuses what ``moe_route`` cannot take."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids: is {ids.dtype}, must be int32 or int64")
    if ids.dim() != 2:
        raise ValueError(f"topk_ids: has {ids.dim()} dimensions, must have 2: [T, k]")
    if num_experts < 1:
        raise ValueError(f"num_experts: is {num_experts}, must be at least 1")
    if not 0 <= first < num_experts:
        raise ValueError(f"first_expert: is {first}, must be from 0 to {num_experts - 1}")
    if not 1 <= count <= min(num_experts - first, MOST_EXPERTS):
        most = min(num_experts - first, MOST_EXPERTS)
        raise ValueError(
            f"num_local_experts: is {count}, must be from 1 to {most}, with first_expert {first}"
        )
    if ids.numel() >= 1 << 31:
        raise ValueError(f"topk_ids: has {ids.numel()} elements, must have fewer than 2**31")


def has_route_kernel(ids: Tensor) -> bool:
    return ids.device.type == "cuda" and why_no_kernel_on("moe_route", ids.device) is None


def run_route(ids: Tensor, num_experts: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the op, of what was validated, on the current device."""
    if not has_route_kernel(ids):
        return reference_route(ids, first, count)
    from ....kernels.moe_route.cuda_kernel import launch_route

    return launch_route(ids.contiguous(), first, count)


def _fake(ids: Tensor, num_experts: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, slots = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.shape, dtype=torch.int32)
    return rows, ids.new_empty(count, dtype=torch.int32), slots


define(
    "moe_route(Tensor topk_ids, int num_experts, int first_expert, int num_local_experts)"
    " -> (Tensor, Tensor, Tensor)",
    validate_route,
    run_route,
    _fake,
)
