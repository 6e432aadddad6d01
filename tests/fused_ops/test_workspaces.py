"""Which workspace a call gets, without ranks: when one is made, and what becomes of the one before it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.fused_ops.dispatch import workspaces
from weft.kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout
from weft.symm_mem.layout import Layout

SMALL, MANY, BOTH = Layout(2, 64, 2 << 20), Layout(2, 128, 1 << 20), Layout(2, 128, 2 << 20)


class Made:
    def __init__(self, heap: Any, layout: Layout, tag: str, *, graph: Any = None) -> None:
        self.layout, self.graph = layout, graph
        self.prepared: dict[str, Any] = {}
        self.released = False

    def release(self) -> None:
        self.released = True


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """On a GPU that is none; ``graph`` is what its stream is captured into."""
    heap = SimpleNamespace(
        device=torch.device("cuda", 0), workspaces={}, lock=threading.RLock(), graph=0, key=7
    )
    monkeypatch.setattr(workspaces, "stream_and_graph", lambda device: (7, heap.graph))
    monkeypatch.setattr(workspaces, "stream_key", lambda stream, device: heap.key)
    monkeypatch.setattr(workspaces, "refuse_if_broken", lambda heap: None)
    monkeypatch.setattr(workspaces, "Workspace", Made)
    monkeypatch.setattr(workspaces, "CapturedGraph", lambda stream: f"of stream {stream}")
    return heap


def test_it_grows_and_never_shrinks(heap: SimpleNamespace) -> None:
    first = workspaces.matmul_workspace(heap, SMALL)
    assert workspaces.matmul_workspace(heap, SMALL) is first
    second = workspaces.matmul_workspace(heap, MANY)
    assert second is not first and second.layout == BOTH
    for wanted in (SMALL, MANY, BOTH):
        assert workspaces.matmul_workspace(heap, wanted) is second


@pytest.mark.parametrize("graph", [0, 5])
def test_a_captured_graph_keeps_what_it_has_outgrown(heap: SimpleNamespace, graph: int) -> None:
    """Its earlier nodes write to it whenever it is replayed."""
    heap.graph = graph
    first: Any = workspaces.matmul_workspace(heap, SMALL)
    second: Any = workspaces.matmul_workspace(heap, MANY)
    assert (first.graph is not None) is (second.graph is not None) is bool(graph)
    assert (first in second.prepared.values()) is bool(graph)


def test_streams_and_graphs_and_kinds_have_their_own(heap: SimpleNamespace) -> None:
    found = [workspaces.matmul_workspace(heap, SMALL, copied=copied) for copied in (False, True)]
    heap.graph = 5
    found.append(workspaces.matmul_workspace(heap, SMALL))
    heap.graph = 0
    found.append(workspaces.matmul_workspace(heap, Layout(2, 0, 1 << 20, ll_protocol=True)))
    assert len(set(map(id, found))) == 4
    assert workspaces.matmul_workspace(heap, SMALL) is found[0]


def test_an_external_stream_never_has_that_of_another_one_with_its_handle(heap: SimpleNamespace) -> None:
    """On another rank the new stream has another handle, and makes a workspace."""
    heap.key = 7, 100
    first: Any = workspaces.matmul_workspace(heap, SMALL)
    assert workspaces.matmul_workspace(heap, SMALL) is first
    heap.graph = 5
    captured: Any = workspaces.matmul_workspace(heap, SMALL)
    heap.graph, heap.key = 0, (8, 101)
    other: Any = workspaces.matmul_workspace(heap, SMALL)
    heap.key = 7, 102
    second: Any = workspaces.matmul_workspace(heap, SMALL)
    assert len({id(w) for w in (first, captured, other, second)}) == 4
    assert set(map(id, heap.workspaces.values())) == {id(w) for w in (captured, other, second)}
    assert [w.released for w in (first, captured, other, second)] == [True, False, False, False]


@pytest.mark.parametrize("sms", [132, 16])
def test_those_of_pushes_are_for_all_blocks_that_a_call_may_have(
    heap: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, sms: int
) -> None:
    """Only a cluster may have more than there are multiprocessors to be had. Slots are what it grows by."""
    monkeypatch.setattr(workspaces, "num_sms", lambda device: sms)
    most, kind = min(BLOCKS, sms), workspaces.ALL_REDUCE
    first: Any = workspaces.push_workspace(heap, kind, ExchangeLayout(2, 128, 3))
    assert first.layout == ExchangeLayout(2, 128, most)
    assert workspaces.push_workspace(heap, kind, ExchangeLayout(2, 64, most)) is first
    second: Any = workspaces.push_workspace(heap, kind, ExchangeLayout(2, 512, most))
    third: Any = workspaces.push_workspace(heap, kind, ExchangeLayout(2, 64, BLOCKS))
    assert (second.layout, third.layout) == (ExchangeLayout(2, 512, most), ExchangeLayout(2, 512, BLOCKS))
    assert (third is second) is (most == BLOCKS)
