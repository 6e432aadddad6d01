"""Which GPUs each op's kernel runs on: one table, by the folder of the kernel."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import torch

Capability: TypeAlias = tuple[int, int]

HOPPER: Capability = (9, 0)
#: Compute capabilities, by the folder of the kernel.
RUNS_ON: dict[str, tuple[Capability, ...]] = {
    "all_gather": (HOPPER,),
    "all_gather_matmul": (HOPPER,),
    "all_gather_scaled_matmul": (HOPPER,),
    "all_reduce": (HOPPER,),
    "all_reduce_rms_norm": (HOPPER,),
    "async_collectives": (HOPPER,),
    "grouped_matmul": (HOPPER,),
    "matmul_all_reduce": (HOPPER,),
    "matmul_reduce_scatter": (HOPPER,),
    "moe_route": (HOPPER,),
    "reduce_scatter": (HOPPER,),
    "scaled_matmul_reduce_scatter": (HOPPER,),
}
#: Those on which torch multiplies with block-wise scales, from CUDA 12.9 on.
BLOCK_PRODUCTS: tuple[Capability, ...] = (HOPPER,)


@cache
def capability_of(device: torch.device) -> Capability:
    """That of a CUDA device. A GPU that is not there, as plans may ask about, is taken to be an H200."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER


def why_no_kernel_on(kernel: str, device: torch.device) -> str | None:
    """Why a kernel does not run on a device; None if it does, or if that is the CPU."""
    if device.type != "cuda" or capability_of(device) in RUNS_ON[kernel]:
        return None
    return f"the kernels are for GPUs of compute capability {capabilities_text(RUNS_ON[kernel])}"


def capabilities_text(capabilities: tuple[Capability, ...]) -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in capabilities)
