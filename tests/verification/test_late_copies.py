"""Copies by copy engines with a rank that comes after the others have given up on it: acquire.cu and its launchers.

An all-gather on the CPU: the acquire kernel, copies of the own shard on a stream of their own, a reader on
the current stream, the end of the epoch. Streams are worked off in any order that they allow. An impatient rank does
not wait: what stands at the head of a stream runs at any time, and its waits expire. Copies are made whatever became of
the acquire kernel before them, as copy engines do.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fibers
import pytest
import torch
from fibers import Launch, Library, build, mistakes
from weft.kernels.device.comm import acquire
from weft.kernels.device.comm.copy_engine import CopiedPiece, CopyEngine
from weft.kernels.device.jit.program import Program
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.layout import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

IMPATIENT, LATE = 0, 1
SIZE, CALLS, ROWS, COLUMNS = 3, 5, 5, 7
KERNELS = ("acquire", "leave")
CURRENT = 0  # the stream of the calls; copy streams have higher numbers
WAIT_DATA, ABORTED = 1, 3  # kinds of a record


class Gpu:
    """One rank: a workspace, and streams of work that is not done yet.

    ``told``, ``results``: by call, whether it had been told of an expired wait when the epoch ended, and what came out.
    """

    def __init__(self, library: Library, layout: Layout, memory: torch.Tensor, rank: int) -> None:
        self.library, self.layout, self.rank, self.world_size = library, layout, rank, layout.world_size
        self.address, self.span = memory[rank].data_ptr(), memory.stride(0)
        self.words = memory[rank][: layout.words * 4].view(torch.int32)
        self.buffers = [
            memory[rank][layout.buffer(buffer) :][: layout.buffer_bytes]
            .view(torch.float32)
            .view(SIZE, ROWS, COLUMNS)
            for buffer in (0, 1)
        ]
        self.faults = memory[rank][layout.bytes :].view(torch.int32)
        self.record = torch.zeros(8, dtype=torch.int64)
        self.fault = fibers.Fault(self.faults.data_ptr(), self.record.data_ptr())
        self.heap = SimpleNamespace(device=torch.device("cuda", 0))
        self.peers = [(rank + step) % SIZE for step in range(1, SIZE)]
        self.told: list[bool] = []
        self.results: list[torch.Tensor] = []
        self.streams: dict[int, deque[tuple[Any, ...]]] = {CURRENT: deque()}
        self.recorded: dict[int, int] = {}  # event -> times it was enqueued, and below times it was passed
        self.passed: dict[int, int] = {}

    def enqueue(self, stream: int, *work: Any) -> None:
        self.streams.setdefault(stream, deque()).append(work)

    def flag(self, buffer: int, peer: int) -> int:
        return self.layout.flags(buffer) + peer * self.layout.flags_per_rank

    def ready(self, work: tuple[Any, ...]) -> bool:
        """Whether the head of a stream can run now: what waits only once it is there."""
        kind, *rest = work
        if kind == "wait":
            return self.passed.get(rest[0], 0) >= rest[1]
        if kind == "acquire":
            params = rest[1]
            return all(
                self.words[params.buffer.done + p] >= self.words[params.buffer.epoch] for p in self.peers
            )
        if kind == "read":
            buffer, peer, *_ = rest
            return bool(self.words[self.flag(buffer, peer)] > self.words[Layout.EPOCH + buffer])
        return True

    def run(self, work: tuple[Any, ...]) -> None:
        kind, *rest = work
        if kind == "copy":
            ctypes.memmove(*rest)
        elif kind == "record":
            self.passed[rest[0]] = self.passed.get(rest[0], 0) + 1
        elif kind == "read":
            self.read(*rest, came=self.ready(work))
        elif kind == "reuse":
            x, out = rest
            self.results.append(out.clone())
            x.fill_(float("nan"))
        elif kind in KERNELS:
            self.library.library.run_one(ctypes.byref(rest[0]), self.rank)
            if kind == "leave":
                self.told.append(bool(self.faults[Fault.BROKEN]))

    def read(self, buffer: int, peer: int, x: torch.Tensor, out: torch.Tensor, *, came: bool) -> None:
        """Add a peer's rows to ``out``, which is ``x`` before; an expired wait is recorded, once."""
        if not came and not self.faults[Fault.BROKEN]:
            word = self.flag(buffer, peer)
            use, seen = int(self.words[Layout.EPOCH + buffer]) + 1, int(self.words[word])
            self.faults[Fault.BROKEN] = 1 + peer
            self.record.copy_(torch.tensor([1, self.address, peer, word, use, seen, WAIT_DATA, 0]))
        before = x if peer == self.peers[0] else out
        torch.add(before, self.buffers[buffer][peer], out=out)


