"""One row: check every contender against float64, then time those that are right, side by side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

import accuracy
import torch
import torch.distributed as dist
from contenders import LINK_BYTES_PER_US, TABLE
from parts import Bench
from registry import Row
from timer import Schedule, Series, order, over_ranks, rounds_of, same_head_start, schedule
from weft.fused_ops import last_plan

HIDDEN = ("product", "producer")

Pedantic = Callable[[Callable[[], None], int], None]
"""Runs a function so many times, a round each, and once before the first one."""


def _agree(problem: str) -> str:
    """The first rank's problem: all ranks drop a contender or none does."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    return next((f"rank {rank}: {p}" for rank, p in enumerate(said) if p), "")


def _ready(
    bench: Bench, row: Row, plan: Schedule, device: torch.device
) -> tuple[dict[str, Series], str, list[str]]:
    """(what can be timed, weft's algorithm, what is wrong with the others)."""
    ready: dict[str, Series] = {}
    algorithm, problems = "", []
    for name, call in bench.calls.items():
        problem, series = "", None
        try:
            series = Series(call, bench.sets, plan, row.mode, device)
            if name not in HIDDEN:
                series.poison()
                series.run()
                problem = accuracy.problem(series.last, bench.expected, row.dtype)
            if name == "weft":
                algorithm = last_plan().algorithm
        except Exception as e:
            problem = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        problem = _agree(problem)
        if problem or series is None:
            problems.append(f"{name}: {problem}")
        else:
            ready[name] = series
    same_head_start(list(ready.values()), device)
    return ready, algorithm, problems


def _still_right(bench: Bench, row: Row, ready: dict[str, Series]) -> list[str]:
    """One more series of each, as they were timed; drops what is wrong now and says what it is."""
    problems = []
    for name in [name for name in ready if name not in HIDDEN]:
        ready[name].poison()
        ready[name].time()
        problem = _agree(accuracy.problem(ready[name].last, bench.expected, row.dtype))
        if problem:
            problems.append(f"{name}: after the rounds: {problem}")
            del ready[name]
    return problems


def measure(row: Row, group: str, device: torch.device, pedantic: Pedantic) -> dict[str, Any]:
    """The row's line of the table: times in microseconds, None where there is none.

    A time is the median of the rounds, ``spread_us`` the least and the greatest of them, each that of the slowest rank.
    ``limit_us`` is the larger of ``product_us``, cuBLAS's time of the product alone, and of the bytes' time over the
    links: a reference, measured too, that repeats to about 5 %, so weft is below it in a few rows.
    """
    bench = TABLE[row.op](row, group, device)
    plan = schedule(device.type, bench.flops, row.N)
    ready, algorithm, problems = _ready(bench, row, plan, device)
    host_us = {name: round(series.host_us, 1) for name, series in ready.items() if series.host_us}
    times: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    numbers = count()

    def one_round() -> None:
        for i in order(len(names), next(numbers)):
            times[names[i]].append(ready[names[i]].time())

    pedantic(one_round, rounds_of(len(names)))
    problems += _still_right(bench, row, ready)
    names = list(ready)
    ready.clear()
    # The first round is the warm-up.
    rounds = {name: over_ranks(times[name][1:], device) for name in names}
    medians = {name: median(us) for name, us in rounds.items()}
    before = medians.get("producer", 0.0)

    def of(*names: str) -> float | None:
        found = [medians[name] - before for name in names if name in medians]
        return round(min(found), 2) if found else None

    limit = None
    if device.type == "cuda":
        limit = round(max(medians.get("product", 0.0), bench.bytes_received / LINK_BYTES_PER_US), 2)
    return {
        "name": row.name,
        "op": row.op,
        "M": row.M,
        "K": row.K,
        "N": row.N,
        "dtype": str(row.dtype).removeprefix("torch."),
        "mode": row.mode,
        "algorithm": algorithm,
        "weft_us": of("weft"),
        "unfused_us": of("unfused"),
        "torch_us": of("torch", "torch native", "torch two-shot"),
        "limit_us": limit,
        "product_us": of("product"),
        "contenders_us": {name: of(name) for name in medians if name not in HIDDEN},
        "spread_us": {
            name: [round(us - before, 2) for us in (min(times_us), max(times_us))]
            for name, times_us in rounds.items()
            if name != "producer"
        },
        "host_us": {name: us for name, us in host_us.items() if name not in HIDDEN},
        "error": "; ".join(problems) or None,
    }
