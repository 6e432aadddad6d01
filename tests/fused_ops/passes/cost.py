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
    """The cheaper of two runs on a copy of `graph`, each over the copies before and after it; the last result.

    A core that is shared is slower: so a run is held against copies of the same moment.
    """
    ratios = []
    for _ in range(2):
        before, copy = cpu_seconds(copied, graph)
        seconds, result = cpu_seconds(run, copy)
        after, _ = cpu_seconds(copied, graph)
        ratios.append(seconds / ((before + after) / 2))
    return min(ratios), result
