"""The all-reduce by copy engines with a rank that comes after the others have given up on it.

As in test_all_reduce_copies.py, streams are worked off in any order, here with the gate's own kernel, too. An impatient
rank does not wait: what stands at the head of a stream runs at any time, and its waits expire. Copies are made whatever
became of the gate in front of them, as copy engines do.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fibers import Launch, Library, build
from test_all_reduce_copies import CURRENT, KERNELS, Driver, Gpu
from weft.kernels.all_reduce import copy_engine
from weft.kernels.all_reduce.configs import Config
from weft.kernels.device import gate
from weft.symm_mem.fault import Fault
from weft.symm_mem.workspace import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

IMPATIENT, LATE = 0, 1
SIZE, CALLS, NUMEL = 3, 5, 600
GATES = ("gate", "leave")


class LateGpu(Gpu):
    """A rank whose kernels may run before what they wait for is there; ``told``: by call, whether it was told."""

    def __init__(
        self, libraries: tuple[Library, Library], layout: Layout, memory: torch.Tensor, rank: int
    ) -> None:
        super().__init__(libraries[0], layout, memory, rank)
        self.gates = libraries[1]
        self.seen = torch.zeros(8, dtype=torch.int64)
        self.fault.record = self.seen.data_ptr()
        self.told: list[bool] = []

    def ready(self, work: tuple[Any, ...]) -> bool:
        kind, *rest = work
        if kind == "kernel" and rest[0] in GATES:
            params = rest[2]
            expected = int(self.words[params.epoch])
            return all(int(self.words[params.done + p]) >= expected for p in range(SIZE) if p != self.rank)
        return super().ready(work)

    def run(self, work: tuple[Any, ...]) -> None:
        kind, *rest = work
        if kind != "kernel":
            return super().run(work)
        library = self.gates if rest[0] in GATES else self.library
        library.library.run_one(ctypes.byref(rest[1]), self.rank)
        if rest[0] == "collect":
            self.told.append(bool(self.faults[Fault.BROKEN]))
        return None


class Kernel:
    def __init__(self, driver: Driver, names: tuple[str, ...], name: str) -> None:
        self.driver, self.names, self.name = driver, names, name

    def launch(self, blocks: int, threads: int, params: Any, stream: int) -> None:
        launch = Launch(self.names.index(self.name), min(blocks, 2), 32)
        ctypes.memmove(ctypes.addressof(launch) + 16, ctypes.addressof(params), ctypes.sizeof(params))
        copy = type(params).from_buffer_copy(params)
        self.driver.gpu.enqueue(stream, "kernel", self.name, launch, copy)


def work_off(gpus: list[LateGpu], choice: random.Random, patience: float) -> None:
    """Everything. The late rank pauses at some moment until the others can do no more, or not so long.

    ``patience``: how likely it is at each turn that the impatient rank waits on.
    """
    stops = choice.randrange(250)
    goes_on = stops + choice.choice([300, 10_000])
    turn = 0
    while any(stream for gpu in gpus for stream in gpu.streams.values()):
        turn += 1
        heads: list[tuple[LateGpu, Any]] = []
        forced: list[tuple[LateGpu, Any]] = []
        for gpu in gpus:
            if gpu.rank == LATE and stops < turn < goes_on:
                continue
            for stream in gpu.streams.values():
                if stream and gpu.ready(stream[0]):
                    # Data has come and its flag has not: the moment at which a flag of an earlier use misleads.
                    flag = stream[0][0] == "copy" and stream[0][3] == 4
                    heads += [(gpu, stream)] * (1 if flag and gpu.rank == IMPATIENT else 8)
                elif stream and stream[0][0] == "kernel":
                    forced.append((gpu, stream))
        impatient = [f for f in forced if f[0].rank == IMPATIENT]
        if not heads and not forced:
            goes_on = turn
            continue
        hurry = impatient and choice.random() > patience
        gpu, stream = choice.choice(impatient if hurry else heads or impatient or forced)
        gpu.run(stream.popleft())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(copy_engine, "driver", driver)
    monkeypatch.setattr(copy_engine, "check", lambda result: result)
    monkeypatch.setattr(copy_engine, "_GRAIN", 16)
    monkeypatch.setattr(copy_engine, "PIECE", 4 * 500)  # a call is two uses
    for module, names in ((gate, GATES), (copy_engine, KERNELS)):
        functions = SimpleNamespace(function=lambda name, names=names: Kernel(driver, names, name))
        if module is gate:
            monkeypatch.setattr(gate, "_program", functions)
        else:
            monkeypatch.setattr(copy_engine, "program", lambda *a, found=functions: found)
    return driver


@pytest.mark.parametrize("patience", [1.0, 0.995])
def test_a_late_rank_is_right_or_told(tmp_path: Path, driver: Driver, patience: float) -> None:
    """Each call takes what the one before has given: a wrong number would travel on."""
    defines: dict[str, str | int] = {"WORLD_SIZE": SIZE, "DTYPE": "float32", "REDUCE": "sum"}
    libraries = (
        build(tmp_path / "copies", copy_engine.SOURCE, KERNELS, copy_engine._Params, defines),
        build(tmp_path / "gate", gate._SOURCE, GATES, gate._Params, defines),
    )
    config = Config("copy_engine", chunks=2, streams=2)
    layout = Layout(SIZE, *copy_engine.needs(4 * NUMEL, 4, SIZE, config)[::-1])
    outcomes: list[bool] = []
    farewells = 0
    for seed in range(30):
        choice = random.Random(seed)
        memory = torch.zeros(SIZE, layout.bytes + 4 * Fault.WORDS, dtype=torch.uint8)
        gpus = [LateGpu(libraries, layout, memory, rank) for rank in range(SIZE)]
        xs = [torch.randint(1, 9, (NUMEL,)).float() for _ in range(SIZE)]
        chains = [[x, *(torch.full_like(x, float("nan")) for _ in range(CALLS))] for x in xs]
        for gpu, chain in zip(gpus, chains, strict=True):
            driver.gpu = gpu
            kernel = copy_engine.CopyEngineAllReduce(gpu, NUMEL, torch.float32, "sum", config)  # type: ignore[arg-type]
            for x, out in pairwise(chain):
                kernel.launch(x.data_ptr(), out.data_ptr(), 3, CURRENT)
        work_off(gpus, choice, patience)
        for gpu, chain in zip(gpus, chains, strict=True):
            uses = len(gpu.told) // CALLS
            for call in range(CALLS):
                right = torch.equal(chain[call + 1], sum(xs) * 3.0**call)
                told = gpu.told[(call + 1) * uses - 1]
                assert right or told, f"seed {seed}: call {call} of rank {gpu.rank} is wrong"
                outcomes.append(right)
            farewells += int(gpu.seen[6]) == 3
    assert not all(outcomes) and any(outcomes)
    if patience < 1:
        assert farewells, "no rank was told by a farewell"
