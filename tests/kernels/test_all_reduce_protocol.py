"""The CUDA all-reduce and its launcher on the CPU, threads as fibers: slots, epochs, deadlines, special bits."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from weft.kernels.all_reduce import cuda_kernel
from weft.kernels.all_reduce.configs import FORMS, Config, Layout, layout_for

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PATIENT = 100_000  # polls of one wait: far more than any takes


class Launch(ctypes.Structure):
    _fields_ = (
        ("form", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("params", cuda_kernel._Params),
    )


@dataclass
class Place:
    """A workspace in plain memory, and what the launcher asked for on it."""

    layout: Layout
    address: int
    span: int
    rank: int
    record: int = 0
    launches: list[Launch] = field(default_factory=list)


def build(folder: Path, world_size: int, dtype: str) -> ctypes.CDLL:
    for stand_in in ("sync.cuh", "numbers.cuh"):
        (folder / stand_in).touch()
    library = folder / "fibers.so"
    defines = [f"-DWORLD_SIZE={world_size}", f"-DDTYPE={dtype}", f'-DKERNEL="{cuda_kernel.SOURCE}"']
    source = Path(__file__).with_name("fibers.cpp")
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run(["g++", *flags, *defines, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


class Ranks:
    """``world_size`` workspaces side by side, and the launcher with a stand-in for the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, layout: Layout) -> None:
        self.library, self.layout = library, layout
        span = layout.bytes + 256
        self.memory = torch.zeros(layout.world_size, span, dtype=torch.uint8)
        self.records = torch.zeros(layout.world_size, 8, dtype=torch.int64)
        self.places = [
            Place(layout, self.memory[r].data_ptr(), span, r, self.records[r].data_ptr())
            for r in range(layout.world_size)
        ]
        ranks = self

        class Function:
            def __init__(self, form: str) -> None:
                self.form = form

            def launch(self, blocks: int, threads: int, params: cuda_kernel._Params, rank: int) -> None:
                launch = Launch(self.form == "two_shot", blocks, threads)
                launch.params = params  # a copy
                ranks.places[rank].launches.append(launch)

        monkeypatch.setattr(cuda_kernel, "_function", lambda w, dtype, form, device: Function(form))

    def launch(
        self,
        rank: int,
        x: torch.Tensor,
        out: torch.Tensor,
        reduce_op: str,
        config: Config,
        polls: int = PATIENT,
    ) -> None:
        cuda_kernel.launch(self.places[rank], x, out, reduce_op, polls, rank, config)

    def run(self, seed: int) -> None:
        assert self.library.size_of_params() == ctypes.sizeof(cuda_kernel._Params)
        launches = [launch for place in self.places for launch in place.launches]
        count = len(self.places[0].launches)
        self.library.run((Launch * len(launches))(*launches), len(self.places), count, seed)

    def slots_are_empty(self) -> bool:
        return not self.memory[:, 4 * Layout.SLOTS : self.layout.bytes].any()


def inputs(numel: int, dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    """Random bits: every NaN, infinities, zeros of both signs, and runs of the word that stands for empty."""
    words = torch.randint(-(2**31), 2**31, (world_size, numel + 1), dtype=torch.int64)
    special = torch.tensor([-1, 0, 1, -(2**31), 0x7F800000, 0x3F80BF80])
    chosen = special[torch.randint(len(special), words.shape)]
    words = torch.where(torch.rand(words.shape) < 0.3, chosen, words).to(torch.int32)
    return list(words.view(dtype)[:, :numel])


def reference(xs: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return (total / len(xs) if reduce_op == "avg" else total).to(xs[0].dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, zeros with their signs; any NaN is a NaN."""
    a, b = a.float(), b.float()
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, "bfloat16"), (3, "float32"), (4, "bfloat16"), (8, "float32")]
)
def test_calls_of_changing_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, dtype: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    choice = random.Random(seed)
    ranks = Ranks(monkeypatch, build(tmp_path, world_size, dtype), Layout(world_size, 64))
    calls = []
    for _ in range(40):
        numel = choice.choice([1, 3, 31, 127, 128, 129, 500, 1000, choice.randrange(1, 3000), 5000])
        reduce_op = choice.choice(["sum", "avg"])
        config = Config(choice.choice(FORMS), choice.choice([1, 3, 5]), choice.choice([32, 64]))
        xs = inputs(numel, TORCH[dtype], world_size)
        outs = []
        for rank in range(world_size):
            # Any address: a rank's own input may be aligned where another's is not.
            shift = choice.randrange(2)
            x = torch.cat([xs[rank][:1].expand(shift), xs[rank]])[shift:]
            out = torch.full((numel + shift + 1,), float("nan"), dtype=x.dtype)
            out[-1] = 1.5
            ranks.launch(rank, x, out[shift : shift + numel], reduce_op, config)
            outs.append((out, shift, x))
        calls.append((xs, outs, reduce_op, config))
    ranks.run(seed)
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"
    for xs, outs, reduce_op, config in calls:
        expected = reference(xs, reduce_op)
        for rank, (out, shift, _) in enumerate(outs):
            assert same(out[shift:-1], expected), (rank, len(expected), reduce_op, config)
            assert out[-1] == 1.5, "written past the end"
    assert ranks.slots_are_empty()


def test_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, build(tmp_path, 4, "bfloat16"), Layout(4, 64))
    xs = [torch.randn(1999).bfloat16() for _ in range(4)]
    expected = reference(xs, "sum")
    for rank, x in enumerate(xs):
        ranks.launch(rank, x, x, "sum", Config("two_shot", 3, 32))
    ranks.run(1)
    assert all(torch.equal(x, expected) for x in xs)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    ranks = Ranks(monkeypatch, build(tmp_path, 3, "float32"), Layout(3, 64))
    xs = [torch.randn(200) for _ in range(3)]
    outs = [torch.empty_like(x) for x in xs]
    for rank in range(3):
        ranks.launch(rank, xs[rank], outs[rank], "sum", Config(form), polls=2000)
    # Rank 1 comes, but what it sends goes nowhere.
    elsewhere = torch.zeros_like(ranks.memory)
    ranks.places[1].launches[0].params.watch.words = elsewhere[1].data_ptr()
    ranks.run(2)
    for rank in (0, 2):
        written, by, peer, word, expected, seen, kind, _ = ranks.records[rank].tolist()
        assert (written, by, peer, expected, seen, kind) == (1, rank, 1, 1, 0, 1)
        assert re.fullmatch(
            r"use count of the payload of rank 1 for block [01] \(half 1\)", ranks.layout.describe(word)
        )


def test_the_layout_takes_what_it_was_made_for() -> None:
    for nbytes in (1, 16, 4096, 1 << 20, 2 << 20):
        layout = layout_for(nbytes, 4)
        assert layout.vectors(Config("one_shot")) * 16 >= nbytes
        assert layout.bytes == 4 * Layout.SLOTS + 132 * 2 * 4 * layout.slots * 16
    for slots in (64, 192, 1024):
        layout = Layout(8, slots)
        for config in (Config("one_shot"), Config("two_shot"), Config("one_shot", 7, 96)):
            room = slots if config.form == "one_shot" else slots // 2
            for vectors in {1, 31, 33, 4224, 4225, layout.vectors(config) - 1, layout.vectors(config)}:
                blocks, threads = layout.grid(min(vectors, layout.vectors(config)), config)
                passes = -(-min(vectors, layout.vectors(config)) // (blocks * threads))
                assert blocks <= config.blocks
                assert threads <= config.threads
                assert passes * threads <= room
                assert (blocks - 1) * 32 < vectors, "a block without a vector"
