"""What predictions need to know of a GPU in addition to its SMs: its memory, in which Hopper's GPUs differ, and whether
it is one of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from ...symm_mem.backends import cuda_state
from .capability import has_tensor_memory, runs_on


@dataclass(frozen=True)
class DeviceSpec:
    """``memory``: bytes a microsecond, by its clock and width. ``l2``: bytes of L2 cache. ``has_gemm``: gemm.cuh runs
    there. ``tensor_memory``: by tcgen05."""

    memory: int
    l2: int
    has_gemm: bool = True
    tensor_memory: bool = False


H200 = DeviceSpec(4916736, 60 << 20)  #: constants are fitted to it unless they say otherwise
H100 = DeviceSpec(3352320, 50 << 20)


@cache
def device_spec_of(device: torch.device, *, scaled: bool = False) -> DeviceSpec:
    """That of a CUDA device with an index. What it does not say (a virtual GPU's clock is 0) is an H200's, and all of
    it where there is none. ``scaled``: for fp8 operands, which gemm.cuh takes by wgmma only."""
    if device.type != "cuda":
        return H200
    tensor_memory = has_tensor_memory(device)
    has_gemm = runs_on("all_gather_matmul/kernel.cu", device) and not (scaled and tensor_memory)
    if not torch.cuda.is_available():
        return replace(H200, has_gemm=has_gemm, tensor_memory=tensor_memory)
    found = cuda_state.state.memory(device)
    return DeviceSpec(found["memory"] or H200.memory, found["l2"] or H200.l2, has_gemm, tensor_memory)
