"""What all ranks of a machine measure once, together, and keep on disk.

A file for each GPU, number of ranks, and version of CUDA and of all kernels, in the cubins' folder; rank 0 alone reads
and writes it. It says what it is for: a file that cannot be read, or is for something else, counts as missing. Writers
replace it as a whole. Of two that do so at once one may lose what it added: that is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cuda.bindings import nvrtc

from ....symm_mem.backends import cuda_state
from ....symm_mem.errors import WeftError, tell_progress
from ....symm_mem.heap.heap import Heap
from ..jit.program import DEVICE_FOLDER, cache_folder, write_whole

_KERNELS = DEVICE_FOLDER.parent
_WARM_UPS, _ROUNDS = 2, 5
_CALLS = 3  # in a row, in each round
_AHEAD = 2_000_000  # cycles, a millisecond: the host launches a round meanwhile, so its time does not count
_log = logging.getLogger("weft.ops")


def slowest_times(heap: Heap, kind: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What ``measure`` gives on the slowest rank of each of its times, or what is kept of an earlier one. Collective.

    Args:
        kind: what is measured, in words that are the same on all ranks.
        measure: microseconds by name; of the same names on all ranks, which measure at the same time.

    Raises:
        RankMismatch: the ranks want different kinds.
        PeerTimeout: a rank does not come.
        WeftError: a rank could not measure, or captures a CUDA graph.
    """

    def outside_of_graphs() -> dict[str, float]:
        if heap.device.type == "cuda" and cuda_state.state.is_capturing():
            raise WeftError("a CUDA graph is being captured, in which nothing can be measured")
        return measure()

    rendezvous, first = heap.rendezvous, heap.rank == 0
    with heap.lock, rendezvous.poison_on_error("measure"):
        gpu = torch.cuda.get_device_name(heap.device) if heap.device.type == "cuda" else heap.device.type
        file = TimesFile(gpu, heap.world_size)
        posts = rendezvous.gather("measure", [{"kind": kind}, file.read().get(kind) if first else None])
        rendezvous.check_equal("measure", [post[0] for post in posts])
        if posts[0][1] is not None:
            return dict(posts[0][1])
        tell_progress(_log, f"measures {kind}", speaks=first)
        times = rendezvous.run_on_all("measure", outside_of_graphs)
        all_times = rendezvous.gather("compare times", times)
        slowest = {name: max(each[name] for each in all_times) for name in times}
        if first:
            file.add({kind: slowest})
        return slowest


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


class TimesFile:
    """Of ``world_size`` ranks on GPUs of this name."""

    def __init__(self, gpu: str, world_size: int) -> None:
        self._is_for = {"gpu": gpu, "world_size": world_size, "version": _version()}

    @property
    def place(self) -> Path:
        gpu = re.sub(r"\W+", "-", str(self._is_for["gpu"]))
        name = f"times-{gpu}-x{self._is_for['world_size']}-{self._is_for['version']}.json"
        return cache_folder() / name

    def read(self) -> dict[str, dict[str, float]]:
        """The times of each kind; nothing where there is no such file."""
        try:
            found = json.loads(self.place.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or found.get("for") != self._is_for:
            return {}
        kinds = found.get("kinds")
        return {kind: us for kind, us in kinds.items() if _are_times(us)} if isinstance(kinds, dict) else {}

    def add(self, kinds: dict[str, dict[str, float]]) -> None:
        """Add these to what others have entered."""
        content = {"for": self._is_for, "kinds": dict(sorted((self.read() | kinds).items()))}
        with contextlib.suppress(OSError):  # what cannot be kept is measured again
            write_whole(self.place, json.dumps(content, indent=1).encode())


def _are_times(found: Any) -> bool:
    return (
        isinstance(found, dict) and bool(found) and all(type(us) is float and us > 0 for us in found.values())
    )


@cache
def _version() -> str:
    """Of CUDA's compiler and of all kernels with their launchers: another version's times say nothing."""
    digest = hashlib.sha256(repr(nvrtc.nvrtcVersion()[1:]).encode())
    for path in sorted(_KERNELS.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(f"{path.relative_to(_KERNELS)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
