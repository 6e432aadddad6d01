"""How ranks come to a heap, or learn at once that they have none."""

from __future__ import annotations

import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_reduce
from weft.symm_mem.heap.registry import get_heap


@on_ranks(2, fresh=True, timeout=30)
def test_ranks_that_have_tried_another_number_of_times_meet(rank: int, world_size: int) -> None:
    """Rank 0 has asked for a heap twice before rank 1 comes."""
    symm_mem.set_timeout(0.2)
    for _ in range(2 * (rank == 0)):
        with pytest.raises(symm_mem.PeerTimeout, match=r"make a heap: rank 0 of group '0' waited 0\.2 s for"):
            get_heap()
    dist.barrier()
    symm_mem.set_timeout(20)
    symm_mem.rendezvous(symm_mem.empty(10)).barrier()


def cannot_be_seen(rank: int, world_size: int) -> str:
    from weft.symm_mem.bootstrap import processes

    def hidden() -> str:
        raise FileNotFoundError(2, "No such file or directory", "boot_id")

    if rank == 1:
        processes._namespace = hidden
    begin = time.monotonic()
    with pytest.raises(symm_mem.HeapUnavailable) as error:
        symm_mem.empty(4)
    assert time.monotonic() - begin < 30
    return str(error.value)


def test_a_rank_whose_process_cannot_be_seen_is_named_on_every_rank() -> None:
    texts = run_ranks(cannot_be_seen, 2, fresh=True)
    assert texts[0] == texts[1]
    assert "no heap for group '0': rank 1: FileNotFoundError: [Errno 2] No such file" in texts[0]


@on_ranks(2, fresh=True, timeout=30)
def test_a_rank_that_fails_while_a_heap_is_made_tells_the_others(rank: int, world_size: int) -> None:
    """What rank 1 runs into is no answer: the others are told, and may come again."""
    from weft.symm_mem.backends.host import HostBackend

    def out_of_memory(*_: object) -> str | None:
        raise MemoryError

    refuse = HostBackend.refuse
    if rank == 1:
        HostBackend.refuse = out_of_memory  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(MemoryError if rank == 1 else symm_mem.PeerTimeout, match=r"and it has given up|^$"):
        get_heap()
    assert time.monotonic() - begin < 20
    HostBackend.refuse = refuse  # type: ignore[method-assign]
    symm_mem.rendezvous(symm_mem.empty(4)).barrier()


def hidden_gpus(rank: int, world_size: int, fails: bool) -> tuple[str | None, str | None]:
    """Rank 2 cannot be sure that it can map the others' memory, and rank 1 cannot map it."""
    from weft.symm_mem.backends.host import HostBackend

    refuse, adopt = HostBackend.refuse, HostBackend.adopt

    def unsure(self: HostBackend, *args: Any) -> str | None:
        self.to_be_tried = rank == 2
        return refuse(self, *args)

    def fail(*_: object) -> int:
        raise RuntimeError("CUDA_ERROR_INVALID_DEVICE: invalid device ordinal")

    HostBackend.refuse = unsure  # type: ignore[method-assign]
    if fails and rank == 1:
        HostBackend.adopt = fail  # type: ignore[method-assign]
    try:
        said = symm_mem.unavailable()
        x = torch.full((10,), float(rank))
        assert (one_shot_all_reduce(x, "sum", None) == 3).all()
        return said, last_plan().reason
    finally:
        HostBackend.refuse, HostBackend.adopt = refuse, adopt  # type: ignore[method-assign]


@on_ranks(3, fresh=True)
def test_what_one_rank_reaches_over_pcie_all_do(rank: int, world_size: int) -> None:
    from weft.symm_mem.backends.host import HostBackend

    refuse = HostBackend.refuse

    def reached(self: HostBackend, *args: Any) -> str | None:
        self.over_pcie = rank == 1
        return refuse(self, *args)

    with mock.patch.object(HostBackend, "refuse", reached):
        assert get_heap().backend.over_pcie


@pytest.mark.parametrize("fails", [False, True])
def test_calls_run_unfused_where_memory_turns_out_not_to_be_mapped(fails: bool) -> None:
    texts = run_ranks(hidden_gpus, 3, fails, fresh=True)
    assert texts[0] == texts[1] == texts[2]
    if not fails:
        assert texts[0][0] is None
    else:
        words = (
            "no heap for group '0': map memory in group '0': rank 1: RuntimeError: CUDA_ERROR_INVALID_DEVICE"
        )
        assert texts[0][0].startswith(words) and texts[0][1].startswith(words), texts[0]


@on_ranks(2, fresh=True)
def test_who_waits_alone_says_for_which_op(rank: int, world_size: int) -> None:
    """A rank makes the first call of a group, another one none: the error names the op, and before it a line in the
    log does."""
    from weft.symm_mem import errors

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft.symm_mem").addHandler(handler)
    symm_mem.set_timeout(0.6)
    if rank == 0:
        whose = "make a heap for one_shot_all_reduce, which every rank of the group must call"
        with (
            mock.patch.object(errors, "SILENT", 0.2),
            pytest.raises(
                symm_mem.PeerTimeout, match=rf"^{whose}: rank 0 .* for rank 1: its call is not made"
            ),
        ):
            one_shot_all_reduce(torch.ones(3), "sum", None)
        assert len(lines) == 1 and lines[0].startswith(
            f"{whose}: rank 0 of group '0' has waited 0 s for rank 1, since "
        )
        # What is no call of an op is not named after the last one.
        with pytest.raises(symm_mem.PeerTimeout, match=r"^make a heap: rank 0"):
            get_heap()
    dist.barrier()
    symm_mem.set_timeout(20)
    assert one_shot_all_reduce(torch.ones(3), "sum", None).eq(world_size).all()
