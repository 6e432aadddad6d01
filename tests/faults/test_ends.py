"""How a job ends, or does not: Ctrl-C, a store that is lost, a rank that compiles for long, a rank that is gone."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, one_shot_all_reduce
from weft.symm_mem.bootstrap.rendezvous import Rendezvous
from weft.symm_mem.heap.heap import heap_of
from weft.symm_mem.heap.registry import get_heap

LONG = 120.0  # seconds: a deadline that no test waits for


def ones() -> torch.Tensor:
    return torch.ones(4, 4)


@cache
def peers() -> symm_mem.Peers:
    return symm_mem.rendezvous(symm_mem.empty(4))


def wait() -> None:
    rank, size = peers().rank, peers().world_size
    peers().put((rank + 1) % size, channel=1)
    peers().wait((rank - 1) % size, channel=1)


CALLS: dict[str, Callable[[], object]] = {
    "fused_all_gather_matmul": lambda: fused_all_gather_matmul(ones(), [ones()], 0, None),
    "fused_matmul_reduce_scatter": lambda: fused_matmul_reduce_scatter(
        torch.ones(12, 4), ones(), "sum", 0, None
    ),
    "one_shot_all_reduce": lambda: one_shot_all_reduce(ones(), "sum", None),
    "allocate": lambda: symm_mem.empty(100),
    "barrier": lambda: peers().barrier(),
    "wait": wait,
}


def hear_ctrl_c() -> None:
    """What runs in the background of a script has it switched off, and so have its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.alone
@on_ranks(2, fresh=True)
def test_an_interrupted_rank_comes_out_at_once_and_the_others_are_told(rank: int, world_size: int) -> None:
    """Rank 0 presses Ctrl-C while it waits for rank 1, which has not come."""
    hear_ctrl_c()
    symm_mem.set_timeout(LONG)
    for name, call in CALLS.items():
        call()
        dist.barrier()
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert time.monotonic() - begin < LONG / 4
            assert not [t.name for t in threading.enumerate() if t.name.startswith("weft")]
            with pytest.raises(symm_mem.CallAbandoned, match=rf"{name}: rank 0 .* left a call half-way:"):
                call()
        dist.barrier()
        if rank == 1:
            begin = time.monotonic()
            with pytest.raises(symm_mem.PeerTimeout, match=r"for rank 0: .* and it has given up"):  # noqa: PT012
                for _ in range(3):  # what rank 0 sent before, this rank can still use
                    call()
            assert time.monotonic() - begin < LONG / 4
        symm_mem.reset()
        call()


def waits_for_ever(rank: int, store: str, pipe: Connection) -> None:
    """A job's process: its second call waits for rank 1, which does something else."""
    hear_ctrl_c()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    call = CALLS["fused_all_gather_matmul"]
    call()
    pipe.send("ready")
    if rank == 1:
        time.sleep(100)
    call()


