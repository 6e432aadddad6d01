"""fused_all_gather_scaled_matmul and fused_scaled_matmul_reduce_scatter between CPU ranks, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcommon import assert_fused, check, gather, poison, refuses, world
from ranks import on_ranks, run_row
from scaled_operands import E4M3, E5M2, KINDS, ROUNDED, left, right
from torch.utils.flop_counter import FlopCounterMode
from torch_versions import ROW_WISE_PRODUCTS
from weft.fused_ops import fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter, last_plan
from weft.fused_ops.dispatch.plan import forced

DTYPES = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
OUTS = (torch.bfloat16, torch.float16, torch.float32)
# A_shard and gather_dim.
GATHERED = (
    ((5, 272), 0),
    ((1, 16), 0),
    ((3, 4, 144), 1),
    ((2, 3, 2, 32), -2),
    ((7, 128), -1),
    ((2, 3, 256), 2),
    ((0, 32), 0),
)
# World size, row of a table, scales, dtypes: of a row's scales each world size has other dtypes.
CELLS = [
    (size, row, kind, DTYPES[(size + row + k) % len(DTYPES)])
    for size in (1, 2, 3)
    for row in range(len(GATHERED))
    for k, kind in enumerate(KINDS)
]


def of(*parts: torch.Tensor) -> list[torch.Tensor]:
    return list(parts)


def gathers(
    rank: int, size: int, shape: tuple[int, ...], dim: int, kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    last = dim % len(shape) == len(shape) - 1
    if kind == "blocks" and shape[-1] <= 128 and last:
        return  # not to be told from row-wise scales, which a B of two blocks does not go with
    for algorithm in ("fused", "unfused"):
        poison(rank)
        a = left(kind, *shape, dtype=dtypes[0])
        k = shape[-1] * (size if last else 1)
        bs = [right(kind, k, n, dtype=dtypes[1]) for n in (48, 144)]
        bias = torch.randn(144).half()
        given = [b.numbers for b in bs], a.scale, [b.scale for b in bs], dim, world(), [None, bias]
        outs = torch.float32, torch.float16
        with forced(algorithm):
            A, ys = fused_all_gather_scaled_matmul(a.numbers, *given, out_dtypes=outs)
            none, again = fused_all_gather_scaled_matmul(
                a.numbers, *given, out_dtypes=outs, use_fast_accum=[True, False], return_A=False
            )
        if size > 1 and a.numbers.numel():
            assert last_plan().algorithm == ("host" if algorithm == "fused" else "unfused")
        whole, meant = torch.cat(gather(a.numbers.float()), dim), torch.cat(gather(a.meant), dim)
        assert A.dtype == a.numbers.dtype and torch.equal(A.double(), whole) and none is None
        for i, (y, b) in enumerate(zip(ys, bs, strict=True)):
            assert y.dtype == outs[i] and torch.equal(y, again[i]), "other bits in another run"
            want = meant @ b.meant + (bias.double() if i else 0)
            check(f"{shape} {dim} {kind} {algorithm} {i}", y, want, ROUNDED[outs[i]])


@pytest.mark.parametrize(("world_size", "row", "kind", "dtypes"), CELLS)
def test_all_gather_scaled_matmul(
    world_size: int, row: int, kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    run_row(gathers, world_size, *GATHERED[row], kind, dtypes)


def scattered(w: int) -> list[tuple[tuple[int, ...], int, int, tuple[int, ...] | None]]:
    """A, columns of B, scatter_dim, output_shape."""
    return [
        ((5 * w, 272), 48, 0, None),
        ((w, 16), 16, -2, None),
        ((3, 2 * w, 144), 144, 1, None),
        ((2 * w, 3, 32), 16, 0, None),
        ((5, 256), 48 * w, -1, None),
        ((6 * w, 32), 32, 1, (3, 2 * w, 32)),
        ((0, 32), 16, 0, None),
    ]


def scatters(
    rank: int, size: int, row: tuple[Any, ...], kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shape, n, dim, output_shape = row
    for algorithm, reduce_op, out in (("fused", "sum", torch.bfloat16), ("unfused", "avg", torch.float32)):
        for out_dtype in (out, torch.float16):
            poison(rank)
            a, b = left(kind, *shape, dtype=dtypes[0]), right(kind, shape[-1], n, dtype=dtypes[1])
            bias = torch.randn(n).to(out_dtype) if out_dtype != torch.float32 else None
            args: Any = (a.numbers, b.numbers, a.scale, b.scale, reduce_op, dim, world())
            call = fused_scaled_matmul_reduce_scatter
            if output_shape:  # the op has it, as torch's has
                args = *args[:6], 0, world().group_name, output_shape
                call = torch.ops.weft.fused_scaled_matmul_reduce_scatter
            with forced(algorithm):
                y = call(*args, bias=bias, out_dtype=out_dtype)
                again = call(*args, bias=bias, out_dtype=out_dtype)
            scale = size if reduce_op == "avg" else 1
            partial = (a.meant @ b.meant + (0 if bias is None else bias.double())) / scale
            parts = [p.chunk(size, dim)[rank] for p in gather(partial.view(output_shape or partial.shape))]
            if y.numel() and size > 1:
                assert last_plan().algorithm == ("host" if algorithm == "fused" else "unfused")
                assert algorithm == "unfused" or torch.equal(y, again), "other bits in another run"
            assert y.dtype == out_dtype and y.is_contiguous()
            what = f"{shape} {n} {dim} {kind} {algorithm} {out_dtype}"
            check(what, y, sum(parts), ROUNDED[out_dtype], parts)


@pytest.mark.parametrize(("world_size", "row", "kind", "dtypes"), CELLS)
def test_scaled_matmul_reduce_scatter(
    world_size: int, row: int, kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    run_row(scatters, world_size, scattered(world_size)[row], kind, dtypes)


@on_ranks(2)
def test_no_further_from_float64_than_torch(rank: int, size: int) -> None:
    """No further from float64 than ``torch._scaled_mm`` of the same operands; NaN and infinite numbers where it has
    them."""
    for kind in ("tensor", "rows") if ROW_WISE_PRODUCTS else ("tensor",):
        a, b = left(kind, 7, 160, dtype=E5M2), right(kind, 160, 32)
        for dtype in OUTS:
            _, (y,) = fused_all_gather_scaled_matmul(
                a.numbers, [b.numbers], a.scale, [b.scale], 0, world(), out_dtypes=[dtype]
            )
            assert_fused()
            scales = [x.double().float() for x in gather(a.scale)]
            scale = scales[0] if kind == "tensor" else torch.cat(scales)
            whole = torch.cat(gather(a.numbers.float())).to(E5M2)
            scale_b = b.scale.reshape(()) if kind == "tensor" else b.scale
            torchs = torch._scaled_mm(whole, b.numbers, scale, scale_b, out_dtype=dtype)
            want = torch.cat(gather(a.meant)) @ b.meant
            error, of_torch = ((x.double() - want).norm() / want.norm() for x in (y, torchs))
            assert error <= 1.05 * of_torch + 1e-7, (kind, dtype, error, of_torch)
    numbers = torch.randn(7, 160)
    numbers[0, 3], numbers[1, 5], numbers[2, 7], numbers[3] = torch.nan, torch.inf, -torch.inf, 448.0
    a, one = numbers.to(E5M2), torch.ones(1)
    b = right("tensor", 160, 32).numbers
    _, (y,) = fused_all_gather_scaled_matmul(a, [b], one, [one], 0, world(), out_dtypes=[torch.float16])
    torchs = torch._scaled_mm(a, b, one, one, out_dtype=torch.float16)
    torch.testing.assert_close(y.chunk(size)[rank], torchs, rtol=1e-3, atol=1e-2, equal_nan=True)
    assert y[0].isnan().all() and not y[4:7].isnan().any()
    z = fused_scaled_matmul_reduce_scatter(*(a[:6], b, one, one, "sum", 0, world()), out_dtype=torch.float16)
    assert z.isnan()[0].all() == (rank == 0)


@on_ranks(3)
def test_sums_in_float32_in_rank_order(rank: int, size: int) -> None:
    """Scales that a sum in another order, or in 16 bits, would show: 1e8 - 1e8 + 1 is 1 in rank order."""
    scale = torch.tensor({0: 1e8, 1: -1e8, 2: 1.0}[rank])
    a, b, one = torch.zeros(3, 16), torch.zeros(16, 16), torch.ones(())
    a[:, 0] = b[:, 0] = 1
    a, b = a.to(E4M3), b.to(E4M3).t()
    z = fused_scaled_matmul_reduce_scatter(a, b, scale, one, "sum", 0, world(), out_dtype=torch.float32)
    assert z.unique().tolist() == [1.0]
    # The own part is not rounded: 257 is no bfloat16, and the others' parts leave 1 of it.
    part = torch.zeros(3, 16)
    part[:, 0], part[rank, 0], part[rank, 1] = -128.0, 256.0, 1.0
    ones = torch.ones(16, 16).to(E4M3).t()
    z = fused_scaled_matmul_reduce_scatter(
        part.to(E4M3), ones, one, one, "sum", 0, world(), out_dtype=torch.bfloat16
    )
    assert z.unique().tolist() == [1.0]
    wide = torch.tensor([[1.0], [2.0], [4.0]]) * 10**rank  # of this rank's part along K
    _, (y,) = fused_all_gather_scaled_matmul(
        *(a, [torch.cat([b] * size).t().contiguous().t()], wide, [torch.ones(1, 16)], 1, world())
    )
    assert y[:, 0].tolist() == [111.0, 222.0, 444.0]


@on_ranks(2)
def test_other_scales(rank: int, size: int) -> None:
    """Row-wise scales that every rank has for all rows, and scales as torch pads them."""
    a, b = left("rows", 3, 5, 272), right("rows", 272, 32)
    every = torch.cat([s.float() for s in gather(a.scale)], 1)
    _, (want,) = fused_all_gather_scaled_matmul(a.numbers, [b.numbers], a.scale, [b.scale], 1, world())
    for algorithm in ("fused", "unfused"):
        with forced(algorithm):
            _, (y,) = fused_all_gather_scaled_matmul(a.numbers, [b.numbers], every, [b.scale], 1, world())
        torch.testing.assert_close(y, want, rtol=0, atol=0)
    a, b = left("rows", 1, 32), right("rows", 32, 16)
    for algorithm in ("fused", "unfused"):  # one number, of which the stride may be any
        scale = torch.stack([a.scale, a.scale], -1)[..., 0]
        with forced(algorithm):
            _, (y,) = fused_all_gather_scaled_matmul(a.numbers, [b.numbers], scale, [b.scale], 0, world())
        check("one row", y, torch.cat(gather(a.meant)) @ b.meant, ROUNDED[torch.bfloat16])
    a, b = left("blocks", 2 * size, 272), right("blocks", 272, 144)
    padded = torch.cat([b.scale, torch.full((1, 2), torch.nan)])
    args = (a.numbers, b.numbers, a.scale), ("sum", 0, world())
    want = fused_scaled_matmul_reduce_scatter(*args[0], b.scale, *args[1])
    assert torch.equal(fused_scaled_matmul_reduce_scatter(*args[0], padded, *args[1]), want)
    a, b = left("rows", 2 * size, 64), right("blocks", 64, 144)  # one block of K
    y = fused_scaled_matmul_reduce_scatter(a.numbers, b.numbers, a.scale, b.scale, "sum", 0, world())
    parts = [p.chunk(size)[rank] for p in gather(a.meant @ b.meant)]
    check("one block", y, sum(parts), ROUNDED[torch.bfloat16], parts)


@on_ranks(2)
def test_what_is_refused(rank: int, size: int) -> None:
    a, b = left("rows", 4, 32), right("rows", 32, 48)
    good = [
        a.numbers,
        [b.numbers],
        a.scale,
        [b.scale],
        0,
        world().group_name,
        [None],
        [None],
        [None],
        [False],
    ]
    op = torch.ops.weft.fused_all_gather_scaled_matmul
    half, rows = torch.zeros(4, 32).half(), b.numbers.contiguous()
    for at, value, kind, words in (
        (0, half, TypeError, "A_shard: is torch.float16, must be torch.float8_e4m3fn or"),
        (0, left("rows", 4, 40).numbers, ValueError, "A_shard: its last size, K, is 40, must be a multiple"),
        (0, a.numbers[0], ValueError, "A_shard: has 1 dimensions"),
        (1, [rows], ValueError, r"Bs\[0\]: has strides .* must be column-major"),
        (1, [], ValueError, "Bs: is empty"),
        (1, [right("rows", 48, 48).numbers], ValueError, r"Bs\[0\]: has 48 rows, must have 32"),
        (1, [right("rows", 32, 40).numbers], ValueError, "N, is 40, must be a multiple of 16"),
        (2, a.scale.double(), TypeError, "A_scale: is torch.float64, must be torch.float32"),
        (2, torch.ones(3, 1), ValueError, r"A_scale: has shape \(3, 1\), must have one element, or \(4, 1\)"),
        (2, torch.ones(()), ValueError, r"B_scales\[0\]: has shape \(1, 48\), must have one element"),
        (3, [torch.ones(())], ValueError, r"B_scales\[0\]: has shape \(\), must have \(1, 48\), one for"),
        (3, [], ValueError, "B_scales: has 0 elements, must have 1, as many as Bs"),
        (4, 2, ValueError, "gather_dim: is 2, must be from -2 to 1"),
        (6, [torch.zeros(48)], TypeError, r"biases\[0\]: is torch.float32, must be torch.bfloat16"),
        (6, [torch.zeros(47).bfloat16()], ValueError, r"biases\[0\]: has shape \(47,\), must have \(48,\)"),
        (7, [torch.zeros(2)], ValueError, r"result_scales\[0\]: is torch.float32 of shape \(2,\)"),
        (8, [E4M3], TypeError, r"out_dtypes\[0\]: is .*, must be torch.bfloat16, torch.float16 or"),
        (9, [], ValueError, "use_fast_accum: has 0 elements"),
    ):
        refuses(op, (*good[:at], value, *good[at + 1 :]), kind, words)
    two = left("rows", 4, 32, dtype=E5M2).numbers, [right("rows", 32, 48, dtype=E5M2).numbers]
    refuses(op, (*two, *good[2:]), TypeError, "must be torch.float8_e4m3fn: one of both must")
    good = [a.numbers, b.numbers, a.scale, b.scale, "sum", 0, 0, world().group_name, None]
    op = torch.ops.weft.fused_scaled_matmul_reduce_scatter
    for at, value, kind, words in (
        (1, rows, ValueError, "B: has strides"),
        (2, torch.ones(8, 1), ValueError, "A_scale: has shape"),
        (4, "max", ValueError, "reduce_op: is 'max'"),
        (5, 2, ValueError, "orig_scatter_dim: is 2, must be from -2 to 1"),
        (6, 3, ValueError, "scatter_dim_after_maybe_reshape: is 3"),
        (8, [3, 48], ValueError, r"output_shape: is \[3, 48\], must be of 4 rows"),
    ):
        refuses(op, (*good[:at], value, *good[at + 1 :]), kind, words)
    with pytest.raises(ValueError, match="group_size: is 7, must be 2, the number of ranks of group"):
        op(*good, group_size=7)
    odd = left("rows", 3, 32)
    refuses(op, (odd.numbers, b.numbers, odd.scale, *good[3:]), ValueError, "must be a multiple of 2 ranks")
    scatter = fused_scaled_matmul_reduce_scatter
    given = (odd.numbers, b.numbers, odd.scale, b.scale, "sum")
    refuses(scatter, (*given, 0), ValueError, "^scatter_dim: A @ B has size 3 there, must be a multiple of 2")
    refuses(scatter, (*given, 2), ValueError, "^scatter_dim: is 2, must be from -2 to 1")
    for call in (
        lambda x: fused_all_gather_scaled_matmul(a.numbers, [b.numbers], x, [b.scale], 0, world()),
        lambda x: fused_scaled_matmul_reduce_scatter(a.numbers, b.numbers, x, b.scale, "sum", 0, world()),
    ):
        with pytest.raises(ValueError, match=r"^A_scale: requires a gradient, must not"):
            call(a.scale.clone().requires_grad_())
    with pytest.raises(TypeError, match="biases: is of type Tensor, must be a list"):
        fused_all_gather_scaled_matmul(a.numbers, [b.numbers], a.scale, [b.scale], 0, world(), torch.ones(1))


@on_ranks(2)
def test_opcheck_compile_and_flops(rank: int, size: int) -> None:
    for kind in KINDS:
        a, b = left(kind, 2 * size, 144), right(kind, 144, 32)
        name, bias = world().group_name, torch.randn(32).bfloat16()
        gathered = (
            a.numbers,
            [b.numbers],
            a.scale,
            [b.scale],
            0,
            name,
            [bias],
            [None],
            [torch.bfloat16],
            [False],
        )
        added = (a.numbers, b.numbers, a.scale, b.scale, "sum", 0, 0, name, None, bias)
        for op, args in (
            (torch.ops.weft.fused_all_gather_scaled_matmul.default, gathered),
            (torch.ops.weft.fused_scaled_matmul_reduce_scatter.default, added),
        ):
            # Not test_schema: it compares operands by a function that torch does not have for fp8 on CPU.
            torch.library.opcheck(op, args, test_utils=("test_autograd_registration", "test_faketensor"))
            with torch._subclasses.FakeTensorMode() as fake:
                made = op(*torch.utils._pytree.tree_map_only(torch.Tensor, fake.from_tensor, args))
            found = op(*args)
            for x, y in zip(*map(torch.utils._pytree.tree_leaves, (made, found)), strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)

        def pair(x: torch.Tensor, s: torch.Tensor, b=b, a=a, kind=kind) -> torch.Tensor:
            _, (y,) = fused_all_gather_scaled_matmul(
                x, [b.numbers], s, [b.scale], 0, world(), use_fast_accum=[True]
            )
            z = fused_scaled_matmul_reduce_scatter(x, b.numbers, s, b.scale, "sum", 0, world())
            return y.float().sum(0) + z.float().sum()

        torch._dynamo.reset()
        backend = "inductor" if kind == KINDS[0] else "aot_eager"
        y = torch.compile(pair, backend=backend, fullgraph=True)(a.numbers, a.scale)
        torch.testing.assert_close(y, pair(a.numbers, a.scale), rtol=1e-5, atol=1e-4)
        with FlopCounterMode(display=False) as flops:
            pair(a.numbers, a.scale)
        assert flops.get_total_flops() == 2 * (size + 1) * 2 * size * 144 * 32
