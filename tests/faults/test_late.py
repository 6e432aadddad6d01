"""A rank that is late between CPU ranks: the log names it before the deadline, and the error what it may come from."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import fused_matmul_all_reduce, fused_matmul_reduce_scatter, one_shot_all_reduce
from weft.symm_mem import errors

CAUSES = (
    "it is late, or has made other calls, or in another order: WEFT_CHECK=1 names the first one that differs"
)


def named(lines: list[str], op: str, rank: int) -> None:
    (line,) = lines
    said = rf"{op}: rank {rank} of group '0' has waited 0 s for rank {1 - rank}, since \d\d:\d\d:\d\d"
    assert re.fullmatch(said + r" \(called at .*test_late\.py:\d+\)", line), line
    lines.clear()
    errors._warned.clear()


@on_ranks(2, fresh=True)
def test_a_late_rank_is_named_before_the_deadline(rank: int, world_size: int) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft.symm_mem").addHandler(handler)
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    calls = (
        lambda: one_shot_all_reduce(torch.ones(3), "sum", None),
        lambda: fused_matmul_reduce_scatter(a, b, "sum", 0, None),  # two threads of a rank wait
    )
    for call in calls:
        call()
    peers = symm_mem.rendezvous(symm_mem.empty(4))
    x = symm_mem.register([torch.zeros(4)])[0]
    symm_mem.set_timeout(0.6)
    waits = (
        ("one_shot_all_reduce", calls[0], CAUSES),
        ("fused_matmul_reduce_scatter", calls[1], CAUSES),
        ("wait", lambda: peers.wait(1), ""),
        ("wait", lambda: x.wait(1), ""),
        # The first call of its op, which ranks compare.
        ("fused_matmul_all_reduce", lambda: fused_matmul_all_reduce(a, b, "sum", None), CAUSES),
        ("allocate", lambda: symm_mem.empty(4), ""),
    )
    for op, call, causes in waits:
        if rank == 0:
            with mock.patch.object(errors, "SILENT", 0.2), pytest.raises(symm_mem.PeerTimeout) as caught:
                call()
            assert str(caught.value).endswith(f"; {causes}" if causes else ")"), caught.value
            named(lines, op, rank)
        dist.barrier()
        symm_mem.set_timeout(20)
        symm_mem.reset()
        symm_mem.set_timeout(0.6)
    assert not lines, "who is in time is not named"


@on_ranks(2, fresh=True)
def test_threads_of_a_rank_are_named_with_a_timeout(rank: int, world_size: int) -> None:
    """Threads of rank 0 make the calls that one thread of rank 1 makes, and one more. Nothing keeps those that ended;
    one that has the ident of another takes its place."""
    x = torch.ones(3)
    names: dict[int, str] = {}

    def call() -> Tensor:
        names[threading.get_ident()] = threading.current_thread().name
        return one_shot_all_reduce(x, "sum", None)

    call()
    symm_mem.set_timeout(0.6)
    if rank == 0:
        for name in ("first", "other"):
            thread = threading.Thread(target=call, name=name)
            thread.start()
            thread.join()
            ended = weakref.ref(thread)
            del thread
            assert ended() is None
        with pytest.raises(symm_mem.PeerTimeout) as caught:
            call()
        threads = ", ".join(sorted(map(repr, names.values())))
        assert "'MainThread'" in threads and "'other'" in threads
        assert str(caught.value).endswith(
            f"; {CAUSES}; threads {threads} of this rank call in the group: all ranks need one order of "
            "the calls of all threads"
        ), caught.value
    else:
        for _ in range(2):
            call()
    dist.barrier()
