"""Workspaces of captured graphs: their memory is used again once the graph is gone, on every rank."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms import needs_gemm
from ranks import on_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, one_shot_all_reduce
from weft.symm_mem.heap.captured import CapturedGraph
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import OUTGROWN, Workspace


def made(size: int, graph: Any = None) -> Workspace[Layout]:
    return Workspace(get_heap(), Layout(size, 4, 1 << 20), "site", graph=graph)


@on_ranks(3, fresh=True)
def test_the_memory_of_a_graph_that_is_gone_on_all_ranks_is_used_again(rank: int, size: int) -> None:
    where = get_heap()
    where.backend.quiesce = lambda: False  # type: ignore[method-assign]  # as in a capture: another graph's
    gone = [False]
    graph: Any = SimpleNamespace(is_gone=lambda: gone[0])
    smaller, workspace = made(size, graph), made(size, graph)
    workspace.prepared[OUTGROWN] = smaller
    workspace.prepared["launcher"] = workspace  # as launchers do
    places = {smaller.block.offset, workspace.block.offset}
    where.workspaces["kind", 7, 1] = workspace
    del smaller, workspace
    gc.disable()  # nothing of it waits for that
    plain = made(size)
    elsewhere = plain.block.offset
    assert elsewhere not in places
    del plain  # dropped, but kernels may still write to it
    kept = [made(size)]
    gone[0] = rank == 0
    kept.append(made(size))
    assert (("kind", 7, 1) in where.workspaces) is (rank > 0)
    gone[0] = True
    kept.append(made(size))  # here the last rank says so
    kept.append(made(size))
    assert not where.workspaces
    assert {w.block.offset for w in kept[2:]} == places
    assert not {w.block.offset for w in kept[:2]} & {elsewhere, *places}


@on_ranks(3, fresh=True)
def test_a_reset_leaves_a_graph_its_workspaces_where_a_peers_is_gone(rank: int, size: int) -> None:
    where = get_heap()
    graph: Any = SimpleNamespace(is_gone=lambda: rank == 0)
    where.workspaces["kind", 7, 1] = made(size, graph)
    place = where.workspaces["kind", 7, 1].block.offset
    kept = [made(size)]  # rank 0 lets go
    symm_mem.reset()
    assert (("kind", 7, 1) in where.workspaces) is (rank > 0), "those of a graph that is there stay"
    kept.append(made(size))
    assert place not in {w.block.offset for w in kept}
    graph.is_gone = lambda: True
    kept.append(made(size))
    assert kept[-1].block.offset == place


def until(said: Any) -> bool:
    """Whether it is said soon: the driver says it in a thread of its own."""
    end = time.monotonic() + 5
    while not said() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(said())


@pytest.mark.gpu(1)
@on_ranks(1, device="cuda", gpus=1)
def test_a_graph_is_gone_when_its_last_replay_has_ended(rank: int, size: int) -> None:
    x = torch.zeros(1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        followed = CapturedGraph(torch.cuda.current_stream().cuda_stream)
        x.add_(1)
        torch.cuda._sleep(1_000_000_000)
    assert not followed.is_gone()
    graph.replay()
    ended = torch.cuda.Event()
    ended.record()
    assert not followed.is_gone()
    del graph
    gc.collect()
    while not ended.query():
        assert not followed.is_gone() or ended.query(), "what was launched of it still ran"
    assert until(followed.is_gone)
    assert followed.is_gone(), "it stays so"
    with pytest.raises(RuntimeError):
        CapturedGraph(torch.cuda.current_stream().cuda_stream)


@needs_gemm
@pytest.mark.gpu(1)
@on_ranks([2, 3], device="cuda", gpus=1, fresh=True)
def test_a_program_that_captures_again_and_again_does_not_grow(rank: int, size: int) -> None:
    group = dist.group.WORLD
    x, a = torch.ones(4096, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16)
    b = torch.ones(256, 256, dtype=torch.bfloat16)
    where = get_heap(group, "cuda")
    bytes_used, stays = [], None
    for turn in range(12):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = one_shot_all_reduce(x, "sum", group)
            _, (product,) = fused_all_gather_matmul(a, [b], 0, group)
        total.zero_(), product.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (total == size).all() and (product == 256).all()
        if turn == 1:
            stays = graph, total
        else:
            followed = [w.graph for key, w in where.workspaces.items() if key[-1]][-2:]
            del graph, total, product
            gc.collect()
            assert until(lambda followed=followed: all(g.is_gone() for g in followed))
        dist.barrier()  # each rank says so in the next turn
        bytes_used.append(sum(placed.size for placed in where._blocks.values()))
    assert bytes_used[0] < bytes_used[2] and set(bytes_used[2:]) == {bytes_used[2]}, bytes_used
    graph, total = stays
    total.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (total == size).all()
