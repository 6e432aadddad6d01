"""The all-reduce by copy engines on the CPU: its copies, events and kernels in any order that the streams allow."""

from __future__ import annotations

import ctypes
import random
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fibers
import pytest
import torch
from fibers import PATIENT, TORCH, Launch, Library, build, inputs, same
from weft.kernels.all_reduce import copy_engine
from weft.kernels.all_reduce.configs import Config
from weft.symm_mem.fault import Fault
from weft.symm_mem.workspace import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = ("reduce_chunk", "collect")
CURRENT = 0  # the stream of the calls; copy streams have higher numbers


class Gpu:
    """One rank: streams of work that is not done yet, and a workspace."""

    def __init__(self, library: Library, layout: Layout, memory: torch.Tensor, rank: int) -> None:
        self.library, self.layout, self.rank, self.world_size = library, layout, rank, layout.world_size
        self.address, self.span = memory[rank].data_ptr(), memory.stride(0)
        self.faults = memory[rank][layout.bytes :].view(torch.int32)
        self.fault = fibers.Fault(self.faults.data_ptr(), 0)
        self.words = memory[rank][: layout.words * 4].view(torch.int32)
        self.copy_streams: dict[Any, Any] = {}
        self.streams: dict[int, deque[tuple[Any, ...]]] = {CURRENT: deque()}
        self.recorded: dict[int, int] = {}  # event -> times it was enqueued, and below times it was passed
        self.passed: dict[int, int] = {}
        self._half = 0

    def next_half(self) -> int:
        self._half ^= 1
        return self._half

    def ready(self, work: tuple[Any, ...]) -> bool:
        """Whether the head of a stream can run now: kernels only once all they wait for is there."""
        kind, *rest = work
        layout, peers = self.layout, [p for p in range(self.world_size) if p != self.rank]
        if kind == "wait":
            return self.passed.get(rest[0], 0) >= rest[1]
        if kind == "gate":
            epoch = int(self.words[Layout.EPOCH + rest[0]])
            return all(int(self.words[layout.done(rest[0]) + p]) >= epoch for p in peers)
        if kind == "kernel":
            name, _, params = rest
            use = int(self.words[params.ticket])
            flags = [params.which] if name == "reduce_chunk" else range(params.chunks, 2 * params.chunks)
            rows = [params.flags + p * params.flags_per_rank for p in peers]
            return all(int(self.words[row + flag]) >= use for row in rows for flag in flags)
        return True

    def run(self, work: tuple[Any, ...]) -> None:
        kind, *rest = work
        if kind == "copy":
            ctypes.memmove(*rest)
        elif kind == "record":
            self.passed[rest[0]] = self.passed.get(rest[0], 0) + 1
        elif kind == "gate":
            self.words[Layout.TICKET + rest[0]] = self.words[Layout.EPOCH + rest[0]] + 1
        elif kind == "kernel":
            self.library.library.run_one(ctypes.byref(rest[1]), self.rank)

    def enqueue(self, stream: int, *work: Any) -> None:
        self.streams.setdefault(stream, deque()).append(work)


