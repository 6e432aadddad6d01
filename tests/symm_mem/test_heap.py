"""The heap on real CPU processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import DEVICES
from ranks import on_ranks, run_ranks
from threads import staying_threads
from weft import symm_mem
from weft.symm_mem import timeouts
from weft.symm_mem.bootstrap import handshake
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.heap.heap import heap_of
from weft.symm_mem.heap.placement import Placement, first_gap
from weft.symm_mem.heap.registry import get_heap


@on_ranks([1, 2, 3, 4, 8], device=DEVICES)
def test_empty_and_rendezvous(rank: int, world_size: int) -> None:
    for shape, dtype in [((5, 3), torch.float32), ((1,), torch.bfloat16), ((7, 1, 33), torch.int64)]:
        x = symm_mem.empty(*shape, dtype=dtype)
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
        peers = symm_mem.rendezvous(x)
        assert (peers.rank, peers.world_size) == (rank, world_size)
        assert peers.tensors[rank] is x and peers.pointers[rank] == x.data_ptr()
        assert peers.table.tolist() == peers.pointers
        x.fill_(rank + 1)
        peers.barrier()
        for peer, tensor in enumerate(peers.tensors):
            assert tensor.shape == shape and (tensor == peer + 1).all()
        peers.barrier()
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        peers.tensors[right].view(-1)[0] += left + 10
        peers.barrier()
        assert x.view(-1)[0] == rank + 1 + (left - 1) % world_size + 10
        peers.barrier()


@on_ranks(2, device=DEVICES)
def test_views_have_peers(rank: int, world_size: int) -> None:
    x = symm_mem.empty(6, 8)
    x.copy_(torch.arange(48.0).view(6, 8) + 100 * rank)
    part = x[2:5, 1:7:2].t()
    peers = symm_mem.rendezvous(part)
    peers.barrier()
    for peer, tensor in enumerate(peers.tensors):
        torch.testing.assert_close(tensor, (torch.arange(48.0).view(6, 8) + 100 * peer)[2:5, 1:7:2].t())
    for shape in [(0, 4), (3, 0), (0,)]:  # without elements they have peers, too, and signals
        nothing = symm_mem.empty(shape)
        assert nothing.shape == shape and nothing.stride() == torch.empty(shape).stride()
        symm_mem.rendezvous(nothing).barrier()
    assert symm_mem.rendezvous(x[2:, 3:3]).pointers == symm_mem.rendezvous(x[2:, 3:]).pointers
    with pytest.raises(ValueError, match="tensor: does not lie on a heap"):
        symm_mem.rendezvous(torch.empty(3))
    peers.barrier()


@on_ranks(3, device=DEVICES)
def test_growth_moves_nothing(rank: int, world_size: int) -> None:
    first = symm_mem.empty(1000)
    first.fill_(rank)
    address, heap = first.data_ptr(), get_heap()
    before = heap.capacity
    more = [symm_mem.empty(20 << 20, dtype=torch.uint8).fill_(i) for i in range(6)]
    assert heap.capacity >= before + (80 << 20)
    assert first.data_ptr() == address and (first == rank).all()
    peers = [symm_mem.rendezvous(t) for t in more]
    peers[0].barrier()
    for i, p in enumerate(peers):
        assert all((t == i).all() for t in p.tensors)
    peers[0].barrier()


def frees_when_all_have_freed(rank: int, world_size: int) -> list[int]:
    heap = get_heap()
    big = symm_mem.empty(6 << 20, dtype=torch.uint8)
    offset = heap_of(big).offset
    kept = big[5:9] if rank == 1 else None  # a view keeps the memory on this rank alone
    del big
    gc.collect()
    second = symm_mem.empty(6 << 20, dtype=torch.uint8)
    assert heap_of(second).offset != offset, "used again while rank 1 still holds it"
    del kept
    gc.collect()
    third = symm_mem.empty(6 << 20, dtype=torch.uint8)
    assert heap_of(third).offset == offset, "dropped by all and not used again"
    capacity = heap.capacity
    for _ in range(20):
        del third
        third = symm_mem.empty(6 << 20, dtype=torch.uint8)
        symm_mem.rendezvous(third).barrier()  # peers and signals of a tensor go with it
    assert heap.capacity == capacity
    return [heap_of(second).offset, heap_of(third).offset]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_used_again_once_every_rank_has_dropped_it(device: str) -> None:
    offsets = run_ranks(frees_when_all_have_freed, 3, device=device, fresh=True)
    assert offsets[0] == offsets[1] == offsets[2]


def disagree(rank: int, world_size: int) -> tuple[str, float]:
    symm_mem.empty(4)
    start = time.monotonic()
    with pytest.raises(symm_mem.RankMismatch) as error:
        symm_mem.empty(10 + (rank == 1))
    took = time.monotonic() - start
    peers = symm_mem.rendezvous(symm_mem.empty(10))  # the heap goes on working
    peers.barrier()
    assert error.value.rank == 1
    return str(error.value), took


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_differ_are_named_with_both_values(device: str) -> None:
    for text, took in run_ranks(disagree, 3, device=device, fresh=True):
        assert (
            "rank 1 asked for" in text
            and "empty(11,)" in text
            and "rank 0 for" in text
            and "empty(10,)" in text
        )
        assert took < 30  # a tenth of the deadline


def one_is_missing(rank: int, world_size: int) -> str | None:
    symm_mem.set_timeout(1.0)
    symm_mem.empty(4)
    if rank == 2:
        time.sleep(4)
        return None
    with pytest.raises(symm_mem.PeerTimeout) as error:
        symm_mem.empty(4)
    assert error.value.peer == 2 and error.value.rank == rank
    return str(error.value)


def test_a_missing_rank_is_named() -> None:
    texts = run_ranks(one_is_missing, 3, fresh=True)
    assert texts[2] is None
    assert all("allocate" in t and "waited 1 s for rank 2" in t for t in texts[:2])


@on_ranks(3, device=DEVICES)
def test_overlapping_groups_have_their_own_heaps(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
    mine = [g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]
    tensors = [symm_mem.empty(100, group=g) for g in mine]
    peers = [symm_mem.rendezvous(t, g) for t, g in zip(tensors, mine, strict=True)]
    for turn in range(30):
        for t, p in zip(tensors, peers, strict=True):
            t.fill_(1000 * turn + p.rank)
            p.barrier(turn % 3)
            assert [x[99].item() for x in p.tensors] == [1000 * turn + r for r in range(p.world_size)]
            p.barrier(turn % 3)
    assert len({get_heap(g).address(0) for g in mine}) == len(mine)
    with pytest.raises(ValueError, match="group: the tensor lies on the heap of group"):
        symm_mem.rendezvous(tensors[0], mine[1])


def one_cannot_grow(rank: int, world_size: int) -> str:
    x = symm_mem.empty(100)
    heap = get_heap()
    capacity, create = heap.capacity, heap.backend.create
    fds = len(os.listdir("/proc/self/fd"))

    def full(size: int) -> Any:
        raise OSError(28, "no shared memory left")

    if rank == 1:
        heap.backend.create = full
    with pytest.raises(symm_mem.WeftError) as error:
        symm_mem.empty(50 << 20, dtype=torch.uint8)
    heap.backend.create = create
    assert heap.capacity == capacity
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
    symm_mem.rendezvous(x).barrier()
    y = symm_mem.rendezvous(symm_mem.empty(50 << 20, dtype=torch.uint8))
    y.barrier()
    return str(error.value)


def test_a_rank_without_memory_fails_all_and_leaves_the_heap_as_it_was() -> None:
    assert all(
        "rank 1: OSError" in text and "no shared memory left" in text
        for text in run_ranks(one_cannot_grow, 2, fresh=True)
    )


def other_host(rank: int, world_size: int, key: str) -> str:
    from weft.symm_mem.backends import host

    real = host.host_identity
    host.host_identity = lambda: {**real(), **({key: "elsewhere", "host": "other"} if rank == 1 else {})}
    with pytest.raises(symm_mem.HeapUnavailable) as error:
        symm_mem.empty(4)
    assert symm_mem.unavailable() == str(error.value)
    from weft.fused_ops import last_plan, one_shot_all_reduce

    x = one_shot_all_reduce(torch.full((3,), rank + 1.0), "sum", None)
    assert x.tolist() == [3.0, 3.0, 3.0] and last_plan().algorithm == "unfused"
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "words"), [("boot", "spans hosts"), ("net", "network namespace"), ("user", "as user elsewhere")]
)
def test_groups_that_cannot_share_memory_are_refused_and_run_unfused(key: str, words: str) -> None:
    texts = run_ranks(other_host, 2, key, fresh=True)
    assert words in texts[0] and texts[0] == texts[1]


@on_ranks(2, fresh=True)
def test_strangers_get_no_memory(rank: int, world_size: int) -> None:
    """A process without the secret gets no descriptor, and the ranks do not notice."""
    get_heap()
    answers: list[bytes] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            with open("/proc/net/unix") as f:
                names = [line.split()[-1] for line in f if "@weft-" in line]
            for name in names:
                with socket.socket(socket.AF_UNIX) as s:
                    try:
                        s.settimeout(2)
                        s.connect("\0" + name[1:])
                        s.sendall(b"x" * 64)
                        answers.append(s.recv(1))
                    except OSError:
                        continue

    if rank == 0:
        thread = threading.Thread(target=probe)
        thread.start()
    kept = []  # so that each turn grows the heap
    for _ in range(10):
        kept.append(symm_mem.empty(9 << 20, dtype=torch.uint8))
        symm_mem.rendezvous(kept[-1]).barrier()
    if rank == 0:
        stop.set()
        thread.join()
        assert all(a == b"" for a in answers)


def killed(rank: int, world_size: int) -> str | None:
    symm_mem.set_timeout(1.0)
    peers = symm_mem.rendezvous(symm_mem.empty(20 << 20, dtype=torch.uint8))
    peers.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(symm_mem.PeerTimeout) as error:
        peers.barrier()
    return str(error.value)


@pytest.mark.alone
def test_a_killed_rank_is_named_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other tests may run beside this one

    def litter() -> list[Path]:
        return [*tmp_path.iterdir(), *Path("/dev/shm").glob("*weft*")]

    before = litter()
    texts = run_ranks(killed, 2, expect_dead=(1,), fresh=True)
    assert (
        "barrier: rank 0" in texts[0]
        and "for rank 1" in texts[0]
        and "channel 0 is 1, expected 2" in texts[0]
    )
    assert litter() == before


@on_ranks(1, device=DEVICES)
def test_bad_arguments_are_named(rank: int, world_size: int) -> None:
    for call, kind, words in [
        (lambda: symm_mem.empty(-1), ValueError, "shape: .* negative"),
        (lambda: symm_mem.empty(2.5), TypeError, "shape: .* float"),
        (lambda: symm_mem.empty(2, group="nobody"), ValueError, "group: no process group is named 'nobody'"),
        (lambda: symm_mem.empty(2, group=7), TypeError, "group: must be a name"),
        (lambda: symm_mem.empty(2, device="meta"), ValueError, "device: is 'meta'"),
        (lambda: symm_mem.empty(2, device="bogus"), ValueError, "device: torch knows none"),
        (lambda: symm_mem.empty(2, dtype="float32"), TypeError, "dtype: is 'float32'"),
        (lambda: symm_mem.rendezvous(7), TypeError, "tensor: is of type int"),
        (lambda: symm_mem.set_timeout("5"), TypeError, "seconds: is '5'"),
        (lambda: symm_mem.set_timeout(float("nan")), ValueError, "seconds: is nan"),
        (lambda: symm_mem.set_timeout(0), ValueError, "seconds: is 0"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    peers = symm_mem.rendezvous(symm_mem.empty(2))
    for call, words in [
        (lambda: peers.put(1), "peer: is 1"),
        (lambda: peers.wait(-1), "peer: is -1"),
        (lambda: peers.put(0, 16), "channel: is 16"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_the_environment_sets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "2.5")
    assert symm_mem.get_timeout("any") == 2.5
    monkeypatch.setenv("WEFT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="WEFT_TIMEOUT: is 'soon'"):
        symm_mem.get_timeout("any")


def test_compiling_has_half_an_hour_or_the_deadline_if_that_is_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "_per_group", CachedDict())
    for seconds in (1, 5000):
        symm_mem.set_timeout(seconds, "any")
        assert timeouts.preparing_timeout("any") == max(seconds, 1800)


def test_ranks_may_have_deadlines_and_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_TIMEOUT", "WEFT_CACHE_DIR", "WEFT_PDL"):
        monkeypatch.setenv(name, "1")
    assert handshake._settings().keys() & {"WEFT_TIMEOUT", "WEFT_CACHE_DIR", "WEFT_PDL"} == {"WEFT_PDL"}


def test_the_first_gap_that_has_room() -> None:
    assert first_gap([], 50) == 0
    blocks = [Placement(offset, size, 0, "") for offset, size in ((60, 30), (0, 30), (100, 10))]
    assert [first_gap(blocks, size) for size in (10, 30, 31)] == [30, 30, 110]
    assert [first_gap(blocks[::2], size) for size in (60, 61)] == [0, 110]


@on_ranks(2, fresh=True)
def test_groups_that_are_destroyed_leave_nothing_behind(rank: int, world_size: int) -> None:
    """Groups that come and go leave no memory, addresses, descriptors, threads or locks."""
    from weft.fused_ops import one_shot_all_reduce
    from weft.symm_mem.heap.registry import _making

    def held() -> tuple[int, ...]:
        gc.collect()
        threads = staying_threads()  # first: what leaves has descriptors, too
        mapped = Path("/proc/self/maps").read_text().count("memfd:weft")
        locks = sum(name != "0" for name, *_ in _making)  # "0" is there all the time
        return mapped, len(os.listdir("/proc/self/fd")), threads, locks

    counts = []
    for turn, lets_go in enumerate([symm_mem.unavailable, symm_mem.check, symm_mem.reset] * 2):
        group = dist.new_group([0, 1])
        assert (one_shot_all_reduce(torch.ones(1000) * (rank + turn), "sum", group) == 1 + 2 * turn).all()
        symm_mem.reset(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        lets_go()
        counts.append(held())
    assert all(a <= b for now in counts[2:] for a, b in zip(now, counts[1], strict=True)), counts
