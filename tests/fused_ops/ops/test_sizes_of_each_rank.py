"""Columns after a gather, and what is contracted before a reduction: each CPU rank may have its own number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import weft
from opcommon import BOUND, DTYPES, assert_fused, check, gather, poison, world
from ranks import run_ranks
from torch import Tensor
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.call_check import OpCall
from weft.fused_ops.ops import ALL_GATHER_MATMUL

FP8 = torch.float8_e4m3fn
SIZES = [(9, 8), (5, 5, 2), (1, 0), (3, 0, 7)]  # of each rank


def gathers(rank: int, mine: int, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    for shape, dim in (((3, 6), 0), ((2, 3, 6), 1), ((3, 6), 1)):
        poison(rank)
        x = torch.randn(shape).to(dtype).requires_grad_()
        k = shape[-1] * (size if dim == len(shape) - 1 else 1)
        Bs = [torch.randn(k, n).to(dtype).requires_grad_() for n in (mine, 2 * mine, 4)]
        A, outs = fused_ops.fused_all_gather_matmul(x, Bs, dim, None)
        assert_fused()
        whole = torch.cat(gather(x), dim)
        assert A is not None
        assert torch.equal(A.double(), whole)
        grads = [torch.randn_like(y) for y in outs]
        for y, B in zip(outs, Bs, strict=True):
            check("product", y.detach(), whole @ B.detach().double(), BOUND[dtype])
        # What the gradient of x sums over has this rank's size.
        torch.autograd.backward(outs, grads)
        for B, grad in zip(Bs, grads, strict=True):
            assert B.grad is not None
            check("grad of B", B.grad, whole.flatten(0, -2).t() @ grad.double().flatten(0, -2), BOUND[dtype])
        part = sum(g.double() @ B.detach().double().t() for g, B in zip(grads, Bs, strict=True))
        parts = [p.chunk(size, dim)[rank] for p in gather(torch.as_tensor(part))]
        assert x.grad is not None
        check("grad of A_shard", x.grad, sum(parts), 2 * BOUND[dtype], parts)


def reduces(rank: int, mine: int, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    for shape, dim in (((2 * size, mine), 0), ((3, size, mine), 1), ((5, mine), 1)):
        poison(rank)
        a = torch.randn(shape).to(dtype).requires_grad_()
        b = torch.randn(mine, 4 * size).to(dtype).requires_grad_()
        y = fused_ops.fused_matmul_reduce_scatter(a, b, "sum", dim, None)
        assert_fused()
        products = gather(a.detach().double() @ b.detach().double())
        parts = [p.chunk(size, dim)[rank] for p in products]
        check("part", y.detach(), sum(parts), BOUND[dtype], parts)
        # Its gradient gathers, and multiplies with as many columns as this rank has.
        grad = torch.randn_like(y)
        y.backward(grad)
        whole = torch.cat(gather(grad), dim)
        assert a.grad is not None
        check("grad of A", a.grad, whole @ b.detach().double().t(), BOUND[dtype])
        total = fused_ops.fused_matmul_all_reduce(a.detach(), b.detach(), "avg", None)
        assert_fused()
        check("mean", total, sum(products) / size, BOUND[dtype], [p / size for p in products])


def scaled(rank: int, mine: int) -> None:
    """fp8 with row-wise scales; sizes are multiples of 16."""
    size, n = dist.get_world_size(), 16 * mine
    x, w = torch.randn(3, 32).to(FP8), torch.randn(n, 32).to(FP8).t()
    scales, of_w = torch.rand(3, 1) + 0.5, torch.rand(1, n) + 0.5
    given = ([None], [None], [torch.bfloat16], [False])
    _, (y,) = fused_ops.fused_all_gather_scaled_matmul(x, [w], scales, [of_w], 0, None, *given)
    assert_fused()
    whole = torch.cat(gather(x.float() * scales))
    check("scaled product", y, whole @ (w.double() * of_w), BOUND[torch.bfloat16])
    a, b = torch.randn(2 * size, n).to(FP8), torch.randn(16, n).to(FP8).t()
    of_a, of_b = torch.rand(2 * size, 1) + 0.5, torch.rand(1, 16) + 0.5
    z = fused_ops.fused_scaled_matmul_reduce_scatter(
        a, b, of_a, of_b, "sum", 0, None, out_dtype=torch.bfloat16
    )
    assert_fused()
    parts = [p.chunk(size)[rank] for p in gather((a.double() * of_a) @ (b.double() * of_b))]
    check("scaled part", z, sum(parts), 2 * BOUND[torch.bfloat16], parts)


def installed(rank: int, mine: int) -> None:
    """torch's names."""
    weft.install()
    try:
        x, w, name = torch.randn(3, 6), torch.randn(6, mine), world().group_name
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name)
        assert_fused()
        check("product", y, torch.cat(gather(x)) @ w.double(), 1e-6)
    finally:
        weft.drop_in.uninstall()


def all_calls(rank: int, world_size: int, sizes: tuple[int, ...], checked: bool) -> None:
    symm_mem.reset()  # the next call of each op is compared
    symm_mem.set_checked(checked)
    for dtype in DTYPES:
        gathers(rank, sizes[rank], dtype)
        reduces(rank, sizes[rank], dtype)
    if all(sizes):
        scaled(rank, sizes[rank])
    installed(rank, sizes[rank])
    symm_mem.set_checked(False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_rank_has_its_own_number(sizes: tuple[int, ...]) -> None:
    run_ranks(all_calls, len(sizes), sizes, sizes == SIZES[1])


def refuses(rank: int, world_size: int) -> list[str]:
    """Of what is summed each rank must have the same."""
    texts = []
    a, b = torch.randn(4, 6), torch.randn(6, 4 + 2 * rank)
    calls: list[Callable[[], Tensor]] = [
        lambda: fused_ops.fused_matmul_reduce_scatter(a, b, "sum", 0, None),
        lambda: fused_ops.fused_matmul_all_reduce(a, b, "sum", None),
    ]
    for call in calls:
        symm_mem.reset()
        with pytest.raises(symm_mem.RankMismatch) as error:
            call()
        texts.append(str(error.value))
        assert (fused_ops.one_shot_all_reduce(torch.ones(3), "sum", None) == world_size).all()
    return texts


def test_columns_of_what_is_summed_are_refused() -> None:
    for text in run_ranks(refuses, 2)[0]:
        assert "A=float32[4, *], B=float32[*, 6]" in text
        assert "A=float32[4, *], B=float32[*, 4]" in text
        assert "sizes other than * must be the same on all ranks" in text


def test_on_cuda_all_sizes_choose_the_kernel() -> None:
    given = {"Bs": [torch.empty(6, 9)], "gather_dim": 0}
    op = ALL_GATHER_MATMUL
    called = [OpCall(op.name, given, device, op.own_dims) for device in ("cpu", "cuda")]
    assert [str(call) for call in called] == [
        "fused_all_gather_matmul(Bs=[float32[6, *]], gather_dim=0)",
        "fused_all_gather_matmul(Bs=[float32[6, 9]], gather_dim=0)",
    ]
    call = called[-1]
    assert "on CUDA all sizes must be the same" in call.remark
    own = call._replace(own_on_cuda=True)  # as the losses, which send none of them
    assert str(own) == str(called[0]) and "on CUDA" not in own.remark and own.device_type == "cuda"
