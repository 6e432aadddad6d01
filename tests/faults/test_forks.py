"""A forked child of a rank is refused whatever belongs to the rank's groups, and the rank does not notice."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from faults.forked import ENDS, in_child, refusal
from faults.ops import OPS
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import FusionPass, one_shot_all_reduce
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.symm_mem import ForkedProcess
from weft.symm_mem.heap.registry import get_heap

VOTE_DEADLINE = 30.0
CULPRIT = 1


def right(step: int, group: Any = None) -> None:
    """Every op, with its exact result."""
    for op, case_of in OPS.items():
        case = case_of(dist.get_rank(group), dist.get_world_size(group), step, 1, group, step)
        assert torch.equal(case.call(), case.want()), (op, step)


def expect_refusals(told: dict[str, dict[str, Any] | None], ops: dict[str, str], group: str) -> None:
    for name, error in told.items():
        assert error is not None and error["kind"] == "ForkedProcess", (name, error)
        assert error["op"] == ops.get(name, name) and error["group"] == group, (name, error)
        assert (error["rank"], error["parent"]) == (CULPRIT, os.getpid()) and error["child"] != os.getpid()
        words = f"this process, {error['child']}, was forked from process {os.getpid()}, which joined group"
        assert words in error["text"] and "a forked child is no rank" in error["text"], error
        assert error["site"].partition(":")[0].endswith(("test_forks.py", "ops.py", "forked.py")), error


def everything(rank: int, world_size: int, end: str) -> None:
    """All doors, of a group in use and of one that weft does not know yet, without and with the checked mode."""
    symm_mem.set_timeout(VOTE_DEADLINE)
    new = dist.new_group([0, 1])
    symm_mem.set_timeout(VOTE_DEADLINE, new)
    x = symm_mem.empty(5, dtype=torch.float32).fill_(rank)
    peers, unpeered = symm_mem.rendezvous(x), symm_mem.empty(5)
    with_heap = get_heap()
    right(0)
    other = 1 - rank

    def calls(group: Any) -> dict[str, Callable[[], object]]:
        cases = {name: op(rank, world_size, 9, 1, group, 0) for name, op in OPS.items()}
        return {
            **{name: case.call for name, case in cases.items()},
            "empty": lambda: symm_mem.empty(3, group=group),
            "heap": lambda: get_heap(group),
            "unavailable": lambda: symm_mem.unavailable(group),
            "reset": lambda: symm_mem.reset(group),
            "check": lambda: symm_mem.check(group),
        }

    made: dict[str, Callable[[], object]] = {
        "put": lambda: peers.put(other),
        "wait": lambda: peers.wait(other),
        "barrier": peers.barrier,
        "rendezvous": lambda: symm_mem.rendezvous(x),
        "rendezvous, the first": lambda: symm_mem.rendezvous(unpeered),
        "allocate": lambda: with_heap.allocate(100, "a child's"),
        "check all": symm_mem.check,
    }

    def work() -> list[dict[str, dict[str, Any] | None]]:
        symm_mem.set_timeout(2)
        symm_mem.set_timeout(2, new)
        told = []
        for checked in (False, True):
            symm_mem.set_checked(checked)
            told.append({name: refusal(call) for name, call in {**calls(None), **made}.items()})
            told.append({name: refusal(call) for name, call in calls(new).items()})
        assert x.eq(rank).all()  # memory like any other
        gc.collect()
        return told

    if rank == CULPRIT:
        ops = {"unavailable": "heap", "rendezvous, the first": "rendezvous", "check all": "check"}
        for i, told in enumerate(in_child(work, end)):
            expect_refusals(told, ops, new.group_name if i % 2 else "0")
    # The peers are here meanwhile: in a call, in a wait, in the making of a heap, in the checked mode.
    right(1)
    peers.barrier()
    peers.put(other)
    peers.wait(other)
    assert peers.tensors[other].eq(other).all()
    assert symm_mem.empty(70).numel() == 70
    symm_mem.set_checked(True)
    right(2)
    right(3, new)
    symm_mem.set_checked(False)
    symm_mem.check()
    symm_mem.reset()
    symm_mem.reset(new)
    right(4)
    right(5, new)


@pytest.mark.parametrize(("end", "store"), [*zip(ENDS, itertools.cycle(["file", "tcp"]), strict=False)])
def test_a_child_is_refused_and_the_parent_goes_on(end: str, store: str) -> None:
    run_ranks(everything, 2, end, fresh=True, store=store)


def numbers_of_a_child(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Peers that are in their call meanwhile do not take a child's numbers for its parent's."""
    symm_mem.set_timeout(VOTE_DEADLINE)
    right(0)

    def work() -> None:
        for _ in range(2):
            with pytest.raises(ForkedProcess):
                one_shot_all_reduce(torch.full((3,), 100.0), "sum", None)

    if rank == CULPRIT:
        in_child(work, "kill")
    return tuple(one_shot_all_reduce(torch.full((3,), rank + n), "sum", None).tolist() for n in (1.0, 2.0))


def test_a_childs_numbers_are_nobodys() -> None:
    assert run_ranks(numbers_of_a_child, 2, fresh=True) == [([3.0] * 3, [5.0] * 3)] * 2


