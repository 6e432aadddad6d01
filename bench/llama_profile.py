"""When which kernels ran on the GPU, from a profile of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: (lane, start, end) in microseconds from the step's first kernel.
Interval = tuple[str, float, float]


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


def intervals(run: Callable[[], Any]) -> list[Interval]:
    """Of the second of two steps."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    found = [
        (lane_of(e.name), float(e.time_range.start), float(e.time_range.end))
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    first = min((start for _, start, _ in found), default=0.0)
    return sorted((lane, start - first, end - first) for lane, start, end in found)


def busy(kernels: Sequence[Interval]) -> float:
    """Milliseconds in which a kernel runs that is none of communication alone."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((s, e) for lane, s, e in kernels if lane != "communication"):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3
