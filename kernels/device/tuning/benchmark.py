"""The tuning benchmark: candidates are timed against each other on all ranks, with the operands of a call.

Three steps, each confirmed by all ranks: each candidate is compiled, then launched once by itself, then all that are
left are timed in turn. One that fails on any rank is out on all of them, so ranks always launch the same kernels in the
same order. Results are discarded.

They run in workspaces of their own, which break by themselves and are dropped afterwards, and their waits are short:
where one rank could not launch what the others did, nothing else is broken by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from statistics import median
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ....symm_mem.errors import describe, tell_progress
from ....symm_mem.failure.fault import Fault
from ....symm_mem.heap.heap import Heap
from ....symm_mem.layout import Layout
from ....symm_mem.timeouts import get_timeout, preparing_timeout
from ....symm_mem.workspace import Workspace
from ..comm.ll_exchange import ExchangeLayout
from ..gemm.one_shot import OneShotConfig

_WARM_UPS, _ROUNDS = 2, 5
_CALLS = 3  # in a row, in each round
_AHEAD = 2_000_000  # cycles, a millisecond: the host launches a round meanwhile, so its time does not count
_LONGEST_WAIT = 10.0  # seconds, of a kernel for the peers', which are all compiled

_log = logging.getLogger("weft.tuner")

C = TypeVar("C")


@dataclass(frozen=True)
class Candidate(Generic[C]):
    """A configuration, its workspace's layout and its algorithm, as in ``KernelChoice``; "": that of the prediction."""

    config: C
    layout: Layout | None
    algorithm: str = ""


# Makes the kernel of a configuration on a workspace, for waits of so many nanoseconds: what it returns launches it.
Make: TypeAlias = Callable[[Workspace[Any], Any, int], Callable[[], None]]


def median_us(launches: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Microseconds of each, on the current stream; in turn, so that other load affects all alike."""
    stream = torch.cuda.current_stream(device)
    rounds = []
    for _ in range(_WARM_UPS + _ROUNDS):
        torch.cuda._sleep(_AHEAD)
        marks = []
        for launch in launches:
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            marks[-1][0].record(stream)
            for _ in range(_CALLS):
                launch()
            marks[-1][1].record(stream)
        rounds.append(marks)
    stream.synchronize()
    by_round = [[begin.elapsed_time(end) for begin, end in marks] for marks in rounds[_WARM_UPS:]]
    return [median(times) * 1000 / _CALLS for times in zip(*by_round, strict=True)]


class TuningBenchmark(Generic[C]):
    """Of candidates for calls of one kind. Every rank has the same ones in the same order."""

    def __init__(self, heap: Heap, kind: str, candidates: Sequence[Candidate[C]], make: Make) -> None:
        self._heap, self._kind, self._candidates, self._make = heap, kind, candidates, make
        deadline = get_timeout(heap.group_name)
        kernels_wait = min(deadline, _LONGEST_WAIT)
        self._timeout_ns = int(kernels_wait * 1e9)
        self._vote_deadline = deadline + kernels_wait  # with a rank whose kernels wait in vain
        self._why = ""
        self._new_rooms()

    def winner(self) -> tuple[Candidate[C] | None, str]:
        """The one whose slowest rank is the fastest, or why none was found; the same on every rank. Collective.

        Raises:
            PeerTimeout: a rank does not come.
            WeftError: a rank has no memory for the workspace.
        """
        tell_progress(
            _log, f"times {len(self._candidates)} candidates for {self._kind}", speaks=self._heap.rank == 0
        )
        compiling = preparing_timeout(self._heap.group_name)
        compiled = [c for c in self._candidates if self._works(c, partial(self._compile, c), compiling)]
        left = []
        for c in compiled:
            if self._works(c, partial(self._try, c), self._vote_deadline):
                left.append(c)
            else:
                self._new_rooms()  # ranks have left the others at different epochs
        if not left:
            return None, self._why
        times: list[float] = []
        problem = _problem(lambda: times.extend(self._times(left)))
        posts = self._heap.rendezvous.gather("compare times", [problem, times], self._vote_deadline)
        if why := _text([post[0] for post in posts]):
            _log.warning("%s is not tuned: %s", self._kind, why)
            return None, why
        slowest = [max(us) for us in zip(*(post[1] for post in posts), strict=True)]
        for c, us in zip(left, slowest, strict=True):
            _log.info("%s: %.1f us with %s", self._kind, us, c.config)
        return left[slowest.index(min(slowest))], ""

    def _launch(self, c: Candidate[C]) -> Callable[[], None]:
        room = self._slots if isinstance(c.config, OneShotConfig) else self._buffers
        assert room is not None
        return self._make(room, c.config, self._timeout_ns)

    def _compile(self, c: Candidate[C]) -> None:
        self._launch(c)
        self._finish()  # what a rank had queued before may take longer than kernels wait

    def _try(self, c: Candidate[C]) -> None:
        with self._quiesced():
            self._launch(c)()

    def _times(self, left: Sequence[Candidate[C]]) -> list[float]:
        with self._quiesced():
            return median_us([self._launch(c) for c in left], self._heap.device)

    @contextmanager
    def _quiesced(self) -> Iterator[None]:
        """What the body launches has ended with it, also if it failed: the workspace may then be dropped."""
        rooms = [room for room in (self._buffers, self._slots) if room is not None]
        for room in rooms:
            room.raise_if_broken(f"tuning {self._kind}")
        try:
            yield
        finally:
            self._finish()
        for room in rooms:
            room.raise_if_broken()

    def _finish(self) -> None:
        if self._heap.device.type == "cuda":
            torch.cuda.current_stream(self._heap.device).synchronize()

    def _works(self, c: Candidate[C], step: Callable[[], Any], seconds: float) -> bool:
        """Whether ``step`` came to its end on all ranks, which have so long for it."""
        why = _text(self._heap.rendezvous.gather("try a kernel", _problem(step), seconds))
        if why:
            _log.warning("%s: %s is out: %s", self._kind, c.config, why)
            self._why = self._why or why
        return not why

    def _new_rooms(self) -> None:
        """For candidates that take buffers, and for those that are exchanged in one shot, as far as there are any."""
        size, fault = self._heap.world_size, Fault(self._heap)
        one_shots = [c.config for c in self._candidates if isinstance(c.config, OneShotConfig)]
        buffers = [c.layout for c in self._candidates if c.layout is not None]
        self._buffers: Workspace[Layout] | None = None
        self._slots: Workspace[ExchangeLayout] | None = None
        if buffers:
            layout = reduce(Layout.joined, buffers)
            self._buffers = Workspace(self._heap, layout, f"workspace to tune in {layout}", fault=fault)
        if one_shots:
            slots = reduce(ExchangeLayout.joined, (config.layout(size) for config in one_shots))
            self._slots = Workspace(self._heap, slots, f"workspace to tune in {slots}", fault=fault)


def _problem(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except Exception as e:
        return describe(e).splitlines()[0]
    return None


def _text(problems: Sequence[str | None]) -> str:
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