class Driver(cuda_state.CudaState):
    """In place of CUDA: what is asked for goes to the streams of ``self.gpu``."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu: Gpu
        self._made = 0

    def own_stream(self, owner: object, device: torch.device) -> int:
        self._made += 1
        return self._made

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.gpu.enqueue(stream, "copy", to, source, size)

    def current_stream(self, device: int) -> int:  # type: ignore[override]
        return CURRENT

    def stream(self, handle: int, device: int) -> Any:  # type: ignore[override]
        def wait_event(event: SimpleNamespace) -> None:
            self.gpu.enqueue(handle, "wait", event.number, self.gpu.recorded.get(event.number, 0))

        return SimpleNamespace(number=handle, wait_event=wait_event)

    def event(self) -> Any:
        self._made += 1
        number = self._made

        def record(stream: SimpleNamespace) -> None:
            self.gpu.recorded[number] = self.gpu.recorded.get(number, 0) + 1
            self.gpu.enqueue(stream.number, "record", number)

        return SimpleNamespace(number=number, record=record)

    def function(self, program: Program, name: str, shared: int) -> SimpleNamespace:
        """A stand-in for a loaded kernel of acquire.cu."""

        def launch(blocks: int, threads: int, params: Any, stream: int) -> None:
            note = Launch(KERNELS.index(name), blocks, threads)
            ctypes.memmove(ctypes.addressof(note) + 16, ctypes.addressof(params), ctypes.sizeof(params))
            self.gpu.enqueue(stream, name, note, type(params).from_buffer_copy(params))

        def bound(blocks: int, threads: int, params: Any) -> Callable[[int], None]:
            return lambda stream: launch(blocks, threads, params, stream)

        return SimpleNamespace(bound=bound)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_state, "state", driver)
    return driver


def call(driver: Driver, engine: Any, buffer: int, x: torch.Tensor, out: torch.Tensor) -> None:
    """Enqueue out = the sum of all ranks' x, as copied_products.py does a product, and what overwrites x after it."""
    gpu = driver.gpu
    at, slot, first = x.data_ptr(), gpu.rank * x.nbytes, x[0].nbytes
    pieces = [CopiedPiece(at, slot, first), CopiedPiece(at + first, slot + first, x.nbytes - first)]
    engine.start(buffer, lambda peer: pieces, 3)
    for peer in gpu.peers:
        gpu.enqueue(CURRENT, "read", buffer, peer, x, out)
    acquire.end_epoch_launcher(engine.workspace, buffer)(CURRENT)
    engine.join(buffer)
    gpu.enqueue(CURRENT, "reuse", x, out)


def work_off(gpus: list[Gpu], choice: random.Random, deadline: float) -> None:
    """Everything. The late rank pauses at some moment until the others can do no more, or not so long.

    ``deadline``: how likely it is at each turn that the impatient rank waits on.
    """
    stops = choice.randrange(250)
    goes_on = stops + choice.choice([300, 10_000])
    turn = 0
    while any(stream for gpu in gpus for stream in gpu.streams.values()):
        turn += 1
        heads: list[tuple[Gpu, Any]] = []
        forced: list[tuple[Gpu, Any]] = []
        for gpu in gpus:
            if gpu.rank == LATE and stops < turn < goes_on:
                continue
            for stream in gpu.streams.values():
                if stream and gpu.ready(stream[0]):
                    # Data has come and its flag has not: the moment at which a flag of an earlier epoch misleads.
                    flag = stream[0][0] == "copy" and stream[0][3] == 4
                    heads += [(gpu, stream)] * (1 if flag and gpu.rank == IMPATIENT else 8)
                elif stream and stream[0][0] != "wait":
                    forced.append((gpu, stream))
        impatient = [f for f in forced if f[0].rank == IMPATIENT]
        if not heads and not forced:
            goes_on = turn
            continue
        hurry = impatient and choice.random() > deadline
        gpu, stream = choice.choice(impatient if hurry else heads or impatient or forced)
        gpu.run(stream.popleft())