class Driver:
    """A stand-in for the driver: what is asked for goes to the streams of ``self.gpu``."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self) -> None:
        self.gpu: Gpu
        self._made = 0

    def _new(self, *_: Any) -> int:
        self._made += 1
        return self._made

    cuStreamCreateWithPriority = cuEventCreate = _new

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, -1

    def cuMemcpyDtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:
        self.gpu.enqueue(stream, "copy", to, source, size)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.gpu.recorded[event] = self.gpu.recorded.get(event, 0) + 1
        self.gpu.enqueue(stream, "record", event)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.gpu.enqueue(stream, "wait", event, self.gpu.recorded.get(event, 0))


class Kernel:
    def __init__(self, driver: Driver, name: str) -> None:
        self.driver, self.name = driver, name

    def launch(self, blocks: int, threads: int, params: Any, stream: int) -> None:
        launch = Launch(KERNELS.index(self.name), 3, 32)
        ctypes.memmove(ctypes.addressof(launch) + 16, ctypes.addressof(params), ctypes.sizeof(params))
        copy = type(params).from_buffer_copy(params)
        self.driver.gpu.enqueue(stream, "kernel", self.name, launch, copy)


class Pushes:
    """A stand-in for the kernels beside the copies: the current stream comes to what they would have written."""

    def __init__(self, driver: Driver, expected: torch.Tensor) -> None:
        self.driver, self.expected = driver, expected
        self.numel, self.dtype = expected.numel(), expected.dtype

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        size = self.numel * self.dtype.itemsize
        self.driver.gpu.enqueue(stream, "copy", out, self.expected.data_ptr(), size)


def finish(gpus: list[Gpu], choice: random.Random) -> None:
    """Run everything, in any order in which the streams allow it."""
    while any(stream for gpu in gpus for stream in gpu.streams.values()):
        heads = [(g, s) for g in gpus for s in g.streams.values() if s and g.ready(s[0])]
        assert heads, f"nothing can go on: {[[s[0][:2] for s in g.streams.values() if s] for g in gpus]}"
        gpu, stream = choice.choice(heads)
        gpu.run(stream.popleft())


@pytest.mark.parametrize(
    ("world_size", "dtype", "reduce_op", "chunks", "streams", "copied"),
    [(2, "bfloat16", "sum", 1, 1, 30), (3, "float32", "avg", 3, 2, 100), (4, "bfloat16", "sum", 2, 3, 100)],
)
def test_calls_in_any_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    dtype: str,
    reduce_op: str,
    chunks: int,
    streams: int,
    copied: int,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    choice = random.Random(seed)
    defines: dict[str, str | int] = {"WORLD_SIZE": world_size, "DTYPE": dtype, "REDUCE": reduce_op}
    library = build(tmp_path, copy_engine.SOURCE, KERNELS, copy_engine._Params, defines)
    driver = Driver()
    monkeypatch.setattr(copy_engine, "driver", driver)
    monkeypatch.setattr(copy_engine, "check", lambda result: result)
    monkeypatch.setattr(copy_engine, "gate", lambda w, half, ns, stream: w.enqueue(stream, "gate", half))
    functions = SimpleNamespace(function=lambda name: Kernel(driver, name))
    monkeypatch.setattr(copy_engine, "program", lambda *a: functions)
    monkeypatch.setattr(copy_engine, "_GRAIN", 16)
    width = TORCH[dtype].itemsize
    monkeypatch.setattr(copy_engine, "PIECE", 4096 * width)  # larger inputs go piece after piece
    config = Config("copy_engine", chunks=chunks, streams=streams, copied=copied)
    half_bytes, flags = copy_engine.needs(1 << 20, width, world_size, config)
    layout = Layout(world_size, flags, half_bytes)
    memory = torch.zeros(world_size, layout.bytes + 4 * Fault.WORDS, dtype=torch.uint8)
    gpus = [Gpu(library, layout, memory, rank) for rank in range(world_size)]
    pending: list[Any] = []
    for call in range(12):
        numel = choice.choice([1, 15, 16 * world_size * chunks, choice.randrange(1, 9000), 4096, 10_001])
        xs = inputs(numel, TORCH[dtype], world_size)
        in_place = choice.random() < 0.3
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        expected = (total / world_size if reduce_op == "avg" else total).to(xs[0].dtype)
        outs = []
        for gpu, values in zip(gpus, xs, strict=True):
            driver.gpu = gpu
            x = torch.cat([values, torch.zeros(8, dtype=values.dtype)])  # aligned; what lies behind it shows
            out = x if in_place else torch.full_like(x, 1.5)
            out[numel:] = 1.5
            pushed = copy_engine.front(numel, config)
            kernel: Any = copy_engine.CopyEngineAllReduce(gpu, numel - pushed, x.dtype, reduce_op, config)
            if pushed:
                kernel = copy_engine.SideBySide(Pushes(driver, expected[:pushed]), kernel)
            kernel.launch(x.data_ptr(), out.data_ptr(), PATIENT, CURRENT)
            outs.append((x, out))
        pending.append((outs, expected, numel, in_place))
        if choice.random() < 0.5 or call == 11:  # else it is still under way when the next one is made
            finish(gpus, choice)
            while pending:
                outs, expected, numel, in_place = pending.pop()
                for _, out in outs:
                    assert same(out[:numel], expected), (call, numel, in_place)
                    assert (out[numel:] == 1.5).all(), "written past the end"
