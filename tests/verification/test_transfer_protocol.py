"""The kernels of signal, wait, put and get and their launcher on the CPU, as fibers beside copy engines."""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fibers import Library, mistakes
from streams import Memory, Streams, with_streams
from weft.kernels.transfer import cuda_kernel
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.registration.engine import Access
from weft.symm_mem.registration.semaphores import ALLOWED, DONE, MOVED, SENT, TICKET, SlabLayout
from weft.symm_mem.timeouts import call_timeout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIZE = 3
PATIENT = 3_000_000  # polls: a launch of thousands of threads takes many turns
SINGLE, BATCH = cuda_kernel._Params, cuda_kernel._Batch
KERNELS = {
    "post": SINGLE,
    "await": SINGLE,
    "move": SINGLE,
    "post_all": BATCH,
    "await_all": BATCH,
    "move_all": BATCH,
}
# Bytes of a tensor: one block, with bytes after the vectors; two blocks of a batch; more than 4096 vectors, which are
# several blocks alone; by a copy engine.
SIZES = (16 * 37 + 5, 16 * 700, 16 * 2100 + 3, 16 * 4200, 16 * 4300)
COPY_ENGINE = 16 * 4250
SOURCE = Path(cuda_kernel.__file__).with_name("kernel.cu")


def compiled(folder: Path, instead: tuple[str, str] | None = None) -> Library:
    return with_streams(folder, SOURCE, KERNELS, {"WORLD_SIZE": SIZE}, instead=instead)


@dataclass(frozen=True)
class Registered:
    slot: int
    number: int


class Rank:
    """What the launcher asks of a registry, its heap and its semaphores; and a registered tensor of each of SIZES."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.layout, self.memory, self.rank = SlabLayout(SIZE, 0, {}), memory, rank
        device = torch.device("cuda", 0)
        self.heap = SimpleNamespace(
            rank=rank, world_size=SIZE, span=memory.span, device=device, group_name="ranks"
        )
        self.semaphores = self
        self._slab = SimpleNamespace(
            address=memory.address(rank), fault=memory.fault(rank), rank=rank, layout=self.layout,
            raise_if_broken=lambda op, inside: None,
        )  # fmt: skip
        self.tensors: list[Any] = [Registered(i, i) for i in range(len(SIZES))]

    def slab(self, slot: int) -> Any:
        return self._slab

    def address(self, slot: int, row: int, rank: int) -> int:
        return self._slab.address + 4 * self.layout.index(slot, row, rank)

    def tensor(self, i: int, of: int) -> torch.Tensor:
        first = self.layout.bytes + sum(-(-size // 16) * 16 for size in SIZES[:i])
        return self.memory.bytes[of, first : first + SIZES[i]]

    def words(self, row: int, slot: int = 0) -> torch.Tensor:
        """Of this rank, those of a slot."""
        first = self.layout.index(slot, row, 0)
        return self.memory.bytes[self.rank].view(torch.int32)[first : first + SIZE]


BYTES = SlabLayout(SIZE, 0, {}).bytes + sum(-(-size // 16) * 16 for size in SIZES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("transfer"))


class Group:
    """Ranks, their streams, and what has to come out of which launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
        self.memory = Memory(SIZE, BYTES)
        self.streams = Streams(library, self.memory)
        monkeypatch.setattr(cuda_state, "state", self.streams)
        self.ranks = [Rank(self.memory, rank) for rank in range(SIZE)]
        self.engines = []
        for rank in self.ranks:
            self.engines.append(cuda_kernel.CudaTransfers(rank))
            self.engines[-1].copy_engine_from = COPY_ENGINE
        self.kept: list[Any] = []  # what copies read
        self.results: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []  # rank, launch, got, expected

    def copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.kept.append((to, source))
        self.streams.copy(to.data_ptr(), source.data_ptr(), source.numel(), self.streams.rank)

    def reads(self, x: torch.Tensor, expected: torch.Tensor) -> None:
        """On the current rank, and after that nothing is left in ``x``."""
        rank, got = self.streams.rank, torch.zeros_like(expected)
        self.copied(got, x)
        self.results.append((rank, self.streams.enqueued(rank) - 1, got, expected))
        self.copied(x, torch.full_like(x, 255))

    def turn(self, choice: random.Random, gets: bool) -> None:
        """Each rank puts into or gets from its right neighbour's tensors: one, or several at once."""
        which = choice.sample(range(len(SIZES)), choice.choice([1, 1, 2, 4]))
        puts = not gets or choice.random() < 0.5
        sent = [[torch.randint(256, (SIZES[i],), dtype=torch.uint8) for i in which] for _ in range(SIZE)]
        for rank, engine in enumerate(self.engines):
            self.streams.rank = rank
            left, right = (rank - 1) % SIZE, (rank + 1) % SIZE
            of = [self.ranks[rank].tensors[i] for i in which]
            own = [self.ranks[rank].tensor(i, rank) for i in which]
            there = [self.ranks[rank].tensor(i, right) for i in which]
            local = [x.clone() for x in sent[rank]] if puts else [torch.zeros_like(x) for x in sent[right]]
            if not puts:
                for x, content in zip(own, sent[rank], strict=True):
                    self.copied(x, content)
            moves = [
                Access("put" if puts else "get", right, remote, mine)
                for remote, mine in zip(there, local, strict=True)
            ]
            self.kept += [sent, local]
            engine.signal([(x, left) for x in of])
            engine.move(list(zip(of, moves, strict=True)))
            engine.wait([(x, left) for x in of])
            for x, mine, from_left, from_right in zip(own, local, sent[left], sent[right], strict=True):
                self.reads(x if puts else mine, from_left if puts else from_right)
                # What was sent, or given, is used again.
                self.copied(mine if puts else x, torch.full_like(x, 254))

    def wrong(self) -> list[tuple[int, int]]:
        return [(rank, at) for rank, at, got, expected in self.results if not torch.equal(got, expected)]