@on_ranks(2, fresh=True)
def test_a_compiled_graph_does_not_ask_in_a_child(rank: int, world_size: int) -> None:
    """A fused graph's question is not asked in the parent's name."""
    group = dist.group.WORLD

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w

    fusion = FusionPass()
    run = torch.compile(program, options=fusion.options, dynamic=False)
    shards = [torch.randint(-3, 4, (4, 8)).float() for _ in range(world_size)]
    for r, shard in enumerate(shards):
        dist.broadcast(shard, r)
    w = torch.randint(-3, 4, (8, 6)).float()

    def expect_right() -> None:
        assert torch.equal(run(shards[rank], w), torch.cat(shards) @ w)

    symm_mem.set_timeout(VOTE_DEADLINE)
    expect_right()
    asked = fusion.report().questions
    if rank == CULPRIT:
        told = in_child(lambda: {"agree on a graph": refusal(lambda: run(shards[rank], w))})
        expect_refusals(told, {}, "0")
    for _ in range(3):
        expect_right()
    report = fusion.report()
    assert not report.disagreements, report
    now = report.questions
    assert (now.count, now.fused) == (asked.count + 3, asked.fused + 3), (asked, now)


@on_ranks(2, fresh=True)
def test_the_boards_of_graphs(rank: int, world_size: int) -> None:
    """Nor does a question whose board the parent has made, or has yet to make; the file of its lock is let go of."""
    made = VoteBoard(dist.group.WORLD)
    assert made.attached()
    dist.barrier()  # the rank that has made it is there until then
    if rank == 0:

        def work() -> bool:
            with pytest.raises(ForkedProcess), made._lock(1.0):
                pass
            for ask in (lambda: made.tell(1, ["x"]), lambda: VoteBoard(dist.group.WORLD)):
                with pytest.raises(ForkedProcess, match=r"^agree on a graph: "):
                    ask()
            try:
                os.fstat(made._file.fd)
            except OSError:
                return True
            return False

        assert in_child(work)
        os.fstat(made._file.fd)


@on_ranks(2, fresh=True)
def test_a_child_waits_for_no_thread_of_its_parent(rank: int, world_size: int) -> None:
    """A child has none of its parent's threads, and waits for no lock that one of them has."""
    right(0)
    heap = get_heap()
    x = symm_mem.empty(4)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with heap.lock:
            held.set()
            done.wait(VOTE_DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(VOTE_DEADLINE)
    calls = {
        "empty": lambda: symm_mem.empty(4),
        "rendezvous": lambda: symm_mem.rendezvous(x),
        "allocate": lambda: heap.allocate(4, "a child's"),
        "prepare": lambda: heap.prepare("prepare", "a child's", lambda: None),
        "reset": symm_mem.reset,
        "one_shot_all_reduce": lambda: one_shot_all_reduce(torch.ones(1 << 22), "sum", None),
    }
    try:
        if rank == CULPRIT:
            expect_refusals(in_child(lambda: {n: refusal(call) for n, call in calls.items()}), {}, "0")
    finally:
        done.set()
        thread.join()
    right(1)


@on_ranks(2, fresh=True)
def test_a_child_of_a_broken_group(rank: int, world_size: int) -> None:
    """A child hears of the fork also where its parent hears of something else; the parent's words stay."""
    right(0)
    symm_mem.set_timeout(0.2)
    if rank == 0:
        with pytest.raises(symm_mem.PeerTimeout) as broken:
            one_shot_all_reduce(torch.ones(4), "sum", None)
        told = in_child(lambda: refusal(lambda: one_shot_all_reduce(torch.ones(4), "sum", None)))
        assert told is not None and told["kind"] == "ForkedProcess", told
        with pytest.raises(symm_mem.PeerTimeout) as again:
            one_shot_all_reduce(torch.ones(4), "sum", None)
        assert str(again.value) == str(broken.value)
    dist.barrier()
    symm_mem.set_timeout(VOTE_DEADLINE)
    symm_mem.reset()
    right(1)


@on_ranks(2, fresh=True)
def test_a_grandchild_is_told_whose_rank_it_is(rank: int, world_size: int) -> None:
    right(0)

    def grandchild() -> dict[str, Any] | None:
        return refusal(lambda: one_shot_all_reduce(torch.ones(4), "sum", None))

    told = in_child(lambda: (os.getpid(), in_child(grandchild)))[1]
    assert told["kind"] == "ForkedProcess" and told["parent"] == os.getpid() != told["child"], told
    right(1)


def joins(store: str, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    symm_mem.set_timeout(VOTE_DEADLINE)
    for step in range(2):
        right(step)
        symm_mem.rendezvous(symm_mem.empty(7)).barrier()
        symm_mem.check()
        symm_mem.reset()


def joins_anew(store: str, rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    joins(store, rank, world_size)


def own_group(rank: int, world_size: int, store: str, method: str) -> None:
    """The children join a group of their own, with the name that the parents' has; the parents go on."""
    symm_mem.set_timeout(VOTE_DEADLINE)
    right(0)
    if method == "fork":
        in_child(lambda: joins_anew(store, rank, world_size))
    else:
        mp.current_process()._config["daemon"] = False  # else it may have no children
        child = mp.get_context(method).Process(target=joins, args=(store, rank, world_size))
        child.start()
        child.join(4 * VOTE_DEADLINE)
        assert child.exitcode == 0
    right(1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_that_join_a_group_of_their_own(tmp_path: Path, method: str) -> None:
    run_ranks(own_group, 2, str(tmp_path / "store"), method, fresh=True)


def test_the_error_can_be_handed_on() -> None:
    error = ForkedProcess("an_op", "g", 3, 10, 11, "a.py:1")
    same = pickle.loads(pickle.dumps(error))
    assert str(same) == str(error) and vars(same) == vars(error)
    assert isinstance(error.again("another"), ForkedProcess) and error.again("another").op == "another"
    assert error.again().op == "an_op"
