"""The checked mode: ranks that call differently are told at once, with both calls, and nothing is broken."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
)
from weft.fused_ops.dispatch import plan

ODD = 1  # the rank that differs

Call = Callable[[], object]


def gather(
    m: int = 4, k: int = 6, n: tuple[int, ...] = (5,), dtype: torch.dtype | None = None, **named: bool
) -> Call:
    a = torch.ones(m, k, dtype=dtype)
    return lambda: fused_all_gather_matmul(a, [torch.ones(k, c, dtype=dtype) for c in n], 0, None, **named)


def scatter(n: int = 3, dim: int = 0, op: str = "sum", k: int = 6) -> Call:
    return lambda: fused_matmul_reduce_scatter(torch.ones(9, k), torch.ones(k, n), op, dim, None)


def reduce(n: int = 5, op: str = "sum") -> Call:
    return lambda: one_shot_all_reduce(torch.ones(n), op, None)


# What the others call, what the odd one calls, and what the error shows of each.
PAIRS: list[tuple[Call, Call, str, str]] = [
    (gather(), gather(5), "A_shard=float32[4, 6]", "A_shard=float32[5, 6]"),
    (gather(k=6), gather(k=7), "A_shard=float32[4, 6]", "A_shard=float32[4, 7]"),
    (gather(), gather(dtype=torch.bfloat16), "float32[4, 6]", "bfloat16[4, 6]"),
    (gather(), gather(n=(5, 2)), "Bs=[float32[6, *]]", "Bs=[float32[6, *], float32[6, *]]"),
    (gather(), gather(return_A=False), "return_A=True", "return_A=False"),
    (scatter(), scatter(dim=1), "scatter_dim=0", "scatter_dim=1"),
    (scatter(), scatter(6), "A=float32[9, *], B=float32[*, 3]", "B=float32[*, 6]"),
    (scatter(), scatter(op="avg"), "reduce_op='sum'", "reduce_op='avg'"),
    (reduce(), reduce(6), "x=float32[5]", "x=float32[6]"),
    (gather(), scatter(), "fused_all_gather_matmul(", "fused_matmul_reduce_scatter("),
    (reduce(), gather(), "one_shot_all_reduce(", "fused_all_gather_matmul("),
]


@on_ranks(3, fresh=True)
def test_calls_that_differ_are_named_and_nothing_breaks(rank: int, world_size: int) -> None:
    symm_mem.set_checked(True)
    for nth, (usual, odd, others, mine) in enumerate(PAIRS):
        with pytest.raises(symm_mem.RankMismatch) as error:
            (odd if rank == ODD else usual)()
        text = str(error.value)
        here = rf"at {re.escape(__file__)}:\d+"
        assert re.fullmatch(
            rf"call {2 * nth + 1} in group '0': rank {ODD} asked for .*{re.escape(mine)}.* {here}, "
            rf"rank 0 for .*{re.escape(others)}.* {here}",
            text,
        ), text
        assert error.value.rank == ODD
        assert (one_shot_all_reduce(torch.ones(nth + 1), "sum", None) == world_size).all()
    # Not an argument but what is made of it: another algorithm.
    with mock.patch.object(plan, "_forced", "unfused" if rank == ODD else None):
        with pytest.raises(
            symm_mem.RankMismatch, match=r"rank 1 asked for one_shot_all_reduce by Plan\(.*unfused"
        ) as e:
            reduce()()
        assert "the caller asked for it" in str(e.value) and "'host'" in str(e.value)
    # Operands may lie in memory as each rank likes.
    a = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    mine = a.t().contiguous().t() if rank == ODD else a
    for out in fused_all_gather_matmul(mine, [torch.eye(6)], 0, None)[1]:
        torch.testing.assert_close(out, a.repeat(world_size, 1))
    assert last_plan().algorithm == "host"
    # A rank that makes no call.
    symm_mem.set_timeout(0.4)
    if rank != ODD:
        with pytest.raises(
            symm_mem.PeerTimeout, match=r"waited 0.4 s for rank 1: its count of checked calls is"
        ) as late:
            reduce()()
        with pytest.raises(symm_mem.PeerTimeout, match=re.escape(str(late.value))):
            reduce()()
    symm_mem.set_timeout(60)
    symm_mem.reset()
    reduce()()
    symm_mem.set_checked(False)


def one_alone(rank: int, world_size: int) -> str:
    """The mode itself, and any other setting, must be the same on all ranks."""
    for name in ("WEFT_RESERVED_SMS", "WEFT_PDL"):
        words = rf"make a heap .* asked for {name}=1, rank 0 for .*=0"
        with (
            mock.patch.dict(os.environ, {name: str(rank)}),
            pytest.raises(symm_mem.RankMismatch, match=words),
        ):
            reduce()()
    reduce()()
    symm_mem.set_timeout(0.4)
    if rank == ODD:
        symm_mem.set_checked(True)
    with pytest.raises(symm_mem.PeerTimeout) as error:
        reduce()()
    symm_mem.set_timeout(60)
    symm_mem.set_checked(False)
    symm_mem.reset()
    reduce()()
    return str(error.value)


def test_settings_that_differ_are_found() -> None:
    usual, odd = run_ranks(one_alone, 2, fresh=True)
    # Both wait for 0.4 s, and who gives up first ends the other's wait.
    for rank, said in enumerate((usual, odd)):
        assert re.match(
            rf"one_shot_all_reduce: rank {rank} of group '0' waited 0\.[34]\d* s for rank {1 - rank}", said
        )
    assert "WEFT_CHECK" not in odd  # which is on already, whoever has switched it on


def gives_up(rank: int, world_size: int) -> str:
    """A rank leaves a call when it has sent all that the others wait for: they learn it at the next one."""
    symm_mem.set_timeout(60)
    symm_mem.set_checked(True)
    reduce()()
    with ExitStack() as stack:
        if rank == ODD:
            broken = mock.patch.object(torch, "add", side_effect=MemoryError)
            stack.enter_context(broken)
            stack.enter_context(pytest.raises(MemoryError))
        reduce()()
    begin = time.monotonic()
    with pytest.raises(symm_mem.WeftError) as error:
        reduce()()
    assert time.monotonic() - begin < 10
    symm_mem.reset()
    reduce()()
    symm_mem.set_checked(False)
    return str(error.value)


def test_a_rank_that_has_given_up_is_not_waited_for() -> None:
    usual, _ = run_ranks(gives_up, 2, fresh=True)
    assert re.search(
        r"for rank 1: its count of checked calls is \d+, expected \d+, and it has given up", usual
    )


@on_ranks(2, fresh=True)
def test_the_environment_switches_it_on(rank: int, world_size: int) -> None:
    os.environ["WEFT_CHECK"] = "1"  # it is read at the first call
    assert symm_mem.is_checked()
    with pytest.raises(symm_mem.RankMismatch, match="call 1 in group"):
        reduce(5 + rank)()


def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="on: is 1, must be True or False"):
        symm_mem.set_checked(1)  # type: ignore[arg-type]
    monkeypatch.setattr("weft.symm_mem.switches._on", None)
    monkeypatch.setenv("WEFT_CHECK", "yes")
    with pytest.raises(ValueError, match="WEFT_CHECK: is 'yes', must be 0 or 1"):
        symm_mem.is_checked()


@on_ranks(2, fresh=True, store="tcp")
def test_threads_compiled_and_differentiated_calls(rank: int, world_size: int) -> None:
    """Groups are compared for themselves; compiled and differentiated calls like others."""
    symm_mem.set_checked(True)
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in range(1, 40):
                time.sleep(0.001 * ((rank + i) % 2))
                assert (one_shot_all_reduce(torch.full((n + i,), 1.0), "sum", groups[i]) == world_size).all()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures

    @torch.compile(backend="aot_eager")
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return one_shot_all_reduce(x * 2, "sum", "0")[:n]

    x = torch.ones(6, requires_grad=True)
    f(x, 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0 * world_size] * 3 + [0.0] * 3
    with pytest.raises(symm_mem.RankMismatch) as error:
        f(torch.ones(7 + rank), 3)
    assert Path(__file__).name in str(error.value), "the call site is the model's line, not Inductor's"
    symm_mem.set_checked(False)