def test_ctrl_c_ends_a_job_cleanly(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    pipes, ranks = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        ranks.append(
            context.Process(
                target=waits_for_ever, args=(rank, f"file://{tmp_path}/store", theirs), daemon=True
            )
        )
        ranks[-1].start()
        pipes.append(mine)
    try:
        for pipe in pipes:
            assert pipe.poll(60) and pipe.recv() == "ready"
        time.sleep(0.3)
        for process in ranks:
            os.kill(process.pid, signal.SIGINT)
        for process in ranks:
            process.join(10)
            assert process.exitcode == 1, "what Python makes of a KeyboardInterrupt that nobody catches"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def loses_the_store(rank: int, world_size: int) -> str | None:
    symm_mem.set_timeout(LONG)
    CALLS["one_shot_all_reduce"]()
    other = dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(symm_mem.WeftError) as error:
        CALLS["allocate"]()
    with pytest.raises(symm_mem.WeftError) as again:
        CALLS["allocate"]()
    for what, call in [("reset", symm_mem.reset), ("make a heap", lambda: symm_mem.empty(4, group=other))]:
        with pytest.raises(symm_mem.WeftError, match=rf"^{what} in group .*: rank \d cannot reach"):
            call()
    assert time.monotonic() - begin < 10
    return f"{error.value} | {again.value}"


def test_a_store_that_is_lost_with_rank_0() -> None:
    texts = run_ranks(loses_the_store, 3, expect_dead=(0,), store="rank 0")
    for rank in (1, 2):
        ours = rf"rank {rank} (of group '0' waited [\d.]+ s for rank 0|cannot reach the group's store \(rank 0's)"
        assert re.search(ours, texts[rank]), texts[rank]


@pytest.mark.alone
@on_ranks(2, fresh=True, store="rank 0")
def test_a_store_that_is_stopped_with_rank_0(rank: int, world_size: int) -> None:
    """Rank 0's process keeps the store and is stopped for a while: that is named, within the deadline."""
    CALLS["allocate"]()
    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        symm_mem.set_timeout(0.6)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            begin = time.monotonic()
            for call, what in [(CALLS["allocate"], "allocate"), (symm_mem.reset, "reset")]:
                words = (
                    rf"^{what} in group '0': rank 1 waited 0.\d+ s for the group's store .* does not answer"
                )
                with pytest.raises(symm_mem.WeftError, match=words):
                    call()
            assert time.monotonic() - begin < 15  # it is stopped until this rank wakes it
        finally:
            os.kill(pids[0], signal.SIGCONT)
    dist.barrier()
    symm_mem.set_timeout(LONG)
    symm_mem.reset()
    CALLS["allocate"]()


def killed_in_a_reset(rank: int, world_size: int) -> str:
    symm_mem.set_timeout(LONG)
    CALLS["allocate"]()
    if rank == 1:  # once all ranks have come
        Rendezvous.gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(symm_mem.PeerTimeout) as error:
        symm_mem.reset()
    return str(error.value)


def test_a_rank_that_is_killed_in_a_reset_is_named_at_once() -> None:
    text = run_ranks(killed_in_a_reset, 2, expect_dead=(1,), store="tcp", timeout=30)[0]
    assert text.startswith("reset: rank 0 of group '0' waited ") and "its process has ended" in text, text


def killed_anywhere(rank: int, world_size: int, after: float) -> str | None:
    """Calls, allocations that grow the heap, and a rank that is gone in the midst of whatever it was doing."""
    symm_mem.set_timeout(LONG)
    for call in CALLS.values():
        call()
    dist.barrier()
    if rank == 1:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    kept = []
    with pytest.raises(symm_mem.PeerTimeout) as error:  # noqa: PT012
        while time.monotonic() - begin < 20:
            for turn in range(20):
                x = torch.randn(turn + 1, 4, generator=torch.Generator().manual_seed(turn))
                assert torch.equal(one_shot_all_reduce(x, "sum", None), x * 3)
                assert torch.equal(
                    fused_all_gather_matmul(x, [torch.eye(4)], 0, None)[1][0], torch.cat([x] * 3)
                )
            kept = [symm_mem.empty(9 << 20, dtype=torch.uint8), *kept[:8]]
    assert time.monotonic() - begin < after + 15
    assert error.value.culprit == 1, error.value
    return str(error.value)


def test_a_rank_that_is_killed_at_any_moment_is_named_at_once() -> None:
    for after in [0.0, *(random.uniform(0, 0.4) for _ in range(3))]:
        texts = run_ranks(killed_anywhere, 3, after, expect_dead=(1,), store="tcp")
        for rank in (0, 2):
            assert "its process has ended" in texts[rank] or "it has given up on rank 1" in texts[rank], texts


def prepares(rank: int, world_size: int) -> list[str]:
    heap = get_heap()
    symm_mem.set_timeout(0.5)
    heap.prepare("an_op", "slow", lambda: time.sleep(1.5 * (rank == 1)))  # three deadlines: nobody minds
    CALLS["one_shot_all_reduce"]()
    heap.prepare("an_op", "slow", lambda: pytest.fail("once for each key"))

    def fails() -> None:
        if rank == 1:
            raise RuntimeError("ptxas is missing")

    symm_mem.set_timeout(LONG)
    for _ in range(2):  # what has failed is tried again
        with pytest.raises(symm_mem.WeftError, match="prepare an_op in group '0': rank 1: RuntimeError:"):
            heap.prepare("an_op", "fails", fails)
    symm_mem.set_timeout(0.5)
    texts = []
    if rank != 1:
        with pytest.raises(symm_mem.PeerTimeout) as error:
            heap.prepare("an_op", "alone", lambda: None)
        texts.append(str(error.value))
    symm_mem.set_timeout(LONG)
    symm_mem.reset()
    CALLS["allocate"]()
    if rank == 1:
        heap.prepare("an_op", "dies", lambda: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    with pytest.raises(symm_mem.PeerTimeout) as died:
        heap.prepare("an_op", "dies", lambda: None)
    assert time.monotonic() - begin < LONG / 4
    return [*texts, str(died.value)]


def test_compiling_does_not_count_against_the_deadline() -> None:
    texts = run_ranks(prepares, 3, expect_dead=(1,), store="tcp")
    for rank in (0, 2):
        alone, died = texts[rank]
        assert alone.startswith(f"prepare an_op: rank {rank} of group '0' waited 0.5 s for rank 1: ")
        assert "rank 1: " in died and "its process has ended" in died


def resets(rank: int, world_size: int) -> tuple[int, ...]:
    heap = get_heap()
    first = symm_mem.rendezvous(symm_mem.empty(1000))
    # A rank that does not come to a reset is named, and the reset can be called again.
    if rank == 0:
        symm_mem.set_timeout(0.3)
        with pytest.raises(symm_mem.PeerTimeout, match=r"reset: rank 0 of group '0' waited 0.3 s for rank"):
            symm_mem.reset()
    dist.barrier()
    symm_mem.set_timeout(LONG)
    symm_mem.reset()
    # An allocation that rank 1 leaves after it has mapped what the others still wait for.
    real = heap.backend.map

    def leaves(address: int, handle: object, size: int) -> None:
        real(address, handle, size)
        if address > heap.address(1):
            raise KeyboardInterrupt

    if rank == 1:
        heap.backend.map = leaves
    with pytest.raises(BaseException, match=r"has given up|^$") as error:
        symm_mem.empty(30 << 20, dtype=torch.uint8)
    assert isinstance(error.value, KeyboardInterrupt if rank == 1 else symm_mem.PeerTimeout)
    heap.backend.map = real
    symm_mem.reset()
    # One that rank 1 has long given up when the others come.
    if rank == 1:
        symm_mem.set_timeout(0.3)
        with pytest.raises(symm_mem.PeerTimeout, match=r"allocate: rank 1 of group '0' waited 0.3 s for"):
            symm_mem.empty(8)
        symm_mem.set_timeout(LONG)
    dist.barrier()
    if rank != 1:
        with pytest.raises(symm_mem.PeerTimeout, match=r"for rank 1: .* and it has given up on rank 0"):
            symm_mem.empty(8)
    symm_mem.reset()
    block = symm_mem.empty(35 << 20, dtype=torch.uint8)
    second = symm_mem.rendezvous(block)
    for peers in (first, second):
        peers.tensors[(rank + 1) % world_size].fill_(rank)
        peers.barrier()
        assert (peers.tensors[rank] == (rank - 1) % world_size).all()
        peers.barrier()
    CALLS["one_shot_all_reduce"]()
    return heap.capacity, heap._number, heap_of(block).offset


def test_after_a_reset_all_ranks_agree_on_what_lies_where() -> None:
    states = run_ranks(resets, 3, fresh=True)
    assert states[0] == states[1] == states[2]