def turns(group: Group, seed: int, count: int, polls: int = PATIENT, *, gets: bool = True) -> None:
    torch.manual_seed(seed)
    choice = random.Random(seed)
    with call_timeout(polls * 1e-9):
        for _ in range(count):
            group.turn(choice, gets)


def test_transfers_of_changing_kind(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        group = Group(monkeypatch, library)
        turns(group, seed, 8)
        assert group.streams.run(seed), f"seed {seed} does not end"
        assert not group.memory.records.any(), group.memory.records.tolist()
        assert not group.wrong(), f"seed {seed}"
        for rank in group.ranks:
            for slot in range(len(SIZES)):
                left = group.ranks[rank.rank - 1]
                assert rank.words(SENT, slot)[left.rank] == left.words(MOVED, slot)[rank.rank]
                assert not rank.words(TICKET, slot).any()


MISTAKES = {
    "a wait that does not wait": (
        "*p.count = n;\n    weft::wait_flag",
        "*p.count = n; if (false) weft::wait_flag",
    ),
    "a move that does not wait": (
        "weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE) && !broken",
        "!broken",
    ),
    "waits are not counted": ("*p.count = n;\n    weft::wait_flag", "weft::wait_flag"),
    "what a get moves is loaded before the wait": (
        "if (p.ours) load();",
        "load(); const_cast<Transfer&>(p).ours = 1;",
    ),
    "allowed before the block knows": ("    __syncthreads();\n    if (allowed) {", "    if (allowed) {"),
    "told before the block is done": (
        "    __syncthreads();\n    if (threadIdx.x != 0) return;",
        "    if (threadIdx.x != 0) return;",
    ),
    "no fence before the ticket": ("weft::fence_system();\n        if (atomicAdd", "if (atomicAdd"),
    "no fence after the tickets": ("weft::fence_system();  // after", "// after"),
    "the first block tells": ("!= p.blocks - 1", "!= 0"),
    "the ticket stays": ("*p.ticket = 0;", ""),
    "moves are not counted": ("    }\n    *p.count = n;", "    }"),
    "moves are counted early": (
        "// the last block counts, when all have read it",
        "\n    if (threadIdx.x == 0) *p.count = n;",
    ),
    "one block's stores are not released": (
        "weft::post_flag(p.told, n);\n    }",
        "weft::post_after_fence(p.told, n);\n    }",
    ),
    "nobody is told by one block": ("weft::post_flag(p.told, n);\n    }", "}"),
    "nobody is told by several blocks": ("weft::post_after_fence(p.told, n);", ";"),
    "what is counted is counted again": ("*p.count + p.step;", "*p.count + 1;"),
    "signals are not counted": ("*p.count = n;  // after", "// after"),
    "nobody is told by a post": ("if (!broken) weft::post_flag(p.told, n);\n", ""),
    "one of several waits": ("p.transfers) await_one", "1) await_one"),
    "one of several signals": ("p.transfers) post_one", "1) post_one"),
    "the blocks of a batch": ("blockIdx.x - p.of[i].first", "blockIdx.x"),
    "the bytes behind the vectors": ("threadIdx.x < p.tail", "threadIdx.x + 1 < p.tail"),
    "a vector of several": ("at += step * AT_ONCE;", "at += step * (AT_ONCE + 1);"),
}


@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 12))
def test_a_mistake_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    library = compiled(tmp_path, MISTAKES[mistake])
    for seed in range(30):
        group = Group(monkeypatch, library)
        turns(group, seed, 8)
        if not group.streams.run(seed) or group.memory.records.any() or group.wrong():
            return
    raise AssertionError(f"nothing goes wrong with: {mistake}")


