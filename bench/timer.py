"""One timer for all contenders: a series of calls between two events, started on all ranks at once.

Rounds, their order and calls are fixed before the first one, so that the ranks agree on how often an op is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

Call = Callable[[int], Sequence[Tensor]]
"""``call(i)`` runs an op on input set i and returns its results."""

CYCLES_PER_US = 1980  # of torch.cuda._sleep, at the H200's highest clock
_HEAD_START_US = 500.0  # covers the launch of a graph of 100 nodes
_MAX_HEAD_START_US = 50_000.0
_LEAST_ROUNDS = 5
_MOST_ORDERED = 13  # contenders: with one more the search takes ten times as long, here seconds


@dataclass(frozen=True)
class Schedule:
    """Series of ``calls`` calls of each contender, after ``warmup`` calls; ``order``'s rounds so many times."""

    calls: int
    warmup: int = 3
    cycles: int = 1


def schedule(device: str, flops: float, elements: int) -> Schedule:
    """Fewer calls of long products: the whole table is to be done in minutes.

    Args:
        flops: of one call's matrix product on one rank; 0 for an all-reduce.
        elements: of an all-reduced tensor.
    """
    if device == "cpu":
        return Schedule(calls=5, warmup=1)
    if not flops:
        return Schedule(calls=50 if elements <= 1 << 20 else 10)
    us = flops / 7e8
    return Schedule(calls=10 if us < 1500 else 4)


def rounds_of(contenders: int) -> int:
    """How many rounds are counted: at least 5, and as many as ``order`` needs to be balanced."""
    cycle = max(1, contenders - 1)
    return -(-_LEAST_ROUNDS // cycle) * cycle


@cache
def _first_order(contenders: int) -> tuple[int, ...]:
    """An order that ``order`` can turn: the steps from one to the next, the next round's first included, all differ.

    Raises:
        ValueError: there is none, or there are more contenders than a search for it ends with.
    """
    if contenders > _MOST_ORDERED:
        raise ValueError(f"contenders: must be at most {_MOST_ORDERED}, got {contenders}")
    turning = contenders - 1
    for found in permutations(range(contenders)):
        behind = (*found[1:], found[0] if found[0] == turning else (found[0] + 1) % turning)
        steps = [(b - a) % turning for a, b in zip(found, behind, strict=True) if turning not in (a, b)]
        if sorted(steps) == list(range(1, turning)):
            return found
    raise ValueError(f"contenders: no order for {contenders}")


def order(contenders: int, number: int) -> list[int]:
    """The contenders' indices in the order in which round ``number`` times them.

    What follows a long product is slower, by up to 6 %, as the power is what limits it. So in ``contenders - 1`` rounds
    one after the other each contender follows each other one once; the first of a round follows the last of the round
    before. The last contender keeps its place, all others turn by one a round.
    """
    if contenders < 2:
        return list(range(contenders))
    turning = contenders - 1
    return [i if i == turning else (i + number) % turning for i in _first_order(contenders)]


class Series:
    """``calls`` calls of one contender, eager or captured once into a CUDA graph.

    Call i works on set ``(calls - 1 - i) % sets``: ``last`` are always the results of set 0.
    ``head_start_us`` is how long the device sleeps before a series; it must be the same on all ranks. ``host_us`` is
    what a call takes on the host, in eager mode, measured once; ``host_rounds`` in each series that was timed.
    """

    def __init__(self, call: Call, sets: int, plan: Schedule, mode: str, device: torch.device) -> None:
        self._call = call
        self._sets = sets
        self._plan = plan
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.head_start_us = _HEAD_START_US
        self.host_us: float | None = None
        self.host_rounds: list[float] = []
        self.last: Sequence[Tensor] = ()
        for _ in range(plan.warmup):
            self.last = call(0)
        if device.type == "cuda":
            self._prepare_cuda(mode)

    def _calls(self) -> None:
        for i in reversed(range(self._plan.calls)):
            self.last = self._call(i % self._sets)

    def _prepare_cuda(self, mode: str) -> None:
        torch.cuda.synchronize()
        if mode == "graph":
            self._graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog thread queries events while we capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._calls()
            return
        self._calls()
        start = time.perf_counter()
        self._calls()
        host_us = (time.perf_counter() - start) * 1e6
        self.host_us = host_us / self._plan.calls
        self.head_start_us = min(1.5 * host_us + _HEAD_START_US, _MAX_HEAD_START_US)

    def poison(self) -> None:
        """NaN in the last results, and in the memory that the next ones of their sizes are likely to get."""
        for out in self.last:
            out.fill_(float("nan"))
        _ = [torch.full_like(out, float("nan")) for out in self.last]
        meet(self._device)  # a peer may write into them

    def run(self) -> None:
        """The series once, untimed."""
        if self._graph is None:
            self._calls()
        else:
            self._graph.replay()

    def time(self) -> float:
        """Microseconds a call took on this rank in one series."""
        if self._device.type == "cpu":
            dist.barrier()
            start_s = time.perf_counter()
            self._calls()
            self.host_rounds.append((time.perf_counter() - start_s) / self._plan.calls * 1e6)
            return self.host_rounds[-1]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.all_reduce(torch.zeros(1, device=self._device))
        # While the device sleeps the host runs ahead: what it takes to launch does not show as idle time.
        torch.cuda._sleep(int(self.head_start_us * CYCLES_PER_US))
        start.record()
        start_s = time.perf_counter()
        self.run()
        self.host_rounds.append((time.perf_counter() - start_s) / self._plan.calls * 1e6)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self._plan.calls


def meet(device: torch.device) -> None:
    """All that the ranks have launched is over, on all of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def over_ranks(rounds: list[float], device: torch.device) -> list[float]:
    """The slowest rank's time of each round."""
    slowest = torch.tensor(rounds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(us) for us in slowest.tolist()]


def same_head_start(series: Sequence[Series], device: torch.device) -> None:
    """The longest that any contender needs on any rank, for all: a device that slept longer has more power to spend."""
    if series:
        (longest,) = over_ranks([max(one.head_start_us for one in series)], device)
        for one in series:
            one.head_start_us = longest


def in_turns(series: dict[str, Series], cycles: int, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of a call in each round but the first, the slowest rank's; contenders in ``order``'s turns."""
    same_head_start(list(series.values()), device)
    names = list(series)
    times: dict[str, list[float]] = {name: [] for name in names}
    # The first round is the warm-up.
    for number in range(1 + cycles * rounds_of(len(names))):
        for i in order(len(names), number):
            times[names[i]].append(series[names[i]].time())
    return {name: over_ranks(us[1:], device) for name, us in times.items()}


def medians(series: dict[str, Series], cycles: int, device: torch.device) -> dict[str, float]:
    """The median of each contender's rounds."""
    return {name: median(us) for name, us in in_turns(series, cycles, device).items()}


def host_and_device(
    series: dict[str, Series], cycles: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Medians of eager contenders: (the host's microseconds of a call, which waits for nothing; the device's)."""
    on_device = medians(series, cycles, device)
    return {
        name: (median(over_ranks(one.host_rounds[1:], device)), on_device[name])
        for name, one in series.items()
    }
