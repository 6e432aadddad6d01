"""After a graph's first run nothing is allocated on the heap or said between ranks through the store any more, and
what its calls use lies where it lay, at one offset on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from test_ranks_that_differ import compiler, gather, results, scatter, world
from torch import Tensor
from weft import symm_mem
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap


def gathered(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return gather(x, world()) @ a @ b


def kept(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Something else reads the gathered rows, too."""
    rows = gather(x, world())
    return (rows @ a @ b).sum() + rows.sin()


def scattered(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(torch.cat([x, x]) @ a @ b, world())


def reduced(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return funcol.all_reduce(x @ a @ b, "sum", world())


def normed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x + funcol.all_reduce(x @ a @ b, "sum", world())
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)


MODELS = gathered, kept, scattered, reduced, normed


def said() -> int:
    return dist.distributed_c10d._get_default_store().num_keys()


def places() -> dict[str, int]:
    """Offsets on the heap, by kind of workspace."""
    heap = get_heap(dist.distributed_c10d._get_default_group(), "cpu")
    assert isinstance(heap, Heap)
    return {key[0]: workspace.block.offset for key, workspace in heap.workspaces.items()}


def runs_again(
    rank: int, size: int, names: list[str], trains: bool, dynamic: bool
) -> list[tuple[str, Any, Any]]:
    from weft.fused_ops.passes import FusionPass

    torch.manual_seed(rank)
    rows = (10, 6, 4) if dynamic else (10, 10, 10)
    found = []
    for name in names:
        fn: Callable[..., Tensor] = globals()[name]
        with compiler():
            fusion = FusionPass(fuse="always", collectives=True)
            mine = torch.compile(fn, options=fusion.options, dynamic=dynamic)
            seen = []
            for n in (*rows, *rows):
                given = [torch.randn(s, requires_grad=trains) for s in ((n, 8), (8, 6), (6, 8))]
                if trains:
                    grad = torch.randn_like(fn(*(t.detach() for t in given)))
                    got, want = results(mine, given, grad), results(fn, given, grad)
                else:
                    got, want = [mine(*given)], [fn(*given)]
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
                if rank == len(seen) % size:  # another one is late each time
                    time.sleep(0.02)
                seen.append(((symm_mem.stats(), places()), said()))
            assert fusion.report().fused, fusion.report()
            found.append((name, seen[0], seen[1:]))
    return found


@pytest.mark.parametrize(("trains", "dynamic"), [(False, False), (True, True)])
def test_the_largest_run_comes_first(trains: bool, dynamic: bool) -> None:
    """Only what stands after a vote is said once for each size."""
    ranks = run_ranks(runs_again, 2, [m.__name__ for m in MODELS], trains, dynamic, fresh=True)
    for found in ranks:
        for (name, (heap, _), later), (_, (of_first, _), _) in zip(found, ranks[0], strict=True):
            stats, where = heap
            assert stats.in_use > 0 and where and heap == of_first, (name, heap, of_first)
            assert all(now == heap for now, _ in later), (name, heap, later)
            words = [count for _, count in later]
            assert len(set(words[len(words) // 2 :])) == 1, (name, words)
