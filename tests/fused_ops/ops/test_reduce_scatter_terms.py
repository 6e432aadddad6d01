"""What fused_matmul_reduce_scatter adds to its sum, a bias and a residual: on real CPU processes, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from opcommon import (
    DEVICES,
    DTYPES,
    assert_fused,
    check,
    compiled_like_eager,
    gather,
    poison,
    same_on_all,
    world,
)
from ranks import on_ranks
from references import held
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter
from weft.fused_ops.dispatch.plan import forced

EITHER = [(True, False), (False, True), (True, True)]  # bias, residual


def shapes(w: int) -> list[tuple[tuple[int, ...], int, int]]:
    """A, columns of B, scatter_dim."""
    return [
        ((5 * w, 7), 11, 0),
        ((6, 3), 4 * w, 1),
        ((2, 3 * w, 6), 10, 1),
        ((3, 4, 5), 2 * w, -1),
        ((0, 7), 4, 0),
        ((4 * w, 0), 3, 0),
        ((65 * w, 264), 136, 0),
        ((3, 70 * w, 64), 72, 1),
    ]


def own_shape(shape: tuple[int, ...], n: int, dim: int, w: int) -> list[int]:
    out = [*shape[:-1], n]
    out[dim] //= w
    return out


def laid_out(x: torch.Tensor, how: int) -> torch.Tensor:
    """The same numbers: as they are, with gaps between them, or the last dimension first."""
    if how == 1:
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1::2]
        return wide.copy_(x)
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if how == 2 else x


@on_ranks([1, 2, 3], device=DEVICES)
def test_bias_and_residual(rank: int, world_size: int) -> None:
    for nth, ((shape, n, dim), dtype) in enumerate(product(shapes(world_size), DTYPES)):
        for wide, algorithm in product((False, True), ("fused", "unfused")):
            reduce_op = ("sum", "avg")[(nth + wide + (algorithm == "fused")) % 2]
            poison(rank)
            A, B = torch.randn(*shape).to(dtype), torch.randn(shape[-1], n).to(dtype)
            out_shape = own_shape(shape, n, dim, world_size)
            # Each rank's own.
            has_bias, has_residual = EITHER[(nth + wide) % 3]
            bias = laid_out(torch.randn(out_shape[-1]).to(dtype), nth % 2) if has_bias else None
            residual = laid_out(torch.randn(out_shape).to(dtype), nth % 3) if has_residual else None
            out_dtype = torch.float32 if wide else dtype
            given = {"A": A, "B": B, "reduce_op": reduce_op, "scatter_dim": dim, "group": world()}
            with forced(algorithm):
                out = held(
                    fused_matmul_reduce_scatter, **given, out_dtype=out_dtype, bias=bias, residual=residual
                )
            if algorithm == "fused" and out.numel() and world_size > 1:
                assert_fused()
            assert out.dtype == out_dtype and out.is_contiguous()


@on_ranks(2, device=DEVICES)
def test_they_are_added_once_and_rounded_once(rank: int, world_size: int) -> None:
    """256 + 1 is no bfloat16 and rounds to 256; 256 + 1 + 1 is one. For the mean, after the division."""
    ones = torch.ones(1, 16).bfloat16()
    for reduce_op, value in (("sum", 128.0), ("avg", 256.0)):
        A = torch.full((128, 1), value).bfloat16()
        with forced("fused"):
            out = fused_matmul_reduce_scatter(
                *(A, ones, reduce_op, 0, world()), bias=ones[0], residual=ones.expand(64, 16)
            )
        assert out.unique().tolist() == [258.0]


@on_ranks(2, device=DEVICES)
def test_dtypes_of_gradients(rank: int, world_size: int) -> None:
    """4096 times 1 in bfloat16 would end at 256."""
    ones = torch.ones(4096 * world_size, 2).bfloat16()
    bias = torch.zeros(3).bfloat16().requires_grad_()
    out = fused_matmul_reduce_scatter(ones, ones[:2, :1].expand(2, 3), "avg", 0, world(), bias=bias)
    out.sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [4096.0 * world_size] * 3
    residual = torch.randn(4096, 3).bfloat16().requires_grad_()
    named = {"out_dtype": torch.float32, "residual": residual}
    out = fused_matmul_reduce_scatter(ones, ones[:2, :1].expand(2, 3), "sum", 0, world(), **named)
    out.sum().backward()
    assert residual.grad is not None and residual.grad.dtype == torch.bfloat16 and (residual.grad == 1).all()


@on_ranks(2, device=DEVICES)
def test_under_torch_compile(rank: int, world_size: int) -> None:
    group = world()

    def f(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        _, (x, y) = fused_all_gather_matmul(A.cos(), [B, B + 1], 1, group, return_A=False)
        x = torch.relu(x) * y
        x = fused_matmul_reduce_scatter(x, B.t(), "avg", 1, group, bias=bias, residual=residual.sin())
        return fused_matmul_reduce_scatter(x, B, "sum", 1, group, residual=None) * 2

    def operands(s: int) -> list[torch.Tensor]:
        return [torch.randn(3, s, 8), torch.randn(8, 5), torch.randn(8), torch.randn(3, s, 8)]

    compiled_like_eager(f, operands, (12, 8, 6), 2e-6)


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    op = torch.ops.weft.fused_matmul_reduce_scatter
    A, B, name = torch.randn(4, 6), torch.randn(6, 8), world().group_name
    cases = [
        ({"bias": torch.randn(4)}, 0, ValueError, r"bias: has shape \(4,\), must have \(8,\)"),
        ({"bias": torch.randn(1, 8)}, 0, ValueError, r"bias: has shape \(1, 8\), must have \(8,\)"),
        ({"bias": torch.randn(8)}, 1, ValueError, r"bias: has shape \(8,\), must have \(4,\)"),
        ({"bias": torch.randn(8).half()}, 0, TypeError, "bias: is torch.float16, must be torch.float32"),
        ({"residual": torch.randn(4, 8)}, 0, ValueError, r"residual: has shape \(4, 8\), must have \(2, 8\)"),
        ({"residual": torch.randn(8)}, 0, ValueError, r"residual: has shape \(8,\), must have \(2, 8\)"),
        ({"residual": torch.randn(2, 8).double()}, 0, TypeError, "residual: is torch.float64, must be"),
        ({"bias": torch.randn(8, device="meta")}, 0, ValueError, "bias: lies on meta, must lie on "),
        ({"residual": torch.randn(2, 8, device="meta")}, 0, ValueError, "residual: lies on meta, must "),
    ]
    for given, dim, kind, words in cases:
        with pytest.raises(kind, match=words):
            op(A, B, "sum", dim, name, **given)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (A, B, given))
            with pytest.raises(kind, match=words):
                op(*fakes[:2], "sum", dim, name, **fakes[2])
    for term, (value, kind, words) in product(
        ("bias", "residual"),
        [([1.0], TypeError, "must be a tensor"), (A.to_sparse(), ValueError, "must be strided")],
    ):
        with pytest.raises(kind, match=f"{term}: .*{words}"):
            fused_matmul_reduce_scatter(A, B, "sum", 0, name, **{term: value})  # type: ignore[arg-type]
    bias = torch.randn(8)
    want = sum(gather(A @ B)).chunk(2)[rank] + bias
    check("afterwards", fused_matmul_reduce_scatter(A, B, "sum", 0, name, bias=bias), want, 1e-5)


@on_ranks(2, fresh=True)
def test_the_checked_mode_tells_when_only_some_ranks_have_one(rank: int, world_size: int) -> None:
    symm_mem.set_checked(True)
    A, B, bias = torch.randn(4, 6), same_on_all(6, 8, dtype=torch.float32), torch.randn(8)
    fused_matmul_reduce_scatter(A, B, "sum", 0, world(), bias=bias)  # other numbers on each rank
    with pytest.raises(
        symm_mem.RankMismatch, match=r"bias=float32\[8\].*bias=None|bias=None.*bias=float32\[8\]"
    ):
        fused_matmul_reduce_scatter(A, B, "sum", 0, world(), bias=bias if rank else None)
    residual = torch.randn(2, 8) if rank else None
    with pytest.raises(symm_mem.RankMismatch, match="residual="):
        fused_matmul_reduce_scatter(A, B, "sum", 0, world(), residual=residual)
