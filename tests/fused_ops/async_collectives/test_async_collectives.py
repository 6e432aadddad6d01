"""Collectives that are waited for later, on real CPU processes: results, buffers, and calls that do not fit."""

from __future__ import annotations

import gc
import time
from unittest import mock

import pytest
import torch
from opcommon import gathered, poison, world
from ranks import on_ranks, run_ranks
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan
from weft.fused_ops.dispatch.plan import forced
from weft.symm_mem.heap.registry import get_heap

ops = torch.ops.weft
SHAPES = [(1,), (7,), (3, 5), (2, 3, 129), (64, 1000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def terms(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7 * rank + len(shape))).to(dtype)


def summed(x: Tensor, op: str, rank: int, world_size: int) -> Tensor:
    """This rank's part, by float64. Terms of these dtypes are added in float32."""
    total = gathered(x).double().sum(0)
    return (total / world_size if op == "avg" else total).chunk(world_size)[rank]


def name() -> str:
    return world().group_name


def again(x: Tensor) -> Tensor:
    return ops.all_gather_wait(ops.all_gather_start(x, name()), x, name())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(3)
def test_results(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    poison(rank)
    x, y = terms(rank, shape, dtype), terms(rank, (shape[0] * world_size, *shape[1:]), dtype)
    other = x * 2
    begun = [ops.all_gather_start(x, name()), ops.all_gather_start(other, name())]
    placed = [ops.all_gather_start(t, name(), placed=True) for t in (x, other)]
    assert last_plan().algorithm == "host"
    scattered = [(op, ops.reduce_scatter_start(y, op, name())) for op in ("sum", "avg")]
    want = gathered(x).flatten(0, 1)
    for op, token in reversed(scattered):
        part = ops.reduce_scatter_wait(token, y, name())
        bound = (world_size + 1) * torch.finfo(dtype).eps * y.abs().max().double() * world_size
        assert part.shape == shape and part.dtype == dtype
        assert (part.double() - summed(y, op, rank, world_size)).abs().max() <= bound
    for token, t, factor in zip(begun, (x, other), (1, 2), strict=True):
        assert torch.equal(ops.all_gather_wait(token, t, name()), want * factor)
    for token, t, factor in zip(placed, (x, other), (1, 2), strict=True):
        whole = ops.all_gather_wait(token, t, name(), placed=True)
        assert torch.equal(whole, want * factor)
        ops.all_gather_release(token, whole, name())


@on_ranks([2, 4])
def test_one_after_the_other(rank: int, world_size: int) -> None:
    """Sizes grow, ranks are late, buffers change hands; what is placed lies in one of two places."""
    places = set[int]()
    for i in range(12):
        if i % world_size == rank:
            time.sleep(0.02)
        x = terms(rank, (4 + 32 * (i // 4), 9), torch.float32) + i
        first = ops.all_gather_start(x, name(), placed=True)
        whole = ops.all_gather_wait(first, x, name(), placed=True)
        second = ops.all_gather_start(x + 1, name(), placed=True)
        want = gathered(x).flatten(0, 1)
        assert torch.equal(whole, want), "another gather that is on its way changes nothing"
        places |= {whole.data_ptr()} if i >= 8 else set()
        ops.all_gather_release(first, whole, name())
        held = second._weft_started.of.x
        whole = ops.all_gather_wait(second, held, name(), placed=True)
        assert torch.equal(whole, want + 1)
        ops.all_gather_release(second, whole, name())
    assert len(places) == 1, "a buffer that is free is taken again"


@on_ranks(2)
def test_a_call_outlives_what_its_workspace_has_prepared(rank: int, world_size: int) -> None:
    """Which is dropped when there is too much of it."""
    x = terms(rank, (5, 3), torch.float32)
    token = ops.all_gather_start(x, name())
    with mock.patch.object(symm_mem.workspace, "_MOST_PREPARED", 0):
        for workspace in list(get_heap(None, "cpu").workspaces.values()):
            workspace.keep("of another size", None)
    assert torch.equal(ops.all_gather_wait(token, x, name()), gathered(x).flatten(0, 1))


@on_ranks(2)
def test_calls_that_do_not_fit(rank: int, world_size: int) -> None:
    x, y = torch.ones(4, 2), torch.ones(4 * world_size, 2)
    for bad, kind, said in (
        (
            lambda: ops.reduce_scatter_start(torch.ones(world_size + 1, 2), "sum", name()),
            ValueError,
            "multiple",
        ),
        (lambda: ops.reduce_scatter_start(y, "max", name()), ValueError, "reduce_op"),
        (lambda: ops.reduce_scatter_start(y.long(), "sum", name()), TypeError, "x: "),
        (lambda: ops.all_gather_start(torch.tensor(1.0), name()), ValueError, "x: has no dimension"),
        (lambda: ops.all_gather_start(x, name(), group_size=world_size + 1), ValueError, "group_size: is"),
        (lambda: ops.all_gather_wait(torch.empty(1), x, name()), ValueError, "must be what all_gather_start"),
    ):
        with pytest.raises(kind, match=said):
            bad()
    tokens = [ops.all_gather_start(x, name()) for _ in range(2)]
    with pytest.raises(RuntimeError, match="all_gather_start: 2 are on their way already"):
        ops.all_gather_start(x, name())
    with pytest.raises(ValueError, match="x: is another tensor"):
        ops.all_gather_wait(tokens[0], x.clone(), name())
    for token in tokens:
        assert torch.equal(ops.all_gather_wait(token, x, name()), torch.ones(4 * world_size, 2))
    with pytest.raises(ValueError, match="was waited for already"):
        ops.all_gather_wait(tokens[0], x, name())


@on_ranks(2)
def test_fakes_refuse_and_return_the_same(rank: int, world_size: int) -> None:
    x, y = torch.randn(4, 3), torch.randn(4 * world_size, 3)
    token = ops.all_gather_start(x, name())
    meta = ops.all_gather_wait(token.to("meta"), x.to("meta"), name())
    assert meta.shape == ops.all_gather_wait(token, x, name()).shape == (4 * world_size, 3)
    with pytest.raises(ValueError, match="multiple"):
        ops.reduce_scatter_start(torch.ones(world_size + 1, 2, device="meta"), "sum", name())
    assert ops.reduce_scatter_start(y.to("meta"), "sum", name()).shape == (0,)


@on_ranks(2)
def test_a_call_that_nobody_waits_for_breaks_the_group_until_a_reset(rank: int, world_size: int) -> None:
    x = torch.ones(3)
    symm_mem.set_timeout(5)
    token = ops.all_gather_start(x, name())
    if rank == 0:
        del token
        gc.collect()
        with pytest.raises(symm_mem.CallAbandoned, match="all_gather_start was not waited for"):
            ops.all_gather_start(x, name())
    else:
        ops.all_gather_wait(token, x, name())
    symm_mem.reset()
    assert torch.equal(again(x), torch.ones(3 * world_size))
    symm_mem.set_timeout(30)


@on_ranks(2)
def test_a_rank_that_does_not_start_is_named(rank: int, world_size: int) -> None:
    x = torch.ones(3)
    again(x)
    symm_mem.set_timeout(0.3)
    if rank == 0:
        token = ops.all_gather_start(x, name())
        with pytest.raises(symm_mem.PeerTimeout, match=r"all_gather_wait.*rank 1"):
            ops.all_gather_wait(token, x, name())
    else:
        time.sleep(1)
    symm_mem.set_timeout(30)
    symm_mem.reset()
    symm_mem.set_timeout(30)
    assert torch.equal(again(x), torch.ones(3 * world_size))


def unfused(rank: int, world_size: int) -> None:
    x, y = torch.randn(4, 3), torch.randn(4 * world_size, 3)
    with forced("unfused"):
        tokens = ops.all_gather_start(x, name(), placed=True), ops.reduce_scatter_start(y, "sum", name())
    assert last_plan().algorithm == "unfused"
    whole = ops.all_gather_wait(tokens[0], x, name(), placed=True)
    assert torch.equal(whole, gathered(x).flatten(0, 1))
    ops.all_gather_release(tokens[0], whole, name())
    part = ops.reduce_scatter_wait(tokens[1], y, name())
    torch.testing.assert_close(part.double(), summed(y, "sum", rank, world_size), atol=1e-5, rtol=0)


def test_by_the_groups_own_backend() -> None:
    run_ranks(unfused, 2)
