"""A picture of a call or a step on all ranks, from torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ...symm_mem import Group, resolve_group
from ..pictures.lanes import Bar, Panel, lanes_html
from ..pictures.page import page

COMPUTES, COPIES, WAITS, BACKWARD, OTHER = "computes", "copies", "waits", "backward", "other"
_COLOURS = {COMPUTES: "green", COPIES: "blue", WAITS: "red", BACKWARD: "violet", OTHER: "grey"}
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
    """A page with a picture of one call on all ranks: when each waits, copies and computes.

    >>> import torch
    >>> import weft
    >>> x, w = torch.randn(64, 32), torch.randn(32, 16)
    >>> page = weft.passes.timeline(lambda: weft.fused_all_gather_matmul(x, [w], 0, None))
    >>> page.startswith("<!doctype html>")
    True

    It has lanes for the threads of a rank's host, those that follow each other in one, and on CUDA for its streams, of
    one scale: ranks of one host share a clock. What it shows comes from torch.profiler: ops and kernels, copies, and
    between CPU ranks weft's waits for another rank. On CUDA a kernel is one bar, whatever it waits for inside. A
    training step has another lane, for when autograd calls the backward of an operator or of a compiled graph. The
    pointer over a bar shows its name and time, and the page can stretch time.

    All ranks of the group call it. Whatever ``call`` is, an op, a layer or a step, it is made ``warm_up`` times before,
    which also compiles it.

    Args:
        call: takes nothing.
        file: where rank 0 writes the page, which is one file without scripts.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        warm_up: 0 or more.

    Returns:
        the page, the same on all ranks.

    Raises:
        TypeError: ``call`` cannot be called.
        ValueError: ``warm_up`` is below 0, or the name of ``file`` has another ending than .html.
        OSError: the file cannot be written.
    """
    if warm_up < 0:
        raise ValueError(f"warm_up: is {warm_up}, must be 0 or more")
    if file is not None and Path(file).suffix.lower() not in ("", ".html", ".htm"):
        raise ValueError(f"file: is {os.fspath(file)!r}, must end in .html: the picture is a page")
    title, panel = _measured(call, group, warm_up)
    written = page(title, [lanes_html("", [panel], _COLOURS)])
    if file is not None and resolve_group(group).rank() == 0:
        Path(file).write_text(written)
    return written


def timeline_html(call: Callable[[], object], *, group: Group = None) -> str:
    """The same as a part of a page. Collective."""
    title, panel = _measured(call, group, warm_up=2)
    return lanes_html(f"{title}, as measured", [panel], _COLOURS)


def _measured(call: Callable[[], object], group: Group, warm_up: int) -> tuple[str, Panel]:
    """A title, and the lanes of all ranks."""
    if not callable(call):
        raise TypeError(f"call: is {call!r}, must be a function that takes nothing")
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
    spans = [span for of_rank in found for span in of_rank]
    begin = min((span.begin for span in spans), default=0)
    lanes: dict[str, list[Bar]] = {span.lane: [] for span in spans}
    for lane, kind, name, first, last in spans:
        lanes[lane].append((kind, name, (first - begin) / 1e3, (last - begin) / 1e3))
    took = (max((span.end for span in spans), default=0) - begin) / 1e3
    return f"One call on {pg.size()} ranks: {took / 1e3:.4g} ms", Panel("", lanes)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _spans(profiled: profile, rank: int) -> list[Span]:
    """In the order in which they are drawn: what is inside of another one after it."""
    results = profiled.profiler
    assert results is not None and results.kineto_results is not None
    start = results.kineto_results.trace_start_ns()
    events = sorted(profiled.events(), key=lambda e: (e.time_range.start, -e.time_range.end))
    events = [e for e in events if e.time_range.end > e.time_range.start and not calls_driver(e)]
    of_host = [(e.thread, e.time_range.start, e.time_range.end) for e in events if _is_of_host(e)]
    threads, spans = lanes_of_threads(of_host), []
    for event in events:
        kind = _kind(event.name)
        if not _is_of_host(event):
            lane = f"stream {event.device_resource_id}"
        else:
            lane = BACKWARD if kind == BACKWARD else f"host {threads[event.thread]}"
        times = int(start + event.time_range.start * 1e3), int(start + event.time_range.end * 1e3)
        spans.append(Span(f"rank {rank}, {lane}", kind, event.name, *times))
    return spans


def _is_of_host(event: FunctionEvent) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CPU)


def calls_driver(event: FunctionEvent) -> bool:
    """Kernels' names may begin like that, too (cutlass)."""
    return _is_of_host(event) and event.name.startswith(("cuda", "cu", "ProfilerStep"))


def lanes_of_threads(spans: Iterable[tuple[int, float, float]]) -> dict[int, int]:
    """A lane for each thread, counted from 1: threads of which one ends before the next begins share one.

    Args:
        spans: (thread, begin, end), in the order of begins.
    """
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    for thread, begin, end in spans:
        begins.setdefault(thread, begin)
        ends[thread] = max(end, ends.get(thread, end))
    found: dict[int, int] = {}
    free: list[float] = []  # when the last thread of each lane has ended
    for thread, begin in begins.items():
        lane = next((i for i, end in enumerate(free) if end <= begin), len(free))
        free[lane : lane + 1] = [ends[thread]]
        found[thread] = lane + 1
    return found


def _kind(name: str) -> str:
    lower = name.lower()
    if "weft:waits" in lower:
        return WAITS
    if lower.startswith("autograd::engine::evaluate_function"):
        return BACKWARD
    if lower.startswith(_COPIES):
        return COPIES
    if lower.startswith("weft::") or lower == "aten::matmul":
        return OTHER  # what is inside of it says more
    return COMPUTES if any(word in lower for word in _PRODUCTS) else OTHER
