"""The kernels that end an all-gather or reduce-scatter which copy engines carry, as fibers beside those copies."""

from __future__ import annotations

import ctypes
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fibers import Library, mistakes
from streams import Memory, Streams, with_streams
from weft.kernels.async_collectives import cuda_kernel
from weft.kernels.async_collectives.cuda_kernel import AsyncCollective, AsyncProblem
from weft.kernels.device.comm import acquire
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.layout import NUM_BUFFERS, Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIZE = 3
PATIENT = 1_000_000  # polls
SOURCE = Path(cuda_kernel.__file__).with_name("kernel.cu")
KERNELS = ("arrive", "gather", "sum_float32", "avg_float32", "sum_bfloat16", "avg_bfloat16")
PROBLEMS = [("", torch.uint8, False), ("", torch.uint8, True)]
PROBLEMS += [(op, dtype, False) for op in ("sum", "avg") for dtype in (torch.float32, torch.bfloat16)]
MOST = 16 * 2100  # bytes of a part: of which two blocks have some


def compiled(folder: Path, instead: tuple[str, str] | None = None) -> Library:
    kernels = dict.fromkeys(KERNELS, cuda_kernel._Params)
    beside = [(acquire._SOURCE, ("acquire", "leave"), acquire._Params)]
    return with_streams(folder, SOURCE, kernels, {"WORLD_SIZE": SIZE}, beside, instead)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("async"))


