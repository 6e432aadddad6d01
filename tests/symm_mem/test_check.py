"""What ``check`` raises of several errors, and what a kernel's record says; records are written here by hand."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem
from weft.symm_mem import Layout, Workspace

WAIT_DATA, WAIT_FREE, FAREWELL = 1, 2, 3


def with_record(heap: symm_mem.Heap, tag: str) -> Workspace[Layout]:
    """A workspace as on GPUs, where kernels note what their waits run into."""
    made = Workspace(heap, Layout(heap.world_size, 4, 1024), tag)
    made._record = torch.zeros(8, dtype=torch.int64)
    made.record = made._record.data_ptr()
    made._state = ctypes.c_int64.from_address(made.record)
    return made


def records(rank: int, world_size: int) -> None:
    heap = symm_mem.heap()
    other = dist.new_group([0, 1])
    spaces = [
        with_record(heap, "first"),
        with_record(heap, "second"),
        with_record(symm_mem.heap(other), "third"),
    ]
    for n, space in enumerate(spaces):
        space.raise_if_broken(f"op {n}")
        space.next_half()
    symm_mem.check()
    if rank == 1:
        layout = spaces[0].layout
        written = [
            [1, 1, 0, layout.flags(1) + 2, 1, 0, WAIT_DATA, 3000],
            [1, 1, 0, layout.done(1), 1, 2, FAREWELL, 2000],
            [1, 1, 0, layout.done(1), 0, 5, WAIT_FREE, 1000],
        ]
        for space, record in zip(spaces, written, strict=True):
            space._record.copy_(torch.tensor(record))
        with pytest.raises(
            symm_mem.PeerTimeout, match=r"^op 2: rank 1 .* for rank 0: 'done' of rank 0 \(half 1\)"
        ):
            symm_mem.check()
        words = (
            rf"^op 1: rank 1 of group '0' waited 0 s for rank 0: 'gave up' of rank 0 is 2, expected 0, "
            rf"and it has given up on rank 1 \(called at {__file__}"
        )
        for group in (dist.group.WORLD, "0"):
            with pytest.raises(symm_mem.PeerTimeout, match=words) as error:
                symm_mem.check(group)
            assert error.value.culprit == 1 and not error.value.ended
        with pytest.raises(symm_mem.PeerTimeout, match=r"^op 2: "):
            symm_mem.check(other)
    symm_mem.reset(other)
    symm_mem.check(other)
    symm_mem.reset()
    symm_mem.check()


def test_the_first_error_is_raised_and_a_group_can_be_asked_alone() -> None:
    run_ranks(records, 2, fresh=True)