def finish(gpus: list[Gpu], choice: random.Random) -> None:
    """Everything, and nobody is late: no wait expires."""
    while any(stream for gpu in gpus for stream in gpu.streams.values()):
        heads = [(g, s) for g in gpus for s in g.streams.values() if s and g.ready(s[0])]
        assert heads, f"nothing can go on: {[[s[0][:2] for s in g.streams.values() if s] for g in gpus]}"
        gpu, stream = choice.choice(heads)
        gpu.run(stream.popleft())


def enqueued(driver: Driver, library: Library, choice: random.Random) -> tuple[list[Gpu], list[torch.Tensor]]:
    """Ranks with calls, each of which takes what the one before has given: a wrong number would travel on.

    Returns the ranks, and what the calls have to give.
    """
    layout = Layout(SIZE, 1, 4 * SIZE * ROWS * COLUMNS)
    memory = torch.zeros(SIZE, layout.bytes + 4 * Fault.WORDS, dtype=torch.uint8)
    gpus = [Gpu(library, layout, memory, rank) for rank in range(SIZE)]
    xs = torch.tensor([float(choice.randrange(1, 9)) for _ in range(SIZE * ROWS * COLUMNS)])
    xs = xs.view(SIZE, ROWS, COLUMNS)
    expected = [xs.sum(0) * SIZE**i for i in range(CALLS)]
    for gpu in gpus:
        driver.gpu = gpu
        chain = [xs[gpu.rank], *torch.full((CALLS, ROWS, COLUMNS), float("nan"))]
        engine = CopyEngine(gpu)  # type: ignore[arg-type]
        for i, (x, out) in enumerate(pairwise(chain)):
            call(driver, engine, i % 2, x, out)
    return gpus, expected


def compiled(folder: Path, instead: tuple[str, str] | None = None) -> Library:
    return build(folder, acquire._SOURCE, KERNELS, acquire._Params, {"WORLD_SIZE": SIZE}, instead=instead)


def test_all_are_right_where_nobody_is_late(tmp_path: Path, driver: Driver) -> None:
    library = compiled(tmp_path)
    for seed in range(30):
        choice = random.Random(seed)
        gpus, expected = enqueued(driver, library, choice)
        finish(gpus, choice)
        for gpu in gpus:
            for i, (got, want) in enumerate(zip(gpu.results, expected, strict=True)):
                assert torch.equal(got, want), f"seed {seed}: call {i} of rank {gpu.rank} is wrong"
            assert gpu.told == [False] * CALLS
            assert not gpu.record.any()


MISTAKES = {
    "no abort notice": (
        "post_flag(on_rank(watch.fault, watch, buffer, peer) + ABORT_NOTICE + watch.rank, 1 + blamed);",
        "",
    ),
    "nobody listens": ("if (said != 0) report(watch, peer, buffer.done + peer, epoch, said, ABORTED);", ""),
    "acquire kernels of a broken group pass": ("bool free = !serves || blamed == 0;", "bool free = true;"),
}


@pytest.mark.parametrize(
    ("deadline", "mistake"),
    [(1.0, None), (0.995, None), *mistakes([(0.995, mistake) for mistake in MISTAKES], 3)],
)
def test_a_late_rank_is_right_or_told(
    tmp_path: Path, driver: Driver, deadline: float, mistake: str | None
) -> None:
    library = compiled(tmp_path, MISTAKES.get(mistake or ""))
    outcomes: list[bool] = []
    untold: list[str] = []
    abort_notices = 0
    for seed in range(30):
        choice = random.Random(seed)
        gpus, expected = enqueued(driver, library, choice)
        work_off(gpus, choice, deadline)
        for gpu in gpus:
            for i, (got, want, told) in enumerate(zip(gpu.results, expected, gpu.told, strict=True)):
                outcomes.append(torch.equal(got, want))
                if not (outcomes[-1] or told):
                    untold.append(f"seed {seed}: call {i} of rank {gpu.rank} is wrong")
            abort_notices += int(gpu.record[6]) == ABORTED
    assert bool(untold) == (mistake is not None), untold
    assert not all(outcomes) and any(outcomes)
    if mistake is None:
        assert abort_notices, "no rank was told by an abort notice"
