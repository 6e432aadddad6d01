"""Which workspace a call gets, without ranks: when one is made, and what becomes of the one before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import Stage
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops.dispatch import call_check, workspaces
from weft.fused_ops.dispatch.plan import GraphTurn
from weft.kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout

stage = fake_gpu.stage
SMALL, MANY, BOTH = Layout(2, 64, 2 << 20), Layout(2, 128, 1 << 20), Layout(2, 128, 2 << 20)


class Made:
    def __init__(
        self, heap: Any, layout: Layout, tag: str, *, graph: Any = None, replayed: bool = False
    ) -> None:
        self.layout, self.tag, self.graph, self.replayed = layout, tag, graph, replayed
        self.prepared: dict[str, Any] = {}
        self.released = False

    def release(self) -> None:
        self.released = True


@pytest.fixture
def made(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """On a GPU that is none."""
    stage.workspaces.clear()
    stage.where.fault = None
    monkeypatch.setattr(workspaces, "_CLASSES", (Made, Made))
    return stage


def capture(made: Stage, graph: int) -> None:
    """Its current stream, into a graph; 0: none."""
    made.gpu.graphs = {made.gpu.now: ("ACTIVE", graph)} if graph else {}


def test_it_grows_and_never_shrinks(made: Stage) -> None:
    first = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    assert workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL) is first
    second = workspaces.workspace_of(made.where, workspaces.MATMUL, MANY)
    assert second is not first and second.layout == BOTH
    for wanted in (SMALL, MANY, BOTH):
        assert workspaces.workspace_of(made.where, workspaces.MATMUL, wanted) is second


@pytest.mark.parametrize("graph", [0, 5])
def test_a_captured_graph_keeps_what_it_has_outgrown(made: Stage, graph: int) -> None:
    """Its earlier nodes write to it whenever it is replayed."""
    capture(made, graph)
    first: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    second: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, MANY)
    assert (first.graph is not None) is (second.graph is not None) is bool(graph)
    assert (first in second.prepared.values()) is bool(graph)
    for workspace in (first, second) if graph else ():
        assert not workspace.graph.is_gone()
    for end in made.gpu.held.get(("ACTIVE", graph), []):
        end()
    for workspace in (first, second) if graph else ():
        assert workspace.graph.is_gone()


def test_streams_and_graphs_and_kinds_have_their_own(made: Stage) -> None:
    kinds = workspaces.MATMUL, workspaces.COPIED
    found = [workspaces.workspace_of(made.where, kind, SMALL) for kind in kinds]
    capture(made, 5)
    found.append(workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL))
    capture(made, 0)
    of_ll_protocol = Layout(2, 0, 1 << 20, ll_protocol=True)
    found.append(workspaces.workspace_of(made.where, workspaces.LL_PROTOCOL, of_ll_protocol))
    assert len(set(map(id, found))) == 4
    assert workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL) is found[0]


def test_an_external_stream_never_has_that_of_another_one_with_its_handle(made: Stage) -> None:
    """On another rank the new stream has another handle, and makes a workspace."""
    made.gpu.external = {7: 100, 8: 101}
    first: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    assert workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL) is first
    capture(made, 5)
    captured: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    capture(made, 0)
    made.gpu.now = 8
    other: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    made.gpu.now, made.gpu.external = 7, {7: 102, 8: 101}
    second: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    assert len({id(w) for w in (first, captured, other, second)}) == 4
    assert set(map(id, made.workspaces.values())) == {id(w) for w in (captured, other, second)}
    assert [w.released for w in (first, captured, other, second)] == [True, False, False, False]


@pytest.mark.parametrize("sms", [132, 16])
def test_those_of_pushes_are_for_all_blocks_that_a_call_may_have(made: Stage, sms: int) -> None:
    """Only a cluster may have more than there are SMs to be had. Slots are what it grows by."""
    made.gpu.sms = sms
    most, kind = min(BLOCKS, sms), workspaces.ALL_REDUCE
    first: Any = workspaces.workspace_of(made.where, kind, ExchangeLayout(2, 128, 3))
    assert first.layout == ExchangeLayout(2, 128, most)
    assert workspaces.workspace_of(made.where, kind, ExchangeLayout(2, 64, most)) is first
    second: Any = workspaces.workspace_of(made.where, kind, ExchangeLayout(2, 512, most))
    third: Any = workspaces.workspace_of(made.where, kind, ExchangeLayout(2, 64, BLOCKS))
    assert (second.layout, third.layout) == (ExchangeLayout(2, 512, most), ExchangeLayout(2, 512, BLOCKS))
    assert (third is second) is (most == BLOCKS)


def test_what_inductor_records_meets_itself_run_captured_and_on_its_own_stream(made: Stage) -> None:
    """One rank runs it, on the stream on which it is recorded, or records it, while another one replays it."""
    direct: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    found: list[Any] = []
    for stream, graph in ((7, 0), (8, 0), (8, 5), (8, 6)):
        turn = workspaces.RecordedTurn()
        made.gpu.now = stream
        capture(made, graph)
        found.append(workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL))
        capture(made, 0)
        made.gpu.now = 7
        del turn
    assert len(set(map(id, found))) == 1 and found[0] is not direct
    assert found[0].replayed and found[0].graph is None
    assert workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL) is direct


def test_what_inductor_records_has_one_of_each_size_which_stays(made: Stage) -> None:
    turn = workspaces.RecordedTurn()
    first: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL)
    other: Any = workspaces.workspace_of(made.where, workspaces.MATMUL, BOTH)
    assert other is not first and not first.released
    assert (first.layout, other.layout) == (SMALL, BOTH)
    assert workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL) is first
    assert [*workspaces.workspaces_so_far(made.where, workspaces.MATMUL, 7)] == [first, other]
    del turn
    assert [*workspaces.workspaces_so_far(made.where, workspaces.MATMUL, 7)] == []


def test_streams_in_no_order_do_not_meet_in_what_inductor_records(
    made: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found: list[Any] = []
    for reserved in (False, True):
        workspaces.order_of(0).room = 1 + reserved
        for stream in (7, 8):
            made.gpu.now = stream
            turn = workspaces.RecordedTurn()
            found.append(workspaces.workspace_of(made.where, workspaces.MATMUL, SMALL))
            del turn
    assert [*map(found.index, found)] == [0, 0, 2, 3]
    assert len({workspace.tag for workspace in found}) == 1, "a stream is a rank's own: heaps compare tags"


def test_what_inductor_records_takes_one_buffer_and_is_not_compared() -> None:
    """A rank that replays a part of a graph does not know how many calls are in it, and says nothing."""
    workspace: Any = object.__new__(workspaces._RecordedWorkspace)
    workspace.last_buffer, workspace._calls = 0, SimpleNamespace(takes=lambda buffer: None)
    turn = workspaces.RecordedTurn()
    assert [workspace.next_buffer() for _ in range(3)] == [0, 0, 0]
    assert call_check._current.left_out
    del turn
    assert not call_check._current.left_out


def after_a_reset(rank: int, size: int, turn: type[GraphTurn]) -> tuple[int, list[float]]:
    group, ops = symm_mem.resolve_group(None), torch.ops.weft
    heap, x, held = get_heap(group, torch.device("cpu")), torch.full((1,), float(rank)), turn()
    workspace = workspaces.workspace_of(heap, workspaces.MATMUL, Layout(size, 64, 1 << 20))
    if rank == 0:
        workspace.keep("made before an error reached the other rank", "made")
    token = ops.all_gather_start(x, group.group_name)
    symm_mem.reset()
    del token  # as the traceback of that error goes
    again = ops.all_gather_start(x, group.group_name)
    done = len(workspace.prepared), ops.all_gather_wait(again, x, group.group_name).tolist()
    del held
    return done


@pytest.mark.parametrize("turn", [GraphTurn, workspaces.RecordedTurn])
def test_a_reset_leaves_nothing_made_or_started(turn: type[GraphTurn]) -> None:
    """Ranks make it together again: who has it would not come."""
    assert run_ranks(after_a_reset, 2, turn, fresh=True) == [(0, [0.0, 1.0])] * 2
