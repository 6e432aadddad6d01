"""Kernels and their launchers on the CPU: the Python side of fibers.h, and of pushes.cpp for kernels that push."""

from __future__ import annotations

import ctypes
import functools
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import weft.kernels.device
from once import made_once
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.kernels.device.jit.program import Defines, Function, Program
from weft.symm_mem import workspace
from weft.symm_mem.failure import fault

DEVICE = Path(weft.kernels.device.__file__).parent
STAND_INS = (
    "ptx/sync.cuh",
    "ptx/barriers.cuh",
    "ptx/dependent.cuh",
    "ptx/float8.cuh",
    "ptx/mma.cuh",
    "math/numbers.cuh",
    "math/reduce.cuh",
)
REAL = (
    "comm/ll_protocol.cuh",
    "comm/ll_exchange.cuh",
    "comm/credits.cuh",
    "comm/abort_notice.cuh",
    "comm/double_buffer.cuh",
    "collective/slices.cuh",
    "collective/rounds.cuh",
    "collective/exact.cuh",
    "collective/combine.cuh",
    "collective/entries.cuh",
    "math/cluster_moments.cuh",
    "math/cluster_reduce.cuh",
    "math/warp.cuh",
)
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden")
Params = type | Mapping[str, type]  # of all kernels of a source, or of each
PATIENT = 100_000  # polls of one wait: far more than any takes
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def drawn_seed() -> int:
    """Printed, of torch's numbers and of Python's, too."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    return seed


def mistakes(each: Iterable[Any], every: int) -> list[Any]:
    """Broken variants as parameters. Whether tests see them depends on the tests, not on the library: every so many-th
    is in each run, all are in `make mutants`."""
    rows = [one if isinstance(one, tuple) else (one,) for one in each]
    return [
        pytest.param(*row, marks=() if i % every == 0 else pytest.mark.slow) for i, row in enumerate(rows)
    ]


def defines_of(program: Program) -> Defines:
    """All but those of one rank: one program runs as each of them."""
    return {name: value for name, value in program.defines.items() if name not in ("RANK", "DEPENDENT")}


class Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("broken", ctypes.c_uint32),
        ("params", ctypes.c_char * 2624),
        ("early", ctypes.c_int32),
    )


@dataclass
class Library:
    """A compiled .cu file: its kernels by name, and ``run``."""

    kernels: tuple[str, ...]
    library: ctypes.CDLL


def build(
    folder: Path,
    source: Path,
    kernels: Sequence[str],
    params: Params,
    defines: Mapping[str, str | int],
    beside: Sequence[tuple[Path, Sequence[str], Params]] = (),
    instead: tuple[str, str] | None = None,
) -> Library:
    """Compile ``source`` for every rank of ``defines["WORLD_SIZE"]``.

    Args:
        params: what kernels take, which must be as large.
        beside: more sources, the kernels of each and what they take, with which calls on one workspace take turns.
        instead: a text in a source or in one of REAL, and what shall stand there.
    """
    for room in ("collective", "comm", "math", "ptx"):
        (folder / room).mkdir(parents=True, exist_ok=True)
    sources = [(source, kernels, params), *beside]
    for stand_in in STAND_INS:
        (folder / stand_in).touch()
    # Beside the stand-ins, so that they include them and not their neighbours.
    places = {header: folder / header.name for file, _, _ in sources for header in file.parent.glob("*.cuh")}
    places |= {DEVICE / name: folder / name for name in REAL}
    places |= {file: folder / f"{i}_{file.name}" for i, (file, _, _) in enumerate(sources)}
    texts = {place: file.read_text().replace("#pragma once", "") for file, place in places.items()}
    # One program for all ranks: which of them runs is no constant.
    exchange = places[DEVICE / "comm/ll_exchange.cuh"]
    texts[exchange] = texts[exchange].replace("constexpr int peer_of", "int peer_of")
    if instead is not None:
        found = sum(text.count(instead[0]) for text in texts.values())
        assert found == 1, f"{found} times, not once, in {source} and what it includes: {instead[0]}"
        texts = {place: text.replace(*instead) for place, text in texts.items()}
    for place, content in texts.items():
        # Kernels of two sources may have one name, and each block has memory of its own.
        named = content.replace('extern "C" ', "")
        named = re.sub(r"__shared__ bool (\w+);", r"bool& \1 = weft::of_block<bool>();", named)
        dynamic = r"int* \1 = weft::of_block<weft::Dynamic>().words;"
        place.write_text(re.sub(r"extern __shared__ int (\w+)\[\];", dynamic, named))
    every = [name for _, names, _ in sources for name in names]
    lines, cases = ["#define RANK current->number"], []
    for i, (file, names, its_params) in enumerate(sources):
        space = f"source_{i}"  # each includes for itself
        lines += [f"namespace {space} {{", "namespace weft { using namespace ::weft; }"]
        lines += [f'#include "{places[file].name}"']
        lines += ["}"]
        for name in names:
            size = ctypes.sizeof(its_params[name] if isinstance(its_params, Mapping) else its_params)
            cases += [f"case {every.index(name)}: call_with<{size}>({space}::{name}, params); break;"]
    lines.append(
        f"void call(int, int kernel, const void* params) {{ switch (kernel) {{ {' '.join(cases)} }} }}"
    )
    (folder / "kernels.inc").write_text("\n".join(lines) + "\n")
    flags = [*FLAGS, "-shared", *(f"-D{name}={value}" for name, value in defines.items())]
    what = lines, sorted((place.name, content) for place, content in texts.items())
    here = Path(__file__).parent
    more = [simulator(here / "pushes_simulator.cpp", FLAGS)]
    return Library(tuple(every), compiled(here / "pushes.cpp", flags, folder, what, more))


def compiled(
    program: Path, flags: Sequence[str], folder: Path, what: Sequence[object], more: Sequence[str] = ()
) -> ctypes.CDLL:
    """A library of ``program``, of which the same one is compiled once, with variables of its own.

    The header that is called like the program is parsed once for all of them.

    Args:
        folder: empty but for what ``program`` includes; the library lies there, too.
        what: all of that.
        more: flags that ``what`` stands for.
    """
    header, gcc = program.with_suffix(".h"), toolchain(program.parent)
    for_header = [flag for flag in flags if not flag.startswith("-D") and flag != "-shared"]
    parsed = made_once(
        [*gcc, header.name, *for_header],
        lambda to: subprocess.run(["g++", *for_header, "-x", "c++-header", header, "-o", to], check=True),
    )
    (folder / f"{header.name}.gch").symlink_to(parsed)  # g++ takes it in place of the header
    shutil.copy(header, folder)
    here = [f"-I{folder}", f"-I{program.parent}", "-include", folder / header.name, *more]
    made = made_once(
        [*gcc, program.name, *flags, *what],
        lambda to: subprocess.run(["g++", *flags, *here, program, "-o", to], check=True),
    )
    return ctypes.CDLL(str(shutil.copy(made, folder / f"{program.stem}.so")))


def simulator(source: Path, flags: Sequence[str]) -> Path:
    """An object file of what runs most of the time, the same for all kernels."""
    flags = [*flags, "-O2"]
    return made_once(
        [*toolchain(source.parent), source.name, *flags],
        lambda to: subprocess.run(["g++", *flags, "-c", source, "-o", to], check=True),
    )


def toolchain(folder: Path) -> list[str]:
    """What all that is compiled from this folder depends on."""
    return [_compiler(), *_texts(folder)]


@functools.cache
def _compiler() -> str:
    """Which it is, and for which processor it compiles."""
    ask = ["g++", "--version"], ["g++", "-march=native", "-Q", "--help=target"]
    return "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in ask)


@functools.cache
def _texts(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.iterdir()) if file.suffix in (".h", ".cpp")]


@dataclass
class Fault:
    """Words and a record in plain memory."""

    address: int
    record: int


@dataclass
class Place:
    """A workspace in plain memory, and what the launchers asked for on it."""

    layout: ExchangeLayout | workspace.Layout
    address: int
    span: int
    rank: int
    fault: Fault
    launches: list[Launch] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)  # as a Workspace has it

    @property
    def world_size(self) -> int:
        return self.layout.world_size


class Ranks:
    """``world_size`` workspaces side by side; ``run`` runs what was launched, with the rank for a stream.

    Args:
        beside: other workspaces of the same group.
    """

    def __init__(
        self, library: Library, layout: ExchangeLayout | workspace.Layout, beside: Ranks | None = None
    ) -> None:
        self.library, self.layout = library, layout
        span, size = layout.bytes + 256, layout.world_size
        self.memory = torch.zeros(size, span, dtype=torch.uint8)
        self.faults = beside.faults if beside else torch.zeros(size, fault.Fault.WORDS, dtype=torch.int32)
        self.records = beside.records if beside else torch.zeros(size, 8, dtype=torch.int64)
        faults = [
            Fault(words.data_ptr(), record.data_ptr())
            for words, record in zip(self.faults, self.records, strict=True)
        ]
        self.places = [Place(layout, self.memory[r].data_ptr(), span, r, faults[r]) for r in range(size)]

    def function(self, name: str) -> Function:
        """A stand-in for a loaded kernel."""
        return Noted(self, self.library.kernels.index(name))

    def run(self, seed: int) -> None:
        self.run_late(seed, -1, 0)

    def epochs_of_the_first_block(self) -> list[int]:
        """By rank, of kernels that exchange: each launch has that block."""
        return [int(words[ExchangeLayout.EPOCHS]) for words in self.memory.view(torch.int32)]

    def ends(self, seed: int) -> bool:
        """Whether all launches do; else threads of a block wait for each other."""
        try:
            self.run(seed)
        except AssertionError:
            return False
        return True

    def run_late(self, seed: int, late: int, turns: int) -> list[list[bool]]:
        """Rank ``late`` begins when the others have had so many turns of a fiber, or are at their end.

        Returns, by rank and launch, whether the rank had been told of an expired wait when the launch ended.
        """
        launches = [launch for place in self.places for launch in place.launches]
        count, size = len(self.places[0].launches), len(self.places)
        run = (Launch * len(launches))(*launches)
        ended = self.library.library.run(run, size, count, seed, late, ctypes.c_long(turns))
        assert ended, f"seed {seed}: a launch does not end"
        return [[bool(run[rank * count + i].broken) for i in range(count)] for rank in range(size)]

    def check_that_rank_1_is_missed(self, params: Any) -> None:
        """Of 3 ranks: it comes, but what its launch sends goes nowhere. ``params``: what kernels take."""
        elsewhere = torch.zeros_like(self.memory)
        params.from_buffer(self.places[1].launches[0], 16).slots.watch.words = elsewhere[1].data_ptr()
        self.run(2)
        for rank in (0, 2):
            written, where, peer, word, *_ = self.records[rank].tolist()
            assert (written, where, peer) == (1, self.places[rank].address, 1)
            assert self.faults[rank, fault.Fault.BROKEN] == 1 + 1
            assert re.search(r"rank 1 .*for block [01]", self.layout.describe(word))

    def check_that_two_epochs_are_sent(self) -> torch.Tensor:
        """By three epochs of 10, 20 and 30 in a launch of rank 0: all that it takes comes, but rank 1 does not say that
        it has emptied any slots. Gives all numbers that it has sent."""
        words = self.memory.view(torch.int32)
        slots = words[:, ExchangeLayout.FIRST : self.layout.emptied]
        slots[0] = ~torch.tensor(1.0).view(torch.int32)
        self.library.library.run_one(ctypes.byref(self.places[0].launches[0]), 0)
        assert self.faults[0, fault.Fault.BROKEN] == 1 + 1
        sent = (~slots[1]).view(torch.float32)
        assert all(bool((sent == x).any()) for x in (10, 20)) and not (sent >= 30).any()
        assert words[1, self.layout.emptied] == 1, "what it says to be empty behind the expired wait"
        return sent

    def slots_are_empty(self) -> bool:
        return not self.memory[:, 4 * ExchangeLayout.FIRST : 4 * self.layout.emptied].any()


class Noted(Function):
    def __init__(self, ranks: Ranks, kernel: int) -> None:
        self.ranks, self.kernel = ranks, kernel

    def most_clusters(self, cluster: int, block: int, shared: int) -> int:
        return 1 << 20

    def bound(
        self, grid: int, block: int, args: ctypes.Structure, shared: int = 0, *, dependent: bool = False
    ) -> Callable[[int], None]:
        def note(rank: int) -> None:
            launch = Launch(self.kernel, grid, block, early=dependent)
            assert ctypes.sizeof(args) <= Launch.params.size
            ctypes.memmove(ctypes.addressof(launch) + 16, ctypes.addressof(args), ctypes.sizeof(args))
            self.ranks.places[rank].launches.append(launch)

        return note


def inputs(numel: int, dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    """Random bits: every NaN, infinities, zeros of both signs, and runs of the word that stands for empty."""
    words = torch.randint(-(2**31), 2**31, (world_size, numel + 1), dtype=torch.int64)
    special = torch.tensor([-1, 0, 1, -(2**31), 0x7F800000, 0x3F80BF80])
    chosen = special[torch.randint(len(special), words.shape)]
    words = torch.where(torch.rand(words.shape) < 0.3, chosen, words).to(torch.int32)
    return list(words.view(dtype)[:, :numel])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, zeros with their signs; any NaN is a NaN."""
    a, b = a.float(), b.float()
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())
