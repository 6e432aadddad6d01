"""The tuner: which configuration of a kernel is the fastest, measured once by all ranks together, and kept on disk.

Off unless WEFT_TUNE=1; then the predictions (an op's configs.py) only say what to measure. At the first call of a kind
all ranks measure (benchmark.py), and take the same one from then on.

Ranks never differ in what they take. All that decides it was exchanged: rank 0 alone reads and writes the file. What is
known is kept with the heap, where all ranks learn it in the same call, and a reset drops it on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from ....symm_mem import switches
from ....symm_mem.backends import cuda_state
from ....symm_mem.failure.call_log import running
from ....symm_mem.heap.heap import Heap
from .benchmark import Candidate, Make, TuningBenchmark
from .choice import C, KernelChoice
from .tuned_file import TunedFile

FROM_MODEL = "from the model"
TUNED = "tuned"

_MOST = 8  # candidates that are measured


@cache
def is_tuning() -> bool:
    """Whether WEFT_TUNE=1; asked once in a process.

    Raises:
        ValueError: WEFT_TUNE is neither 0 nor 1.
    """
    return switches.is_on("WEFT_TUNE")


def tuned(
    heap: Heap, kind: str, choice: KernelChoice[C], candidates: Sequence[Candidate[C]], make: Make
) -> tuple[KernelChoice[C], str]:
    """How to run a call, and where that comes from. Collective, the first time for each kind.

    Args:
        kind: of call, in words that are the same on all ranks. So it leaves out strides, which each rank may have its
            own way: what was measured with those of the first call is taken for all.
        choice: the model's.
        candidates: what may be the fastest, the likeliest first; the same on all ranks.

    Raises:
        RankMismatch: the ranks' calls are of different kinds.
        PeerTimeout: a rank does not come.
        WeftError: a rank has no memory to measure in.
    """
    found, how = _tuner_of(heap).find(kind, candidates[:_MOST], make)
    return (choice if found is None else _with(choice, found)), how


def _tuner_of(heap: Heap) -> Tuner:
    if heap.tuner is None:
        with heap.lock:
            heap.tuner = heap.tuner or Tuner(heap)
    return heap.tuner


@lru_cache(maxsize=4096)
def _with(choice: KernelChoice[C], found: Candidate[C]) -> KernelChoice[C]:
    """One object for each pair: kernels are kept under their choice."""
    algorithm = found.algorithm or choice.algorithm
    return replace(choice, algorithm=algorithm, config=found.config, layout=found.layout, predicted_us=None)


class Tuner:
    """What the ranks of a heap have measured together."""

    def __init__(self, heap: Heap) -> None:
        self._heap, device = heap, heap.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._file = TunedFile(gpu, heap.world_size)
        self._known: dict[str, tuple[Candidate[Any] | None, str]] = {}

    def reset_state(self) -> None:
        """Drop what is known: an error may have reached some ranks before they knew it."""
        self._known.clear()

    def find(
        self, kind: str, candidates: Sequence[Candidate[Any]], make: Make
    ) -> tuple[Candidate[Any] | None, str]:
        """The candidate to take, None for the model's choice; and where that comes from."""
        found = self._known.get(kind)
        if found is not None:
            return found
        with self._heap.lock, self._heap.rendezvous.poison_on_error("tune"):
            try:
                return self._known.get(kind) or self._find(kind, candidates, make)
            finally:
                running.workspace = None  # the call itself has launched nothing yet

    def _find(
        self, kind: str, candidates: Sequence[Candidate[Any]], make: Make
    ) -> tuple[Candidate[Any] | None, str]:
        rendezvous, first = self._heap.rendezvous, self._heap.rank == 0
        kept = self._file.read().get(kind) if first else None
        posts = rendezvous.gather("tune", [{"kind": kind}, _is_capturing(self._heap), kept])
        rendezvous.check_equal("tune", [post[0] for post in posts])
        by_text = {str(c.config): c for c in candidates}
        if (stored := by_text.get(posts[0][2])) is not None:
            self._known[kind] = stored, TUNED
        elif all(post[1] for post in posts):
            return None, FROM_MODEL  # it is measured at the first call outside of a graph
        elif any(post[1] for post in posts):
            # Those outside of it keep their kernel for good, and take the fast path from then on.
            self._known[kind] = None, f"{FROM_MODEL}: some ranks capture a graph"
        else:
            best, why = TuningBenchmark(self._heap, kind, candidates, make).winner()
            if best is not None and first:
                self._file.add({kind: str(best.config)})
            self._known[kind] = (None, f"{FROM_MODEL}: {why}") if best is None else (best, TUNED)
        return self._known[kind]


def _is_capturing(heap: Heap) -> bool:
    return heap.device.type == "cuda" and cuda_state.state.is_capturing()
