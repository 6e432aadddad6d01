"""Streams of GPUs on the CPU: kernels as fibers, copies by copy engines and events, each stream in its own order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fibers import Fault, Launch, Library, Params, build
from weft.kernels.device.jit.program import WaitParams
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.failure import fault

_WORK = Path(__file__).with_name("stream_work.cu")
_OF_STREAMS = ("copy", "record", "wait_event")
_EVENTS = 4096


class _Work(ctypes.Structure):
    """The twin of ``Params`` in stream_work.cu."""

    _fields_ = (
        ("watch", WaitParams),
        ("to", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("passed", ctypes.c_uint64),
        ("times", ctypes.c_uint64),
    )


def with_streams(
    folder: Path,
    source: Path,
    kernels: Mapping[str, type],
    defines: Mapping[str, str | int],
    beside: Sequence[tuple[Path, Sequence[str], Params]] = (),
    instead: tuple[str, str] | None = None,
) -> Library:
    """``fibers.build``, beside what else is on a stream. ``kernels``: what each takes."""
    more = (*beside, (_WORK, _OF_STREAMS, _Work))
    return build(folder, source, tuple(kernels), kernels, defines, more, instead)


class Memory:
    """``span`` bytes of each rank, zero, and the words and records of their faults, at the same distance."""

    def __init__(self, size: int, span: int) -> None:
        span = -(-span // 256) * 256
        self.bytes = torch.zeros(size, span + 4 * fault.Fault.WORDS, dtype=torch.uint8)
        self.faults = self.bytes[:, span:].view(torch.int32)
        self.records = torch.zeros(size, 8, dtype=torch.int64)
        self.span = self.bytes.stride(0)

    def address(self, rank: int) -> int:
        return int(self.bytes[rank].data_ptr())

    def fault(self, rank: int) -> Fault:
        return Fault(self.faults[rank].data_ptr(), self.records[rank].data_ptr())


class Streams(cuda_state.CudaState):
    """In place of CUDA: what is asked for on ``rank`` is enqueued, and ``run`` runs all of it.

    The current stream of a rank is called like the rank; others have higher numbers.
    """

    def __init__(self, library: Library, memory: Memory) -> None:
        super().__init__()
        self.rank = 0
        self._library, self._memory, self._size = library, memory, len(memory.bytes)
        self._queues: list[list[Launch]] = [[] for _ in range(self._size)]
        self._passed = torch.zeros(_EVENTS, dtype=torch.int32)
        self._recorded: list[int] = []  # times, of each event
        self._ran: Any = None

    def enqueue(self, stream: int, kernel: str, blocks: int, threads: int, params: ctypes.Structure) -> None:
        launch = Launch(self._library.kernels.index(kernel), blocks, threads)
        assert ctypes.sizeof(params) <= Launch.params.size
        ctypes.memmove(ctypes.addressof(launch) + 16, ctypes.addressof(params), ctypes.sizeof(params))
        self._queues[stream].append(launch)

    def _work(self, stream: int, kernel: str, *rest: int) -> None:
        fault = self._memory.fault(self.rank)
        watch = WaitParams(self._memory.address(self.rank), fault.address, fault.record, 0, self.rank)
        self.enqueue(stream, kernel, 1, 32, _Work(watch, *rest))

    def enqueued(self, stream: int) -> int:
        """How much is on a stream."""
        return len(self._queues[stream])

    def run(self, seed: int, late: int = -1, turns: int = 0) -> bool:
        """Whether all comes to its end. The current stream of rank ``late`` begins so many turns after the others."""
        count = max(map(len, self._queues))
        launches = [launch for queue in self._queues for launch in _filled(queue, count)]
        run = self._ran = (Launch * len(launches))(*launches)
        self._library.library.vectors_come_late()
        return bool(
            self._library.library.run(run, len(self._queues), count, seed, late, ctypes.c_long(turns))
        )

    def told(self, stream: int, index: int) -> bool:
        """Whether a wait of the rank had expired when a launch ended."""
        return bool(self._ran[stream * (len(self._ran) // len(self._queues)) + index].broken)

    def function(self, program: Any, name: str, shared: int) -> SimpleNamespace:
        def launch(blocks: int, threads: int, params: Any, stream: int) -> None:
            self.enqueue(stream, name, blocks, threads, params)

        def bound(blocks: int, threads: int, params: Any, dependent: bool = False) -> Callable[[int], None]:
            return lambda stream: launch(blocks, threads, params, stream)

        return SimpleNamespace(launch=launch, bound=bound)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._work(stream, "copy", to, source, size)

    def own_stream(self, owner: object, device: torch.device) -> int:
        self._queues.append([])
        return len(self._queues) - 1

    def current_stream(self, device: int | None) -> int:  # type: ignore[override]
        return self.rank

    def is_capturing(self) -> bool:  # type: ignore[override]
        return False

    def num_sms(self, device: torch.device) -> int:
        return 1

    def make_current(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, handle: int, device: int) -> SimpleNamespace:  # type: ignore[override]
        def wait_event(event: SimpleNamespace) -> None:
            times = self._recorded[event.number]
            self._work(handle, "wait_event", 0, 0, 0, self._event(event), times)

        return SimpleNamespace(number=handle, wait_event=wait_event)

    def event(self) -> Any:
        self._recorded.append(0)
        made = SimpleNamespace(number=len(self._recorded) - 1)

        def record(stream: SimpleNamespace) -> None:
            self._recorded[made.number] += 1
            times = self._recorded[made.number]
            self._work(stream.number, "record", 0, 0, 0, self._event(made), times)

        made.record = record
        return made

    def _event(self, event: SimpleNamespace) -> int:
        assert event.number < _EVENTS
        return int(self._passed.data_ptr()) + 4 * event.number


def _filled(queue: list[Launch], count: int) -> list[Launch]:
    return queue + [Launch(-1, 0, 0)] * (count - len(queue))
