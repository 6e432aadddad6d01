"""How ranks come to a heap, or learn at once that they have none."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem


def tries_again(rank: int, world_size: int) -> None:
    """Rank 0 has asked for a heap twice before rank 1 comes."""
    symm_mem.set_timeout(0.2)
    for _ in range(2 * (rank == 0)):
        with pytest.raises(
            symm_mem.PeerTimeout, match=r"make a heap: rank 0 of group '0' waited 0\.2 s for rank 1"
        ):
            symm_mem.heap()
    dist.barrier()
    symm_mem.set_timeout(20)
    symm_mem.rendezvous(symm_mem.empty(10)).barrier()


def test_ranks_that_have_tried_another_number_of_times_meet() -> None:
    run_ranks(tries_again, 2, fresh=True, timeout=30)


def cannot_be_seen(rank: int, world_size: int) -> str:
    from weft.symm_mem import processes

    def hidden() -> str:
        raise FileNotFoundError(2, "No such file or directory", "boot_id")

    if rank == 1:
        processes._namespace = hidden
    begin = time.monotonic()
    with pytest.raises(symm_mem.HeapUnavailable) as error:
        symm_mem.empty(4)
    assert time.monotonic() - begin < 5
    return str(error.value)


def test_a_rank_whose_process_cannot_be_seen_is_named_on_every_rank() -> None:
    texts = run_ranks(cannot_be_seen, 2, fresh=True)
    assert texts[0] == texts[1]
    assert "no heap for group '0': rank 1: FileNotFoundError: [Errno 2] No such file" in texts[0]


def fails_in_between(rank: int, world_size: int) -> None:
    """What rank 1 runs into is no answer: the others are told, and may come again."""
    from weft.symm_mem.backends.host import HostBackend

    def out_of_memory(*_: object) -> str | None:
        raise MemoryError

    refuse = HostBackend.refuse
    if rank == 1:
        HostBackend.refuse = out_of_memory  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(MemoryError if rank == 1 else symm_mem.PeerTimeout, match=r"and it has given up|^$"):
        symm_mem.heap()
    assert time.monotonic() - begin < 5
    HostBackend.refuse = refuse  # type: ignore[method-assign]
    symm_mem.rendezvous(symm_mem.empty(4)).barrier()


def test_a_rank_that_fails_while_a_heap_is_made_tells_the_others() -> None:
    run_ranks(fails_in_between, 2, fresh=True, timeout=30)
