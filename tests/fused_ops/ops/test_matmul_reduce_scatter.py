"""fused_matmul_reduce_scatter on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
from opcommon import BOUND, DEVICES, assert_fused, cells, check, gather, poison, refuses, world
from ranks import on_ranks, run_row
from references import held
from weft.fused_ops import fused_matmul_reduce_scatter
from weft.fused_ops.dispatch.plan import forced


def shapes(w: int) -> list[tuple[tuple[int, ...], int, int]]:
    """A, columns of B, scatter_dim."""
    return [
        ((5 * w, 7), 11, 0),
        ((w, 16), 1, -2),
        ((6, 3), 4 * w, 1),
        ((2, 3 * w, 6), 10, 1),
        ((1, 3 * w, 6), 10, 1),
        ((2 * w, 4, 5), 6, 0),
        ((3, 4, 5), 2 * w, -1),
        ((2, 3, 2 * w, 5), 7, 2),
        ((0, 7), 4, 0),
        ((4 * w, 0), 3, 0),
        ((65 * w, 257), 130, 0),
        ((70 * w, 264), 136, 0),
        ((3, 70 * w, 64), 72, 1),
    ]


ROWS = [(row,) for row in range(len(shapes(1)))]


def right(rank: int, world_size: int, shape: tuple[int, ...], n: int, dim: int, dtype: torch.dtype) -> None:
    for reduce_op in ("sum", "avg"):
        poison(rank)
        given = {"A": torch.randn(*shape).to(dtype), "B": torch.randn(shape[-1], n).to(dtype)}
        given |= {"reduce_op": reduce_op, "scatter_dim": dim, "group": world()}
        with forced("fused"):
            out = held(fused_matmul_reduce_scatter, **given)
            again = fused_matmul_reduce_scatter(**given)
        if out.numel() and world_size > 1:
            assert_fused()
        assert out.dtype == dtype and out.is_contiguous()
        assert torch.equal(out, again), "other bits in another run"


@pytest.mark.parametrize(("world_size", "device", "row", "dtype"), cells([1, 2, 3, 4], ROWS))
def test_fused_matmul_reduce_scatter(world_size: int, device: str, row: int, dtype: torch.dtype) -> None:
    run_row(right, world_size, *shapes(world_size)[row], dtype, device=device)


@on_ranks(3)
def test_sums_in_float32_in_rank_order(rank: int, world_size: int) -> None:
    """The sum is in float32 and in rank order: 1e8 - 1e8 + 1 is 1 in that order, and 0 from the last rank on."""
    value = {0: 1e8, 1: -1e8, 2: 1.0}[rank]
    A = torch.full((3, 1), value)
    out = fused_matmul_reduce_scatter(A, torch.ones(1, 2), "sum", 0, world())
    assert out.flatten().tolist() == [1.0, 1.0]
    # bfloat16 parts are summed in float32: 256 + 1 is no bfloat16, 256 + 1 + 1 is one.
    A = torch.full((3, 1), {0: 256.0, 1: 1.0, 2: 1.0}[rank], dtype=torch.bfloat16)
    out = fused_matmul_reduce_scatter(A, torch.ones(1, 2, dtype=torch.bfloat16), "sum", 0, world())
    assert out.flatten().tolist() == [258.0, 258.0]
    # The own part is not rounded: 257 is no bfloat16, and the others' parts leave 1 of it.
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        A = torch.tensor([[-large / 2, 0.0]] * 3, dtype=dtype)
        A[rank] = torch.tensor([large, 1.0])
        out = fused_matmul_reduce_scatter(A, torch.ones(2, 4, dtype=dtype), "sum", 0, world())
        assert out.flatten().tolist() == [1.0] * 4


def wide(rank: int, world_size: int, shape: tuple[int, ...], n: int, dim: int, dtype: torch.dtype) -> None:
    """A float32 result of 16-bit operands: parts are rounded as they were, their sum is not."""
    for algorithm in ("fused", "unfused"):
        poison(rank)
        given = {"A": torch.randn(*shape).to(dtype), "B": torch.randn(shape[-1], n).to(dtype)}
        given |= {"reduce_op": "sum", "scatter_dim": dim, "group": world()}
        with forced(algorithm):
            out = held(fused_matmul_reduce_scatter, **given, out_dtype=torch.float32)
        assert out.dtype == torch.float32 and out.is_contiguous()
        if out.numel() >= 64 and world_size > 1:
            assert not torch.equal(out, out.to(dtype).float()), f"the sum is rounded, {shape} {dim} {dtype}"
        assert fused_matmul_reduce_scatter(**given, out_dtype=dtype).dtype == dtype


@on_ranks([1, 2, 3], device=DEVICES)
def test_gradients_of_a_wider_result(rank: int, world_size: int) -> None:
    A, B = (torch.randn(*s).bfloat16().requires_grad_() for s in ((4 * world_size, 8), (8, 5)))
    out = fused_matmul_reduce_scatter(A, B, "sum", 0, world(), out_dtype=torch.float32)
    weight = torch.randn(out.shape).bfloat16().float()
    (out * weight).sum().backward()
    grad = torch.cat(gather(weight))
    check("A.grad", A.grad, grad @ B.detach().double().t(), BOUND[torch.bfloat16])
    check("B.grad", B.grad, A.detach().double().t() @ grad, BOUND[torch.bfloat16])


@pytest.mark.parametrize(
    ("world_size", "device", "row", "dtype"), cells([1, 2, 3], ROWS, [torch.bfloat16, torch.float16])
)
def test_a_wider_result(world_size: int, device: str, row: int, dtype: torch.dtype) -> None:
    run_row(wide, world_size, *shapes(world_size)[row], dtype, device=device)


@pytest.mark.parametrize(("shape", "n", "dim"), [row for row in shapes(2) if 0 not in row[0]])
@on_ranks(2, device=DEVICES)
def test_any_strides_in_contiguous_out(
    rank: int, world_size: int, shape: tuple[int, ...], n: int, dim: int
) -> None:
    A = torch.randn(*[2 * s for s in shape])[tuple(slice(0, 2 * s, 2) for s in shape)]
    B = torch.randn(n, shape[-1]).t()
    products = [a @ b for a, b in zip(gather(A), gather(B), strict=True)]
    parts = [p.chunk(world_size, dim)[rank] for p in products]
    outs = []
    for algorithm in ("fused", "unfused"):
        with forced(algorithm):
            outs.append(fused_matmul_reduce_scatter(A, B, "sum", dim, world().group_name))
        check(f"{shape} {dim} {algorithm}", outs[-1], sum(parts), 1e-6, parts)
    with torch._subclasses.FakeTensorMode() as fake:
        fake_out = torch.ops.weft.fused_matmul_reduce_scatter(
            fake.from_tensor(A), fake.from_tensor(B), "sum", dim, world().group_name
        )
    for out in outs:
        assert out.shape == fake_out.shape and out.stride() == fake_out.stride()


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    op = torch.ops.weft.fused_matmul_reduce_scatter
    A, B, name = torch.randn(4, 6), torch.randn(6, 5), world().group_name
    cases = [
        ((torch.randn(6), B, "sum", 0, name), ValueError, "A: has 1 dimensions"),
        ((A, torch.randn(6), "sum", 0, name), ValueError, "B: has 1 dimensions"),
        ((A, torch.randn(7, 5), "sum", 0, name), ValueError, "B: has 7 rows, must have 6"),
        ((A, B.half(), "sum", 0, name), TypeError, "B: is torch.float16"),
        ((A.long(), B.long(), "sum", 0, name), TypeError, "A: is torch.int64"),
        ((A, B, "max", 0, name), ValueError, "reduce_op: is 'max', must be 'sum' or 'avg'"),
        ((A, B, "sum", 2, name), ValueError, "scatter_dim: is 2"),
        ((A, B, "sum", 1, name), ValueError, "scatter_dim: A @ B has size 5 there, must be a multiple of 2"),
        ((torch.randn(3, 6), B, "sum", 0, name), ValueError, "size 3 there"),
        ((A, B, "sum", 0, "nobody"), ValueError, "group: no process group is named"),
    ]
    for args, kind, words in cases:
        refuses(op, args, kind, words)
    for out_dtype, words in (
        (torch.float16, "out_dtype: is torch.float16, must be torch.float32 like A, or float32"),
        ("float32", "out_dtype: is 'float32', must be a torch.dtype"),
    ):
        with pytest.raises(TypeError, match=words):
            fused_matmul_reduce_scatter(A, B, "sum", 0, name, out_dtype=out_dtype)  # type: ignore[arg-type]
    want = sum(gather(A @ B)).chunk(2)[rank]
    check("afterwards", fused_matmul_reduce_scatter(A, B, "sum", 0, name), want, 1e-5)