LATE_MISTAKES = {
    "one block tells of what it has not moved": ("} else if (!broken) {", "} else {"),
    "several blocks tell of what they have not moved": (
        "if (!broken) weft::post_after_fence",
        "weft::post_after_fence",
    ),
}


@pytest.mark.parametrize("mistake", [None, *mistakes(LATE_MISTAKES, 2)])
def test_a_late_rank_is_right_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None
) -> None:
    """Puts by kernels: copies of a copy engine after a wait that expires cannot be called off, and what an owner does
    after such a wait may be what a get that it has allowed finds."""
    library = compiled(tmp_path, LATE_MISTAKES.get(mistake or ""))
    library.library.allow(
        ctypes.c_long(1 << 40)
    )  # a poll of one thread passes a turn of all that wait for it in their block
    right, told, untold = 0, 0, []
    for seed in range(8):
        choice = random.Random(seed)
        group = Group(monkeypatch, library)
        for engine in group.engines:
            engine.copy_engine_from = 1 << 30
        turns(group, seed, 4, choice.choice([3_000, 30_000]), gets=False)
        late = choice.randrange(SIZE)
        assert group.streams.run(seed, late, choice.randrange(1_000_000))
        wrong = set(group.wrong())
        right += len(group.results) - len(wrong)
        told += bool(wrong)
        untold += [f"seed {seed}: {at}" for at in wrong if not group.streams.told(*at)]
        if untold and mistake:
            break
    assert bool(untold) == (mistake is not None), untold
    assert right and told


@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_group_moves_and_posts_nothing(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The words that are awaited are there, and nothing but a count changes."""
    group = Group(monkeypatch, library)
    engine, of = group.engines[0], group.ranks[0].tensors
    access = [
        Access("put", 1, group.ranks[0].tensor(i, 1), torch.ones(SIZES[i], dtype=torch.uint8)) for i in (0, 3)
    ]
    for slot in range(len(SIZES)):
        group.ranks[0].words(ALLOWED, slot).fill_(5)
        group.ranks[0].words(DONE, slot).fill_(5)
    group.memory.faults[0, Fault.BROKEN] = 3
    before = group.memory.bytes[1:].clone()
    with call_timeout(PATIENT * 1e-9):
        some = [(x, 1) for x in (of if name.endswith("_all") else of[:1])]
        if name.startswith("post"):
            engine.signal(some)
        elif name.startswith("await"):
            engine.wait(some)
        elif name == "move":
            engine.move([(of[0], access[0])])
            engine.move([(of[3], access[1])])
        else:
            engine.move([(of[0], access[0]), (of[3], access[1])])
    assert group.streams.run(1)
    assert torch.equal(group.memory.bytes[1:], before)
    counts = group.memory.bytes[0].view(torch.int32)[: group.ranks[0].layout.words]
    assert counts.eq(1).sum() == {"post": 1, "await": 1, "move": 2, "move_all": 2}.get(name, len(SIZES))
