"""fused_matmul_all_reduce on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
from opcommon import DEVICES, assert_alike, assert_fused, cells, poison, refuses, world
from ranks import on_ranks
from references import held
from weft.fused_ops import fused_matmul_all_reduce
from weft.kernels.matmul_reduce_scatter.configs import MatmulReduceScatterProblem, sum_to_all_is_profitable

SHAPES = [
    ((5, 7), 11),
    ((1, 16), 1),
    ((2, 3, 6), 10),
    ((0, 7), 4),
    ((4, 0), 3),
    ((3, 0, 5), 2),
    ((65, 257), 130),
    ((3, 70, 64), 72),
]


@pytest.mark.parametrize(("world_size", "device", "shape", "n", "dtype"), cells([1, 2, 3, 4], SHAPES))
@on_ranks(None, device=None)
def test_fused_matmul_all_reduce(
    rank: int, world_size: int, shape: tuple[int, ...], n: int, dtype: torch.dtype
) -> None:
    for reduce_op in ("sum", "avg"):
        poison(rank)
        given = {"A": torch.randn(*shape).to(dtype), "B": torch.randn(shape[-1], n).to(dtype)}
        given |= {"reduce_op": reduce_op, "group": world()}
        out = held(fused_matmul_all_reduce, **given)
        if out.numel() and world_size > 1:
            assert_fused()
        assert out.dtype == dtype and out.is_contiguous()
        assert_alike(out)
        assert torch.equal(out, fused_matmul_all_reduce(**given)), "other bits in another run"


@on_ranks(3)
def test_own_parts_are_not_rounded(rank: int, world_size: int) -> None:
    """The own part is not rounded before it is summed: 257 is no bfloat16, and the others leave 1 of it."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        A = torch.tensor([[-large / 2, 0.0]] * 3, dtype=dtype)
        A[rank] = torch.tensor([large, 1.0])  # of three rows each rank sums one
        out = fused_matmul_all_reduce(A, torch.ones(2, 4, dtype=dtype), "sum", world())
        assert out.flatten().tolist() == [1.0] * 12


@on_ranks(3, device=DEVICES)
def test_any_strides(rank: int, world_size: int) -> None:
    base, weight = torch.randn(6, 5, 9), torch.randn(12, 9)
    for A in (base.transpose(0, 1), base[::2, 1:], base[0]):
        held(fused_matmul_all_reduce, A=A, B=weight.t(), reduce_op="sum", group=world())


@on_ranks(1, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    A, B, name = torch.randn(4, 8), torch.randn(8, 2), world().group_name
    for args, kind, words in [
        ((A.double(), B, "sum", name), TypeError, "A: is torch.float64, must be float32"),
        ((A[0], B, "sum", name), ValueError, "A: has 1 dimensions, must have 2 or more"),
        ((A, torch.randn(8), "sum", name), ValueError, r"B: has 1 dimensions, must be a matrix \[K, N\]"),
        ((A, B[:7], "sum", name), ValueError, "B: has 7 rows, must have 8"),
        ((A, B.half(), "sum", name), TypeError, "B: is torch.float16, must be torch.float32"),
        ((A, B, "max", name), ValueError, "reduce_op: is 'max', must be 'sum' or 'avg'"),
        ((A, B, "sum", "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(torch.ops.weft.fused_matmul_all_reduce, args, kind, words)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_choice(world_size: int) -> None:
    """One kernel for large products; cuBLAS and an all-reduce for decoding. Its workspace has a limit."""

    def is_profitable(m: int, n: int, k: int) -> bool:
        sizes = m, n, k // world_size, world_size, 132
        return sum_to_all_is_profitable(MatmulReduceScatterProblem(*sizes, to_all=True))

    for n, k in ((4096, 4096), (4096, 14336), (8192, 8192)):
        assert not is_profitable(16, n, k)
        assert is_profitable(4096, n, k)
    assert not is_profitable(1 << 17, 8192, 8192)
