"""Workspaces of calls: one for each heap, kind and stream, and others for each captured graph.

Calls of one stream follow each other and share; calls that may run at once do not. A workspace grows when a call needs
more: collectively, so all ranks must make their calls in the same order, as with every collective. The memory of a
captured graph's workspaces is used again once that graph is gone on every rank. Calls of compiled graphs that vote
have others than calls that are made directly (``plan.GraphTurn``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...kernels.all_reduce.configs import AllReduceConfig, all_reduce_layout
from ...kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout
from ...kernels.device.gemm.one_shot import OneShotConfig
from ...kernels.device.tuning.choice import KernelChoice
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.captured import CapturedGraph
from ...symm_mem.heap.heap import Heap
from ...symm_mem.layout import Layout
from ...symm_mem.workspace import OUTGROWN, Workspace
from .plan import num_sms, this_thread
from .planning import PlannedHeap, PlannedWorkspace
from .stream_order import stream_and_graph, stream_key

MATMUL = "matmul"  #: the kind of workspace of kernels that set flags behind their data
LL_PROTOCOL = "ll_protocol"  #: of kernels whose data is its own flag
ONE_SHOT = "one_shot"  #: of one-shot exchanges beside matmuls, of both ops
COPIED = "copied"  #: of kernels and products beside copy engines, which write it
ALL_REDUCE = "all_reduce"  #: of all-reduces, and of norms behind them
GROUP = "process_group"  #: of a process group's own calls, whatever stream or thread they come from
AROUND_MATMULS = (MATMUL, LL_PROTOCOL, ONE_SHOT, COPIED)  #: where calls around matmuls may take the fast path
_GRAIN = 1 << 20  # bytes; sizes that differ by less share a workspace


def _fetch(heap: Heap, kind: str, fits: Callable[[Any], bool], grown: Callable[[Any], Any]) -> Workspace[Any]:
    if isinstance(heap, PlannedHeap):
        return PlannedWorkspace(heap, grown(None), kind)  # type: ignore[return-value]
    if kind != GROUP:  # which has one order, whoever calls
        kind += this_thread.workspaces
    key: tuple[str, int | tuple[int, int], int] = (kind, 0, 0)
    if heap.device.type == "cuda":
        stream, graph_id = stream_and_graph(heap.device)
        key = (kind, 0 if kind == GROUP else stream_key(stream, heap.device.index), graph_id)
    found = heap.workspaces.get(key)
    if found is not None and fits(found.layout):
        return found
    with heap.lock:  # of this heap alone: another group's workspace may have to come first on another rank
        found = heap.workspaces.get(key)  # another thread may have made it meanwhile
        if found is not None and fits(found.layout):
            return found
        refuse_if_broken(heap)  # new memory does not replace a reset
        layout = grown(found.layout if found is not None else None)
        graph = CapturedGraph(stream) if key[-1] else None
        if isinstance(key[1], tuple):
            _drop_those_of_gone_streams(heap, *key[1])
        made = Workspace(heap, layout, f"{kind} workspace {layout}", graph=graph)
        if found is not None and graph is not None:
            made.prepared[OUTGROWN] = found
        heap.workspaces[key] = made
        return made


def _drop_those_of_gone_streams(heap: Heap, handle: int, stream: int) -> None:
    """Of external streams that had the handle before. The driver gives one away when all work of its stream is done.

    Their memory is used again once every rank has dropped it, whenever that is: heap.py.
    """
    for key, workspace in list(heap.workspaces.items()):
        if isinstance(key[1], tuple) and key[1][0] == handle and key[1][1] != stream and not key[-1]:
            del heap.workspaces[key]
            workspace.release()


def matmul_workspace(heap: Heap, wanted: Layout, *, copied: bool = False) -> Workspace[Layout]:
    """The workspace of this stream for the ops around a matmul, with room for one call.

    Between CPU ranks it is that of all ops. The LL protocol has one of its own: other kernels leave buffers that are
    not empty.

    Args:
        wanted: what the call needs.
        copied: copy engines write it. They have one of their own: at the end of each epoch in it ranks check for abort
            notices (kernels/device/comm/abort_notice.cuh), which other kernels need not do.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """

    def grown(old: Layout | None) -> Layout:
        buffer, row = -(-wanted.buffer_bytes // _GRAIN) * _GRAIN, -(-wanted.flags_per_rank // 64) * 64
        layout = replace(wanted, buffer_bytes=buffer, flags_per_rank=row)
        return layout if old is None else old.joined(layout)

    kind = COPIED if copied else LL_PROTOCOL if wanted.ll_protocol else MATMUL
    return _fetch(heap, kind, lambda layout: layout.holds(wanted), grown)


def async_workspace(heap: Heap, wanted: Layout, kind: str) -> Workspace[Layout]:
    """The workspace of this stream for what copy engines send beside what follows it.

    Args:
        kind: each has one of its own, as buffers are in use when other calls begin.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """

    def grown(old: Layout | None) -> Layout:
        layout = replace(wanted, buffer_bytes=-(-wanted.buffer_bytes // _GRAIN) * _GRAIN)
        return layout if old is None else old.joined(layout)

    return _fetch(heap, kind, lambda layout: layout.holds(wanted), grown)


def group_workspace(heap: Heap, wanted: Layout) -> Workspace[Layout]:
    """The workspace of a process group's calls between CPU ranks. It grows by doubling: few calls wait for other ranks.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """

    def grown(old: Layout | None) -> Layout:
        layout = replace(wanted, buffer_bytes=max(_GRAIN, 1 << (wanted.buffer_bytes - 1).bit_length()))
        return layout if old is None else old.joined(layout)

    return _fetch(heap, GROUP, lambda layout: layout.holds(wanted), grown)


def push_workspace(heap: Heap, kind: str, wanted: ExchangeLayout) -> Workspace[ExchangeLayout]:
    """The workspace of this stream, or of the process group's calls, for LL exchanges with room for ``wanted``.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """

    def grown(old: ExchangeLayout | None) -> ExchangeLayout:
        # For as many blocks as any call may have: it never grows by blocks.
        most = max(wanted.blocks, min(BLOCKS, num_sms(heap.device)))
        layout = replace(wanted, blocks=most)
        return layout if old is None else old.joined(layout)

    return _fetch(heap, kind, lambda layout: layout.holds(wanted), grown)


def workspace_of_choice(heap: Heap, choice: KernelChoice[Any]) -> Workspace[Any]:
    """The workspace of one of the ops around a matmul for calls of a choice.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """
    if isinstance(choice.config, OneShotConfig):
        return push_workspace(heap, ONE_SHOT, choice.config.layout(heap.world_size))
    assert choice.layout is not None
    return matmul_workspace(heap, choice.layout, copied=choice.algorithm == "copy_engine")


def all_reduce_workspace(
    heap: Heap, nbytes: int, config: AllReduceConfig, kind: str = ALL_REDUCE
) -> Workspace[ExchangeLayout]:
    """That of all-reduce kernels on CUDA, for inputs of ``nbytes``.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """
    return push_workspace(heap, kind, all_reduce_layout(nbytes, heap.world_size, config))
