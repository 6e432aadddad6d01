"""When which kernels ran on the GPU, from a profile of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

#: (lane, start, end) in microseconds from the step's first kernel.
Interval = tuple[str, float, float]
#: What kernels do, and their colours in pictures.
LANES = {"matmul": "green", "fused": "blue", "communication": "red", "other": "grey"}
_ATTENTION = ("flash_fprop", "flash_fwd", "fmha_cutlassF")  # forward


class Kernel(NamedTuple):
    """When it ran, in microseconds."""

    name: str
    start: float
    end: float


def lane_of(kernel: str) -> str:
    """ "communication" is what does nothing else, by NCCL or weft; "fused" is weft's products that communicate."""
    name = kernel.lower()
    if "nccl" in name:
        return "communication"
    if name.startswith(
        ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "two_shot_matmul")
    ):
        return "fused"
    if name.startswith(("one_shot", "two_shot", "acquire", "leave", "all_reduce", "barrier", "memcpy ptop")):
        return "communication"
    products = ("gemm", "cutlass", "nvjet", "sm90_xmma", "flash", "cudnn", "fmha", "triton_tem_", "triton_mm")
    return "matmul" if any(word in name for word in products) else "other"


def kernels_of(run: Callable[[], Any]) -> list[Kernel]:
    """Of the second of two steps."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    found = [
        Kernel(e.name, float(e.time_range.start), float(e.time_range.end))
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def intervals(kernels: Sequence[Kernel]) -> list[Interval]:
    first = min((kernel.start for kernel in kernels), default=0.0)
    return sorted((lane_of(k.name), k.start - first, k.end - first) for k in kernels)


def forward_layer(kernels: Sequence[Kernel]) -> list[Interval]:
    """A layer of the forward, from after one attention to the next, in the middle; empty without two of them."""
    ends = [k.end for k in kernels if any(word in k.name for word in _ATTENTION)]
    if len(ends) < 2:
        return []
    begin, end = ends[(len(ends) - 1) // 2 :][:2]
    inside = [k for k in kernels if begin <= k.start and k.end <= end]
    return sorted(
        ((lane_of(k.name), k.start - begin, k.end - begin) for k in inside), key=lambda kernel: kernel[1]
    )


def busy(kernels: Sequence[Interval]) -> float:
    """Milliseconds in which a kernel runs that is none of communication alone."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((s, e) for lane, s, e in kernels if lane != "communication"):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def slowest(time: float, device: torch.device) -> float:
    """The largest of the ranks' times: GPUs of one host differ by some percent, and all keep the slowest one's pace."""
    largest = torch.tensor(time, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