class Group:
    """Ranks with a workspace and two calls at most under way, one in each buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
        self.layout = Layout(SIZE, 1, SIZE * MOST)
        self.memory = Memory(SIZE, self.layout.bytes)
        self.streams = Streams(library, self.memory)
        monkeypatch.setattr(cuda_state, "state", self.streams)
        heap = SimpleNamespace(device=torch.device("cuda", 0))
        self.places: list[Any] = [
            SimpleNamespace(
                world_size=SIZE,
                layout=self.layout,
                rank=rank,
                heap=heap,
                address=self.memory.address(rank),
                span=self.memory.span,
                fault=self.memory.fault(rank),
                copy_streams={},
            )
            for rank in range(SIZE)
        ]
        self.kept: list[Any] = []
        self.results: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []  # rank, launch, got, expected

    def copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.kept.append((to, source))
        self.streams.copy(to.data_ptr(), source.data_ptr(), source.nbytes, self.streams.rank)

    def calls(self, seed: int, count: int, polls: int = PATIENT) -> None:
        torch.manual_seed(seed)
        choice = random.Random(seed)
        sizes = choice.choice([[1, 7, 40, 2100], [2100]])
        drawn = [(choice.choice(PROBLEMS), 16 * choice.choice(sizes)) for _ in range(count)]
        apart = [
            choice.random() < choice.choice([0.5, 1]) for _ in range(count)
        ]  # another call starts before the end
        inputs = [self.inputs(*each) for each in drawn]
        for rank in range(SIZE):
            self.streams.rank = rank
            under_way: Any = None
            for i, (((reduce_op, dtype, placed), size), (xs, wants)) in enumerate(
                zip(drawn, inputs, strict=True)
            ):
                problem = AsyncProblem(size, reduce_op, dtype, placed)
                call = AsyncCollective(self.places[rank], problem), i % NUM_BUFFERS, xs[rank].clone()
                call[0].send(call[1], call[2].data_ptr(), polls)
                if under_way:
                    self.ends(*under_way, polls)
                under_way = (*call, problem, wants[rank])
                if not apart[i]:
                    self.ends(*under_way, polls)
                    under_way = None
            if under_way:
                self.ends(*under_way, polls)

    def inputs(
        self, problem: tuple[str, torch.dtype, bool], size: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        reduce_op, dtype, _ = problem
        n = size // dtype.itemsize
        if not reduce_op:
            xs = [torch.randint(255, (n,), dtype=dtype) for _ in range(SIZE)]
            return xs, [torch.cat(xs)] * SIZE
        # Small whole numbers, three times: sums and means are exact.
        xs = [3.0 * torch.randint(-9, 10, (SIZE * n,)).to(dtype) for _ in range(SIZE)]
        total = torch.stack(xs).double().sum(0) / (SIZE if reduce_op == "avg" else 1)
        return xs, list(total.to(dtype).view(SIZE, n))

    def ends(
        self,
        call: AsyncCollective,
        buffer: int,
        x: torch.Tensor,
        problem: AsyncProblem,
        want: torch.Tensor,
        polls: int,
    ) -> None:
        rank, out = self.streams.rank, torch.empty_like(want)
        at = x.data_ptr() + (rank * problem.part_bytes if problem.reduce_op else 0)
        call.receive(buffer, at, out.data_ptr(), polls, rank)
        ended = self.streams.enqueued(rank) - 1
        if problem.placed:
            first = self.layout.buffer(buffer)
            self.copied(out, self.memory.bytes[rank, first : first + want.nbytes])
            call.release(buffer, rank)
            ended = self.streams.enqueued(rank) - 1
        self.copied(x, torch.full_like(x, 77))  # what was sent is used again
        self.kept += [call, x]
        self.results.append((rank, ended, out, want))

    def wrong(self) -> list[tuple[int, int]]:
        return [(rank, at) for rank, at, got, expected in self.results if not torch.equal(got, expected)]


def test_calls_of_changing_kind(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        group = Group(monkeypatch, library)
        group.calls(seed, 10)
        assert group.streams.run(seed), f"seed {seed} does not end"
        assert not group.memory.records.any(), group.memory.records.tolist()
        assert not group.wrong(), f"seed {seed}"
        words = group.memory.bytes.view(torch.int32)
        assert (words[:, Layout.EPOCH : Layout.EPOCH + NUM_BUFFERS] == 10 // NUM_BUFFERS).all()
        assert not words[:, Layout.LEFT : Layout.LEFT + NUM_BUFFERS].any()


_WAIT = "p.buffer.flags + peer * p.buffer.flags_per_rank, epoch, weft::WAIT_DATA);"
_END = "weft::end_epoch_at(p.watch, p.buffer, peer, epoch);"
MISTAKES = {
    "nobody waits for the parts": (_WAIT, "0, epoch, weft::WAIT_FREE), there = true;"),
    "one peer is not waited for": (
        "if (peer < WORLD_SIZE && peer != p.watch.rank)\n",
        "if (peer < WORLD_SIZE - 1 && peer != p.watch.rank)\n",
    ),
    "an older epoch will do": ("epoch, weft::WAIT_DATA", "epoch - 1, weft::WAIT_FREE"),
    "what is placed is not waited for": ("    arrived(p, p.watch.words[p.buffer.epoch] + 1);\n", ""),
    "left before the block has read": (
        "    __shared__ bool last;\n    __syncthreads();",
        "    __shared__ bool last;",
    ),
    "the first block ends the epoch": ("== gridDim.x - 1", "== 0"),
    "every block ends the epoch": (
        "if (!last || threadIdx.x >= 32) return;",
        "if (threadIdx.x >= 32) return;",
    ),
    "the count of blocks stays": ("if (peer == 0) p.watch.words[p.buffer.left] = 0;", ""),
    "epochs are not counted": ("if (peer == 0) p.watch.words[p.buffer.epoch] = epoch;", ""),
    "nobody is told of the end": (f"(peer < WORLD_SIZE) {_END}", "(false) {}"),
    "an end of the next epoch": (f"(peer < WORLD_SIZE) {_END}", f"(peer < WORLD_SIZE) {_END[:-2]} + 1);"),
    "the slot of another rank": ("(rank - (rank > p.watch.rank))", "(rank - (rank < p.watch.rank))"),
    "the place of another rank": ("uint4* target = p.out + rank *", "uint4* target = p.out + i *"),
    "a part is left out of the sum": (
        "int rank = 1; rank < WORLD_SIZE",
        "int rank = 1; rank < WORLD_SIZE - 1",
    ),
}


@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 7))
def test_a_mistake_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    library = compiled(tmp_path, MISTAKES[mistake])
    for seed in range(60):
        group = Group(monkeypatch, library)
        group.calls(seed, 10)
        if not group.streams.run(seed) or group.memory.records.any() or group.wrong():
            return
    raise AssertionError(f"nothing goes wrong with: {mistake}")


_NOTICE = "if (said != 0) report(watch, peer, buffer.done + peer, epoch, said, ABORTED);"
LATE_MISTAKES = {"nobody listens to notices": (_NOTICE, "")}


@pytest.mark.parametrize("mistake", [None, *LATE_MISTAKES])
def test_a_late_rank_is_right_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None
) -> None:
    library = compiled(tmp_path, LATE_MISTAKES.get(mistake or ""))
    library.library.allow(ctypes.c_long(1 << 40))
    right, told, untold = 0, 0, []
    for seed in range(8 if mistake is None else 60):
        choice = random.Random(seed)
        group = Group(monkeypatch, library)
        group.calls(seed, 6, choice.choice([300, 3_000, 30_000]))
        assert group.streams.run(seed, choice.randrange(SIZE), choice.randrange(300_000))
        wrong = set(group.wrong())
        right += len(group.results) - len(wrong)
        told += bool(wrong)
        untold += [f"seed {seed}: {at}" for at in wrong if not group.streams.told(*at)]
        if untold and mistake:
            break
    assert bool(untold) == (mistake is not None), untold
    assert right and told


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_broken_group_uses_nothing(
    library: Library, monkeypatch: pytest.MonkeyPatch, problem: tuple[str, torch.dtype, bool]
) -> None:
    """All parts are there, and nothing comes out; the epoch ends."""
    group = Group(monkeypatch, library)
    call = AsyncCollective(group.places[0], AsyncProblem(64, *problem))
    words = group.memory.bytes[0].view(torch.int32)
    words[group.layout.flags(0) : group.layout.flags(0) + SIZE] = 1
    group.memory.faults[0, Fault.BROKEN] = 3
    x, out = torch.ones(64 * SIZE, dtype=torch.uint8), torch.full((64 * SIZE,), 7, dtype=torch.uint8)
    function = call._receives[0]
    call._params[0].own, call._params[0].out = x.data_ptr(), out.data_ptr()
    function(0)
    assert group.streams.run(1)
    assert (out == 7).all()
    assert words[Layout.EPOCH] == (not problem[2])
