"""Outside of the checked mode the first call of each op in a group is compared: ranks that differ there are told."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from test_checked import ODD, PAIRS, gather, reduce
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch import plan
from weft.symm_mem.failure import call_check
from weft.symm_mem.heap.registry import get_heap

Call = Callable[[], object]


def norm(rows: int = 3, eps: float = 1e-5) -> Call:
    x = torch.ones(rows, 4)
    return lambda: fused_ops.fused_all_reduce_rms_norm(x, x, torch.ones(4), eps, None)


def product(n: int = 3, op: str = "sum") -> Call:
    return lambda: fused_ops.fused_matmul_all_reduce(torch.ones(2, 6), torch.ones(6, n), op, None)


MORE = [
    (norm(), norm(4), "x=float32[3, 4]", "x=float32[4, 4]"),
    (norm(), norm(eps=1e-6), "eps=1e-05", "eps=1e-06"),
    (product(), product(7), "A=float32[2, *], B=float32[*, 3]", "B=float32[*, 7]"),
    (product(), product(op="avg"), "reduce_op='sum'", "reduce_op='avg'"),
]


def differ(rank: int, world_size: int) -> float:
    assert not symm_mem.is_checked()
    for usual, odd, others, mine in [*PAIRS, *MORE]:
        symm_mem.reset()  # what comes after it is a first call again
        begin = time.monotonic()
        with pytest.raises(symm_mem.RankMismatch) as error:
            (odd if rank == ODD else usual)()
        took = time.monotonic() - begin
        here = r"at \S+:\d+"
        assert re.fullmatch(
            rf"first call of an op in group '0': rank {ODD} asked for .*{re.escape(mine)}.* {here}, "
            rf"rank 0 for .*{re.escape(others)}.* {here}",
            str(error.value),
        ), str(error.value)
        # Nothing is broken, and the next call is compared as a first one again.
        with pytest.raises(symm_mem.RankMismatch):
            (odd if rank == ODD else usual)()
        usual()
        usual()
    return took


def test_first_calls_that_differ_are_named_and_nothing_breaks() -> None:
    assert max(run_ranks(differ, 3, fresh=True)) < 30


@on_ranks(2, fresh=True)
def test_ops_that_reduce_leave_the_first_all_reduce_to_be_compared(rank: int, world_size: int) -> None:
    norm()()
    product()()
    with pytest.raises(symm_mem.RankMismatch, match=r"x=float32\[4\]"):
        fused_ops.one_shot_all_reduce(torch.ones(4 * (1 + rank)), "sum", None)


@on_ranks(2, fresh=True)
def test_first_plans_that_differ_are_named(rank: int, world_size: int) -> None:
    """Another algorithm for the same arguments."""
    first = plan.Plan("unfused", "of its own") if rank == ODD else plan.Plan("host")
    with (
        mock.patch("weft.fused_ops.dispatch.choice.Plan", return_value=first),
        pytest.raises(
            symm_mem.RankMismatch, match=r"rank 1 asked for one_shot_all_reduce by Plan\(.*of its own"
        ),
    ):
        reduce()()
    reduce()()
    assert fused_ops.last_plan().algorithm == "host"


@on_ranks(2, fresh=True)
def test_later_calls_are_not_compared(rank: int, world_size: int) -> None:
    """Later calls post nothing and wait for nobody. Those of other groups are first calls of their own."""
    gather()()
    checks = get_heap(None, "cpu").call_check
    count = checks._pages.count
    for n in (1, 2, 3):
        gather(m=n)()
    assert checks._pages.count == count
    reduce()()
    assert checks._pages.count == count + 2, "arguments and plan"
    x = torch.ones(3, 4).t()
    fused_ops.one_shot_all_reduce_(x if rank else x.contiguous(), "sum", None)
    assert checks._pages.count == count + 2, "in place it is another one's first call"
    other = dist.new_group(list(range(world_size)))
    with pytest.raises(symm_mem.RankMismatch, match="first call of an op in group"):
        fused_ops.one_shot_all_reduce(torch.ones(5 + rank), "sum", other)
    assert (fused_ops.one_shot_all_reduce(torch.ones(5), "sum", other) == world_size).all()
    # The checked mode may come later, and end.
    symm_mem.set_checked(True)
    with pytest.raises(symm_mem.RankMismatch, match="call 1 in group"):
        reduce(5 + rank)()
    reduce()()
    symm_mem.set_checked(False)
    reduce()()


def missing(rank: int, world_size: int) -> str | None:
    """A rank makes none, or one that is not its first of that op."""
    said = None
    for known in (False, True):
        symm_mem.reset()
        product()()
        symm_mem.set_timeout(0.4)
        if rank != ODD:
            # The other one may give up a little earlier, and says so.
            ends = r"(waited 0\.4 s|it has given up on rank 0)"
            with pytest.raises(
                symm_mem.PeerTimeout, match=rf"^(make a checks for )?fused_all_gather_matmul: .*{ends}"
            ) as error:
                gather()()
            assert error.value.peer == ODD
            said = str(error.value)
        elif known:
            with pytest.raises(symm_mem.PeerTimeout):
                product()()
        symm_mem.set_timeout(60)
        symm_mem.reset()
        gather()()
    return said


def test_a_rank_that_makes_no_such_call_is_named() -> None:
    said = run_ranks(missing, 2, fresh=True)[0]
    assert said is not None and "rank 1" in said and "test_" in said


@on_ranks(2, fresh=True)
def test_a_slow_compilation_is_no_timeout(rank: int, world_size: int) -> None:
    """What a rank compiles within its first call has another deadline."""
    symm_mem.set_timeout(0.5)
    heap = get_heap(None, "cpu")
    once: list[int] = []

    def ran(given: plan.Plan) -> None:
        if not once:
            once.append(1)
            heap.prepare("a kernel", "a kernel", lambda: time.sleep(1.5 * rank))
        real(given)

    real = plan.ran
    with mock.patch("weft.fused_ops.ops.all_reduce.ran", ran):
        reduce()()
        reduce()()


@on_ranks(2, fresh=True)
def test_the_environment_switches_it_off(rank: int, world_size: int) -> None:
    os.environ["WEFT_CHECK"] = "0"  # it is read at the first call
    reduce()()
    assert get_heap(None, "cpu").call_check is None


def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_check, "_first_calls", None)
    monkeypatch.setenv("WEFT_CHECK", "no")
    with pytest.raises(ValueError, match="WEFT_CHECK: is 'no', must be 0 or 1"):
        call_check.compares_first_calls()


@on_ranks(2, fresh=True)
def test_compiled_calls(rank: int, world_size: int) -> None:
    """Fakes compare nothing; the first call of a compiled graph does."""

    @torch.compile(backend="aot_eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        return fused_ops.one_shot_all_reduce(x * 2, "sum", "0")

    with pytest.raises(symm_mem.RankMismatch, match="first call of an op"):
        f(torch.ones(7 + rank))
    x = torch.ones(6, requires_grad=True)
    f(x).sum().backward()
    assert x.grad is not None and x.grad.eq(2 * world_size).all()
