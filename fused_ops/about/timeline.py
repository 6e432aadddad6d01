"""A picture of one call on all ranks, from torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ...symm_mem import Group, resolve_group

COMPUTES, COPIES, WAITS, OTHER = "computes", "copies", "waits", "other"
_COLOURS = {COMPUTES: "#4c956c", COPIES: "#2b6cb0", WAITS: "#c8553d", OTHER: "#cfd8e3"}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "gemm", "cutlass", "nvjet", "matmul")
_COPIES = ("aten::copy_", "memcpy", "memset")


class Span(NamedTuple):
    """Attributes:
    begin, end: nanoseconds since 1970.
    """

    lane: str
    kind: str
    name: str
    begin: int
    end: int


def timeline(
    call: Callable[[], object],
    file: str | os.PathLike[str] | None = None,
    *,
    group: Group = None,
    warm_up: int = 2,
) -> str:
    """A picture of one call on all ranks: when each waits, copies and computes.

    >>> import torch
    >>> import weft
    >>> x, w = torch.randn(64, 32), torch.randn(32, 16)
    >>> svg = weft.passes.timeline(lambda: weft.fused_all_gather_matmul(x, [w], 0, None))
    >>> svg.startswith("<svg")
    True

    It has a lane for each thread of a rank's host, and on CUDA for each of its streams, of one scale: ranks of one host
    share a clock. What it shows comes from torch.profiler: ops and kernels, copies, and between CPU ranks weft's waits
    for another rank. On CUDA a kernel is one bar, whatever it waits for inside. The tip over a bar names it.

    All ranks of the group call it. Whatever ``call`` is, an op, a layer or a step, it is made ``warm_up`` times before.

    Args:
        call: takes nothing.
        file: where rank 0 writes the picture.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        warm_up: 0 or more.

    Returns:
        the SVG, the same on all ranks.

    Raises:
        ValueError: ``warm_up`` is below 0, or ``file`` is named as what is no SVG.
        OSError: the file cannot be written.
    """
    if warm_up < 0:
        raise ValueError(f"warm_up: is {warm_up}, must be 0 or more")
    if file is not None and Path(file).suffix.lower() not in ("", ".svg"):
        raise ValueError(f"file: is {os.fspath(file)!r}, must end in .svg: the picture is an SVG")
    from ..passes.order.picture import lanes_svg

    pg = resolve_group(group)
    for _ in range(warm_up):
        call()
    _synchronize()
    dist.barrier(group=pg)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=config) as profiled:
        call()
        _synchronize()
    found: list[list[Span]] = [[] for _ in range(pg.size())]
    dist.all_gather_object(found, _spans(profiled, pg.rank()), group=pg)
    spans = [Span(*span) for of_rank in found for span in of_rank]
    begin = min((span.begin for span in spans), default=0)
    lanes: dict[str, list[tuple[str, str, float, float]]] = {}
    for lane, kind, name, first, last in spans:
        lanes.setdefault(lane, []).append((kind, name, (first - begin) / 1e3, (last - begin) / 1e3))
    took = (max((span.end for span in spans), default=0) - begin) / 1e3
    svg = lanes_svg(f"One call on {pg.size()} ranks: {took:.0f} us", lanes, _COLOURS)
    if file is not None and pg.rank() == 0:
        Path(file).write_text(svg)
    return svg


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _spans(profiled: profile, rank: int) -> list[tuple[str, str, str, int, int]]:
    """In the order in which they are drawn: what is inside of another one after it."""
    results = profiled.profiler
    assert results is not None and results.kineto_results is not None
    start = results.kineto_results.trace_start_ns()
    spans, threads = [], dict[int, str]()
    for event in sorted(profiled.events(), key=lambda e: (e.time_range.start, -e.time_range.end)):
        begin, end = event.time_range.start, event.time_range.end
        if end <= begin or event.name.startswith(("cuda", "cu", "ProfilerStep")):
            continue
        if event.device_type == torch.autograd.DeviceType.CPU:
            lane = threads.setdefault(event.thread, f"rank {rank}, host {len(threads) + 1}")
        else:
            lane = f"rank {rank}, stream {event.device_resource_id}"
        times = int(start + begin * 1e3), int(start + end * 1e3)
        spans.append((lane, _kind(event.name), event.name, *times))
    return spans


def _kind(name: str) -> str:
    lower = name.lower()
    if "weft:waits" in lower:
        return WAITS
    if lower.startswith(_COPIES):
        return COPIES
    if lower.startswith("weft::") or lower == "aten::matmul":
        return OTHER  # what is inside of it says more
    return COMPUTES if any(word in lower for word in _PRODUCTS) else OTHER
