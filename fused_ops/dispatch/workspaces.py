"""Workspaces of calls: one for each heap, kind and stream, and others for each captured graph.

Calls of one stream follow each other and share; calls that may run at once do not. A workspace grows when a call needs
more: collectively, so all ranks must make their calls in the same order, as with every collective. The memory of a
captured graph's workspaces is used again once that graph is gone on every rank. Calls of compiled graphs that vote
have others than calls that are made directly (``plan.GraphTurn``), and of those that Inductor records ``RecordedTurn``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from ...kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout
from ...symm_mem.backends import cuda_state
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.captured import CapturedGraph
from ...symm_mem.heap.heap import Heap
from ...symm_mem.layout import Layout
from ...symm_mem.workspace import OUTGROWN, Workspace
from .call_check import leave_out
from .plan import GraphTurn, num_sms, this_thread
from .stream_order import order_of, stream_and_graph, stream_key

L = TypeVar("L", Layout, ExchangeLayout)

MATMUL = "matmul"  #: the kind of workspace of kernels that set flags after their data; between CPU ranks of all ops
LL_PROTOCOL = "ll_protocol"  #: of kernels whose data is its own flag; others leave buffers that are not empty
ONE_SHOT = "one_shot"  #: of one-shot exchanges beside matmuls, of both ops
#: Of kernels and products beside copy engines, which write it: at the end of each epoch in it ranks check for abort
#: notices (kernels/device/comm/abort_notice.cuh), which other kernels need not do.
COPIED = "copied"
ALL_REDUCE = "all_reduce"  #: of all-reduces, and of norms after them
GROUP = "process_group"  #: of a process group's own calls, whatever stream or thread they come from
AROUND_MATMULS = (MATMUL, LL_PROTOCOL, ONE_SHOT, COPIED)  #: where calls around matmuls may take the fast path
_GRAIN = 1 << 20  # bytes; sizes that differ by less share a workspace


_RECORDED = " of recorded graphs"


class RecordedTurn(GraphTurn):
    """While it is there, calls of its thread are those of a compiled graph that Inductor records in CUDA graphs.

    Each rank records when it likes: one runs the calls, or records them, while another replays what it has recorded,
    without a word. So they meet in the same workspace, by their layout, and in the same buffer of it; the workspace
    does not grow, and lasts as long as the heap; and no call is compared between ranks.
    """

    __slots__ = ("_left_out",)

    def __init__(self) -> None:
        super().__init__()
        self._left_out = leave_out(True)
        this_thread.workspaces = _RECORDED + _of_stream()

    def __del__(self) -> None:
        super().__del__()
        leave_out(self._left_out)


def _of_stream() -> str:
    """Where SMs are reserved, calls of several streams are in no order, and may not meet."""
    if not torch.cuda.is_initialized():
        return ""
    cuda = cuda_state.state
    device = cuda.current_device()
    return "" if order_of(device).room == 1 else f" on {stream_key(cuda.current_stream(device), device)}"


class _RecordedWorkspace(Workspace[L]):
    """Of a ``RecordedTurn``. Each call begins with the first buffer: who replays a part of a graph counts none."""

    _before: tuple[Any, ...] = ()  # what was made before resets, which captured graphs run

    def next_buffer(self) -> int:
        return self.take_buffer(0)

    def reset_state(self) -> None:
        super().reset_state()
        self._before = (*self._before, {**self.prepared})
        self.prepared.clear()
        self.started = WeakValueDictionary()
        self.meets = False  # a rank that replays makes nothing anew


_CLASSES = Workspace, _RecordedWorkspace  # of a ``RecordedTurn``: the second one


def least_layout(kind: str, wanted: L, device: torch.device) -> L:
    """The layout of a workspace that is made for one kind of call."""
    if isinstance(wanted, ExchangeLayout):
        # For as many blocks as any call may have: it never grows by blocks.
        return replace(wanted, blocks=max(wanted.blocks, min(BLOCKS, num_sms(device))))
    if kind == GROUP:  # it grows by doubling: few calls wait for other ranks
        return replace(wanted, buffer_bytes=max(_GRAIN, 1 << (wanted.buffer_bytes - 1).bit_length()))
    buffer, row = -(-wanted.buffer_bytes // _GRAIN) * _GRAIN, -(-wanted.flags_per_rank // 64) * 64
    return replace(wanted, buffer_bytes=buffer, flags_per_rank=row)


def workspace_of(heap: Heap, kind: str, wanted: L) -> Workspace[L]:
    """The workspace of this stream, or of the process group's calls, for calls of a kind, with room for ``wanted``.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """
    # That of the process group has one order, whoever calls.
    name = kind if kind == GROUP else kind + this_thread.workspaces
    key: tuple[str, int | tuple[int, int], int] = (name, 0, 0)
    recorded = _RECORDED in name
    if heap.device.type == "cuda":
        stream, graph_id = stream_and_graph(heap.device)
        key = (name, 0 if kind == GROUP else stream_key(stream, heap.device.index), graph_id)
    if recorded:
        key = (f"{name} {least_layout(kind, wanted, heap.device)}", 0, 0)
    found = heap.workspaces.get(key)
    if found is not None and found.layout.holds(wanted):
        return found
    with heap.lock:  # of this heap alone: another group's workspace may have to come first on another rank
        found = heap.workspaces.get(key)  # another thread may have made it meanwhile
        if found is not None and found.layout.holds(wanted):
            return found
        refuse_if_broken(heap)  # new memory does not replace a reset
        layout = least_layout(kind, wanted, heap.device)
        if found is not None:
            layout = found.layout.joined(layout)
        graph = CapturedGraph(stream) if key[-1] else None
        if isinstance(key[1], tuple):
            _drop_those_of_gone_streams(heap, *key[1])
        tag = f"{kind + _RECORDED if recorded else name} workspace {layout}"  # without a stream, which is a rank's own
        made = _CLASSES[recorded](heap, layout, tag, graph=graph, replayed=recorded)
        if found is not None and graph is not None:
            made.prepared[OUTGROWN] = found
        heap.workspaces[key] = made
        return made


def workspaces_so_far(heap: Heap, kind: str, stream: int) -> Iterator[Workspace[Any]]:
    """Those in which calls of a kind may have been made that are not captured."""
    name = kind + this_thread.workspaces
    if _RECORDED not in name:
        if (found := heap.workspaces.get((name, stream, 0))) is not None:
            yield found
        return
    for key, found in list(heap.workspaces.items()):
        if key[0].startswith(f"{name} "):
            yield found


def _drop_those_of_gone_streams(heap: Heap, handle: int, stream: int) -> None:
    """Of external streams that had the handle before. The driver gives one away when all work of its stream is done.

    Their memory is used again once every rank has dropped it, whenever that is: heap.py.
    """
    for key, workspace in list(heap.workspaces.items()):
        if isinstance(key[1], tuple) and key[1][0] == handle and key[1][1] != stream and not key[-1]:
            del heap.workspaces[key]
            workspace.release()
