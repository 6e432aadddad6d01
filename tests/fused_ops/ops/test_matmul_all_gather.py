"""fused_matmul_all_gather on real processes, against float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from opcommon import BOUND, check, gather, graph_of, poison, refuses, same_on_all, world
from ranks import on_ranks, run_ranks, run_row
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import fused_matmul_all_gather, last_plan
from weft.fused_ops.dispatch.plan import forced

SHAPES = [((5,), 7, 3), ((4, 3), 17, 1), ((1, 1, 6), 8, 16), ((0, 2), 3, 2), ((3,), 0, 4), ((2,), 3, 0)]


def of_all(A: Tensor, B: Tensor) -> Tensor:
    return torch.cat(gather(A.double() @ B.double()), -1)


def right(rank: int, world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    for lead, k, n in SHAPES:
        poison(rank)
        A, B = torch.randn(*lead, k).to(dtype), torch.randn(n, k).to(dtype).t()
        spread = A.new_zeros(*lead, 2 * k)[..., ::2].copy_(A)
        for a, b in ((A, B), (spread, B.contiguous())):
            with nullcontext() if algorithm == "host" else forced(algorithm):
                y = fused_matmul_all_gather(a, b)
            assert y.dtype == dtype and y.is_contiguous()
            check(f"{lead} {k} {n}", y, of_all(A, B), BOUND[dtype])
            if world_size > 1 and y.numel():
                assert last_plan().algorithm == algorithm


@pytest.mark.parametrize("algorithm", ["host", "unfused"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results(world_size: int, algorithm: str) -> None:
    for dtype in BOUND:
        run_row(right, world_size, dtype, algorithm)


@on_ranks(2)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    A, B, name, op = torch.randn(4, 3), torch.randn(3, 6), world().group_name, torch.ops.weft
    before = last_plan()
    for args, kind, words in [
        ((A[0], B, name), ValueError, "A: has 1 dimensions, must have 2 or more"),
        ((A, B[0], name), ValueError, "B: has 1 dimensions, must be a matrix"),
        ((A, B[:2], name), ValueError, "B: has 2 rows, must have 3"),
        ((A.long(), B, name), TypeError, "A: is torch.int64"),
        ((A, B.double(), name), TypeError, "B: is torch.float64"),
        ((A, B, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op.fused_matmul_all_gather, args, kind, words)
    with pytest.raises(TypeError, match="B: is of type list, must be a tensor"):
        fused_matmul_all_gather(A, [B])  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"


#: Rows, K, and columns of a rank: cut by columns, by rows, and with rows that are no multiple of 16 bytes.
ON_GPUS = [(2048, 2048, 33280), (8200, 2048, 8208), (3001, 2048, 20003)]


def on_gpus(rank: int, world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    for m, k, n in ON_GPUS:
        A, B = same_on_all(m, k).to(dtype), torch.randn(n, k).to(dtype).t()
        want = torch.cat(gather(A.double() @ B.double()), -1)
        with forced(algorithm):
            for _ in range(3):
                poison(rank)
                y = fused_matmul_all_gather(A, B)
                assert last_plan().algorithm == algorithm
                check(f"{m} {k} {n}", y, want, BOUND[dtype])
    symm_mem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["copy_engine", "one_shot"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world_size", [2, 4])
def test_kernels(world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    run_ranks(on_gpus, world_size, dtype, algorithm, device="cuda")


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda", fresh=True)
def test_replays_of_graphs_between_eager_calls(rank: int, world_size: int) -> None:
    """Small integers, so that every product is exact."""
    A, B = torch.zeros(2048, 4096).bfloat16(), torch.randint(-1, 2, (4096, 16640)).bfloat16()

    def call() -> Tensor:
        with forced("copy_engine"):
            return fused_matmul_all_gather(A, B)

    call()
    graph, y = graph_of(call)
    for step in range(4):
        torch.manual_seed(step)
        A.copy_(torch.randint(-1, 2, A.shape))
        want = torch.cat(gather((A.float() @ B.float()).bfloat16()), -1)
        graph.replay()
        assert torch.equal(y, want) and torch.equal(call(), want)
    symm_mem.check()
