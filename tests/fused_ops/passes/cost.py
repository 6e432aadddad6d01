"""What work on a graph costs, as a multiple of copying the graph: seconds differ by three times between machines."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

from graphs import copied
from torch import fx

T = TypeVar("T")


def cpu_seconds(run: Callable[[fx.Graph], T], graph: fx.Graph) -> tuple[float, T]:
    gc.disable()  # else what other tests have left in the process is looked through
    begin = time.process_time()  # other processes on the machine do not count
    try:
        result = run(graph)
        return time.process_time() - begin, result
    finally:
        gc.enable()


def in_copies(run: Callable[[fx.Graph], T], graph: fx.Graph) -> tuple[float, T]:
    """The cheaper of two runs, each on a copy of `graph`, over the cheaper of two copies; the last result."""
    spent, copying = [], []
    for _ in range(2):
        seconds, copy = cpu_seconds(copied, graph)
        copying.append(seconds)
        seconds, result = cpu_seconds(run, copy)
        spent.append(seconds)
    return min(spent) / min(copying), result
