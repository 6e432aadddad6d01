"""The kernels around gemm.cuh and their launchers on the CPU: matmuls.cpp's Python side."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import DEVICE, Library, Ranks, compiled, simulator
from weft.kernels.device.gemm.gemm_tiles import Tile
from weft.kernels.device.jit.program import Defines, Function, Program
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.layout import Layout

STAND_INS = ("ptx/hopper.cuh", "ptx/blackwell.cuh", "ptx/sync.cuh", "math/numbers.cuh")
AROUND = (
    "gemm/gemm.cuh",
    "gemm/stages.cuh",
    "gemm/step_queue.cuh",
    "comm/double_buffer.cuh",
    "comm/rate_limiter.cuh",
    "gemm/tile_scheduler.cuh",
    "comm/ll_protocol.cuh",
)
SM90 = ("gemm/sm90/accumulator.cuh", "gemm/sm90/main_loop.cuh")
SM100 = ("gemm/sm100/accumulator.cuh", "gemm/sm100/descriptors.cuh", "gemm/sm100/main_loop.cuh")
FLAGS = [
    *("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-w", "-Wno-psabi", "-fPIC", "-fvisibility=hidden"),
]
SHARED = 128 << 10  # bytes that a block has
SMALL = Tile(64, 64, 2, 0.0)
WIDE = Tile(128, 32, 3, 0.0)
BROAD = Tile(128, 64, 2, 0.0)  # for B with N contiguous
TWO_AND_A_HALF = Tile(128, 160, 2, 0.0)  # groups of 64 columns
WIDEST = Tile(128, 320, 2, 0.0)  # of two instructions


_libraries = tempfile.TemporaryDirectory(prefix="weft-products-")
_compilers = ThreadPoolExecutor(os.cpu_count())
_built: dict[Hashable, Future[Library]] = {}


def build(
    source: Path, params: type, defines: Defines, instead: tuple[str, str] | None = None
) -> Future[Library]:
    """Compile ``source``, called like its folder; the same one once. It takes seconds: ask early.

    Args:
        instead: a text in it or in what it is made around, and what shall stand there.
    """
    key = (source, tuple(defines.items()), instead)
    if key not in _built:
        folder = Path(_libraries.name) / str(len(_built))
        _built[key] = _compilers.submit(_build, folder, source, params, defines, instead)
    return _built[key]


def _build(
    folder: Path, source: Path, params: type, defines: Defines, instead: tuple[str, str] | None
) -> Library:
    name = source.parent.name
    for new in (*(f"device/{room}" for room in ("comm", "gemm/sm90", "gemm/sm100", "math", "ptx")), name):
        (folder / new).mkdir(parents=True, exist_ok=True)
    for stand_in in STAND_INS:
        (folder / "device" / stand_in).touch()
    kernel = folder / name / source.name
    around_it = (*AROUND, *(SM100 if "__CUDA_ARCH__" in defines else SM90))
    if "FP8_TYPES" in defines:
        around_it += ("gemm/sm90/scales.cuh",)
    texts = {folder / "device" / around: (DEVICE / around).read_text() for around in around_it}
    for file in source.parent.glob("*.cuh"):
        texts[folder / name / file.name] = file.read_text()
    # Each block has memory of its own.
    shared = "extern __shared__ u8 base[];", "u8* base = weft::shared_base();"
    texts[kernel] = source.read_text().replace(*shared)
    if instead is not None:
        found = sum(text.count(instead[0]) for text in texts.values())
        assert found == 1, f"{found} times, not once, in {source} and what it is made around: {instead[0]}"
        texts = {file: text.replace(*instead) for file, text in texts.items()}
    for file, text in texts.items():
        file.write_text(text)
    options = {
        **defines,
        "KERNEL": name,
        "PARAMS_BYTES": ctypes.sizeof(params),
        "RANK": "current->number",  # one program for all
    }
    flags = [*FLAGS, "-shared", *(f"-D{key}={value}" for key, value in options.items())]
    made = simulator(Path(__file__).with_name("matmuls_simulator.cpp"), FLAGS)
    more = [f"-I{folder / 'device'}", f'-DSOURCE="{kernel}"', made]
    what = sorted((file.relative_to(folder).as_posix(), text) for file, text in texts.items())
    program = Path(__file__).with_name("matmuls.cpp")
    return Library((name,), compiled(program, flags, folder, what, more))


class Loaded(cuda_state.CudaState):
    """In place of CUDA: kernels of ranks, and tensor maps as matmuls.cpp reads them."""

    def __init__(self, ranks: Matmuls) -> None:
        super().__init__()
        self.ranks = ranks

    def function(self, program: Program, name: str, shared: int) -> Function:
        assert shared <= SHARED
        return self.ranks.function(name)

    def index_of(self, x: torch.Tensor) -> int:
        return 0

    def current_stream(self, index: int | None) -> int:
        return 0  # the first rank

    def tensor_map(self, *tiled: Any) -> bytes:
        _, dimensions, address, shape, strides, box, steps, *_ = tiled
        assert [int(step) for step in steps] == [1] * dimensions
        fill = 4 - dimensions
        numbers = (
            [int(extent) for extent in shape] + [1] * fill,
            [1, *(int(stride) // 2 for stride in strides)] + [0] * fill,  # in elements, of 16 bits
            [int(extent) for extent in box] + [1] * fill,
        )
        return struct.pack("16Q", address, *(n for each in numbers for n in each), 0, 0, 0)


class Matmuls(Ranks):
    """Ranks with poisoned buffers, or empty ones where data is its own flag, on which the launchers' kernels run.

    Args:
        pace: turns between two stores' becoming visible, and at most of a rank before another one has some.
        room: clusters that are on a GPU at once; 0: all of a launch.
    """

    room = 0

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, library: Library, layout: Layout, pace: tuple[int, int]
    ) -> None:
        super().__init__(library, layout)
        self.memory[:, layout.staging if layout.ll_protocol else layout.buffer(0) :] = 0xFF
        self.pace = pace
        monkeypatch.setattr(cuda_state, "state", Loaded(self))

    def use(self) -> None:
        first, size = ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_uint64(self.memory.numel())
        self.library.library.use(first, size, len(self.places), *self.pace)
        self.library.library.leave_room(self.room)

    def run_late(self, seed: int, late: int, turns: int) -> list[list[bool]]:
        self.use()
        return super().run_late(seed, late, turns)

    @property
    def strays(self) -> int:
        """How often a block, or a copy, reached for the shared memory of a block that had ended."""
        return int(self.library.library.reached_for_ended_blocks())

    def run_alone(self, rank: int) -> None:
        """Run the one launch of a rank."""
        self.use()
        (launch,) = self.places[rank].launches
        self.library.library.run_one(ctypes.byref(launch), rank)
