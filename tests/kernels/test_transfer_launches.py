"""What the launches of kernels/transfer say to its kernels, between CPU ranks: Python stands in for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ranks import on_ranks
from weft import symm_mem
from weft.kernels.transfer.cuda_kernel import CudaTransfers
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.failure.spin_wait import PeerLiveness, spin
from weft.symm_mem.heap.registry import get_heap

COPY_ENGINE = 4096


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def arrives(p: Any) -> None:
    """What kernel.cu waits for; the words of this rank's slab are the only ones that it polls."""
    expected = word(p.of.count).value + 1
    assert not spin(p.watch.words + 4 * p.of.awaited, expected, 20.0, PeerLiveness(None, None))


def post(p: Any) -> None:
    p = p.of
    word(p.count).value += p.step
    word(p.told).value = word(p.count).value


def await_(p: Any) -> None:
    arrives(p)
    assert not p.of.told
    word(p.of.count).value += 1


def move(p: Any) -> None:
    arrives(p)
    p = p.of
    assert p.source % 16 == p.target % 16 == 0 and word(p.ticket).value == 0 and 1 <= p.blocks <= 64
    ctypes.memmove(p.target, p.source, 16 * p.vectors + p.tail)
    word(p.count).value += 1
    word(p.told).value = word(p.count).value


def move_all(p: Any) -> None:
    blocks = 0
    for i in range(p.transfers):
        assert p.of[i].first == blocks
        blocks += p.of[i].blocks
        move(SimpleNamespace(watch=p.watch, of=p.of[i]))


def each_of(kernel: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(p: Any) -> None:
        assert 1 < p.transfers <= 32
        for i in range(p.transfers):
            kernel(SimpleNamespace(watch=p.watch, of=p.of[i]))

    return run


KERNELS: dict[str, Callable[[Any], None]] = {
    "post": post,
    "await": await_,
    "move": move,
    "post_all": each_of(post),
    "await_all": each_of(await_),
    "move_all": move_all,
}


class Stage:
    """In place of the GPU: one stream, on which everything is done at once. Notes what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def function(self, program: Any, name: str, shared: int) -> Any:
        kernel = KERNELS[name]

        def bound(grid: int, block: int, params: Any, dependent: bool) -> Callable[[int], None]:
            last = params.of if not name.endswith("_all") else params.of[params.transfers - 1]
            assert block % 32 == 0 and (name.startswith("move") or block == 32)
            assert dependent is (grid == 1)
            assert grid == last.first + last.blocks <= (128 if name == "move_all" else 64)

            def run(stream: int) -> None:
                self.done.append(name)
                kernel(params)

            return run

        return SimpleNamespace(bound=bound)

    def is_capturing(self) -> bool:
        return False

    def current_stream(self, device: int | None) -> int:
        return 7

    def make_current(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        assert stream == 7
        self.done.append("copy")
        ctypes.memmove(to, source, size)


@on_ranks([1, 2, 3], fresh=True)
def test_what_launches_say_to_kernels(rank: int, world_size: int) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    wide = torch.zeros(2 * 3000).share_memory_()
    small, large, strided, empty = symm_mem.register(
        [torch.zeros(37 + rank).share_memory_(), torch.zeros(3000).share_memory_(), wide[::2], torch.zeros(0)]
    )
    stage = Stage()
    with mock.patch.object(cuda_state, "state", stage):
        engine = CudaTransfers(get_heap().registrations)
        engine.copy_engine_from = COPY_ENGINE
        get_heap().registrations._engine = engine
        for turn in range(6):
            for x, how in (
                (small, ["move"]),
                (large, ["await", "copy", "post"]),
                (strided, ["await", "post"]),
                (empty, ["move"]),
            ):
                count = x.shapes[right][0]
                sent = torch.arange(count + 1.0) + 1000 * turn + rank
                misaligned = turn % 2 == 1
                expected = ["await", "copy", "post"] if misaligned and x is small else how
                stage.done.clear()
                x.signal(left)
                x.put(sent[misaligned:][:count].clone() if not misaligned else sent[1:], right)
                x.wait(left)
                assert stage.done == ["post", *expected, "await"], (turn, x.number)
                first = 1000 * turn + left + misaligned
                assert torch.equal(x.tensor, torch.arange(len(x.tensor)) + float(first))
                x.signal(left)
                out = x.get(torch.full((count,), float("nan")), right)
                assert torch.equal(out, sent[1:] if misaligned else sent[:count]), (turn, x.number)
                x.wait(left)
    assert not wide[1::2].any()
    get_heap().registrations._engine = None


@on_ranks([1, 3], fresh=True)
def test_what_launches_of_batches_say(rank: int, world_size: int) -> None:
    """More than go into one launch, of two slabs of semaphores; what is large or strided goes alone."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sizes = [1 + 17 * i for i in range(90)]
    boxes = [torch.zeros(size).share_memory_() for size in sizes]
    filler = [torch.zeros(1).share_memory_() for _ in range(220)]  # so that others are of the next slab
    handles = symm_mem.register([*boxes[:40], *filler, *boxes[40:]])
    xs = [*handles[:40], *handles[260:]]
    stage = Stage()
    with mock.patch.object(cuda_state, "state", stage):
        engine = CudaTransfers(get_heap().registrations)
        engine.copy_engine_from = COPY_ENGINE
        get_heap().registrations._engine = engine
        for turn in range(2):
            sources = [torch.arange(float(size)) + 1000 * turn + rank for size in sizes]
            strided = torch.zeros(2 * sizes[5])[::2].copy_(sources[5])
            stage.done.clear()
            symm_mem.batch_signal([(x, left) for x in xs])
            assert stage.done == ["post_all"] * 4  # 40 and 50 of the two slabs, 32 in a launch
            stage.done.clear()
            given = [strided if i == 5 else source for i, source in enumerate(sources)]
            symm_mem.batch_put([(x, source, right) for x, source in zip(xs, given, strict=True)])
            large = sum(4 * size >= COPY_ENGINE for size in sizes)
            # 39 and 21 of the two slabs, 32 in a launch.
            assert large and stage.done[:3] == ["move_all"] * 3
            assert stage.done[3:] == ["await", "post", *["await", "copy", "post"] * large]
            stage.done.clear()
            symm_mem.batch_wait([*[(x, left) for x in xs[:33]], (xs[-1], left)])
            assert stage.done == ["await_all", "await", "await"]
            symm_mem.batch_wait([(x, left) for x in xs[33:-1]])
            for x, size in zip(xs, sizes, strict=True):
                assert torch.equal(x.tensor, torch.arange(float(size)) + 1000 * turn + left)
            symm_mem.batch_put([])
    get_heap().registrations._engine = None
