"""Scaled matmuls on CUDA without a GPU: what the slow path launches, and that the fast path launches the same."""

from __future__ import annotations

from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import NAME, WORLD_SIZE, Stage, run_on_cuda
from scaled_operands import E4M3, KINDS, left, right
from weft.fused_ops import ops
from weft.fused_ops.dispatch import plan
from weft.fused_ops.ops import all_gather_scaled_matmul, scaled_matmul_reduce_scatter
from weft.fused_ops.ops.all_gather_scaled_matmul import AllGatherScaledMatmulCall
from weft.fused_ops.ops.op import tensors_given
from weft.fused_ops.ops.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatterCall

stage = fake_gpu.stage
BF16 = torch.bfloat16


def gather_call(kind: str, **named: Any) -> AllGatherScaledMatmulCall:
    a, bs = left(kind, 512, 272), [right(kind, 272, n) for n in (144, 48)]
    bias = torch.zeros(48, dtype=BF16)
    given = a.numbers, [b.numbers for b in bs], a.scale, [b.scale for b in bs], 0, NAME
    return AllGatherScaledMatmulCall(
        *given, [None, bias], [None, None], [None, None], [True, True], **{"return_A": False} | named
    )


def scatter_call(kind: str, **named: Any) -> ScaledMatmulReduceScatterCall:
    a, b = left(kind, 512 * WORLD_SIZE, 272), right(kind, 272, 144)
    given = a.numbers, b.numbers, a.scale, b.scale, "sum", 0, 0, NAME, None
    return ScaledMatmulReduceScatterCall(*given, **named)


def first_gather(stage: Stage, call: AllGatherScaledMatmulCall) -> Any:
    call, rows, _ = ops.ALL_GATHER_SCALED_MATMUL.validate(call)
    return run_on_cuda(all_gather_scaled_matmul, stage.where, call, rows)


def first_scatter(stage: Stage, given: ScaledMatmulReduceScatterCall) -> Any:
    call, rows, _ = ops.SCALED_MATMUL_REDUCE_SCATTER.validate(given)
    return run_on_cuda(scaled_matmul_reduce_scatter, stage.where, call, rows, given=given)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gather_is_launched_again(kind: str, return_A: bool, stage: Stage) -> None:
    call = gather_call(kind, return_A=return_A)
    with plan.forced("fused"):
        A, outs = first_gather(stage, call)
        again = ops.ALL_GATHER_SCALED_MATMUL.fast(call)
    assert again is not None and [y.dtype for y in again[1]] == [BF16, BF16]
    assert (A is None) == (again[0] is None) == (not return_A)
    if return_A:
        assert again[0].dtype == A.dtype == E4M3 and again[0].shape == A.shape == (1024, 272)
    assert [y.shape for y in again[1]] == [y.shape for y in outs] == [(1024, 144), (1024, 48)]
    assert [y.stride() for y in again[1]] == [y.stride() for y in outs]
    (_, operands, *_), (_, same, results, *_) = stage.launched
    assert operands == same == [x.data_ptr() for x in tensors_given(call)]
    assert results == [y.data_ptr() for y in (*again[1], *([again[0]] if return_A else []))]


def test_copied_products_are_called_again(stage: Stage) -> None:
    """They say themselves that they begin, on either path."""
    call = gather_call("rows")
    with plan.forced("copy_engine"):
        _, outs = first_gather(stage, call)
        assert plan.last_plan().algorithm == "copy_engine"
        again = ops.ALL_GATHER_SCALED_MATMUL.fast(call)
    assert again is not None and [y.shape for y in again[1]] == [y.shape for y in outs]
    (_, operands, *_), (_, same, results, *_) = stage.launched
    assert operands == same == [x.data_ptr() for x in tensors_given(call)]
    assert results == [y.data_ptr() for y in again[1]] and stage.workspace.noted == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_scatter_is_launched_again(kind: str, stage: Stage) -> None:
    call = scatter_call(kind, bias=torch.zeros(144, dtype=BF16), use_fast_accum=kind != "rows")
    with plan.forced("fused"):
        out = first_scatter(stage, call)
        again = ops.SCALED_MATMUL_REDUCE_SCATTER.fast(call)
    assert again is not None and (again.shape, again.dtype) == (out.shape, out.dtype) == ((512, 144), BF16)
    (_, operands, *_), (_, same, results, *_) = stage.launched
    assert operands == same == [x.data_ptr() for x in tensors_given(call)]
    assert results == [again.data_ptr()]


def test_what_differs_is_not_launched(stage: Stage) -> None:
    gather, scatter = gather_call("rows"), scatter_call("rows")
    with plan.forced("fused"):
        first_gather(stage, gather)
        first_scatter(stage, scatter)
        one = torch.ones(1)
        for other in (
            gather._replace(return_A=True),
            gather._replace(out_dtypes=[torch.float16, torch.float16]),
            gather._replace(use_fast_accum=[True, False]),
            gather._replace(biases=[None, None]),
            gather._replace(result_scales=[one, None]),
            gather._replace(A_scale=torch.ones(1024, 1)),
            gather._replace(A_shard=gather.A_shard[1:]),
        ):
            assert ops.ALL_GATHER_SCALED_MATMUL.fast(other) is None
        for others in (
            scatter._replace(reduce_op="avg"),
            scatter._replace(out_dtype=torch.float16),
            scatter._replace(use_fast_accum=True),
            scatter._replace(output_shape=[2, 512, 144]),
            scatter._replace(result_scale=one),
            scatter._replace(bias=torch.zeros(144, dtype=BF16)),
        ):
            assert ops.SCALED_MATMUL_REDUCE_SCATTER.fast(others) is None
        assert ops.ALL_GATHER_SCALED_MATMUL.fast(gather._replace(out_dtypes=[15, 15])) is not None
    assert len(stage.launched) == 3


def test_torchs_product_with_scales_of_blocks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has one, few rows go in one shot before it."""
    a, b = left("blocks", 512, 4096), right("blocks", 4096, 3072)
    given = a.numbers, [b.numbers], a.scale, [b.scale], 0, NAME, [None], [None], [None], [False], False
    call = AllGatherScaledMatmulCall(*given)
    monkeypatch.setattr(all_gather_scaled_matmul, "has_block_product", lambda rows, *_: rows == 1024)
    first_gather(stage, call)
    assert plan.last_plan().algorithm == "one_shot"
    assert ops.ALL_GATHER_SCALED_MATMUL.fast(call) is not None


def test_blocks_that_torch_multiplies_faster(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered by the group's own collective, if in one shot would be too much."""
    a, b = torch.zeros(4096, 16384, dtype=E4M3), torch.zeros(4096, 16384, dtype=E4M3).t()
    a_scale, b_scale = torch.ones(128, 4096).t(), torch.ones(128, 32)
    given = a, [b], a_scale, [b_scale], 0, NAME, [None], [None], [None], [False], False
    monkeypatch.setattr(all_gather_scaled_matmul, "has_block_product", lambda *_: True)
    found = first_gather(stage, AllGatherScaledMatmulCall(*given))
    assert "torch's product with block-wise scales" in found


def test_why_no_kernel_runs(stage: Stage) -> None:
    """Of what is the same on all ranks."""
    with plan.forced("fused"):
        for call, why in (
            (
                gather_call("rows")._replace(biases=[None] * 2, out_dtypes=[BF16, torch.float16]),
                "several dtypes",
            ),
            (gather_call("rows")._replace(biases=[None] * 2, out_dtypes=[torch.float32] * 2), ""),
        ):
            found = first_gather(stage, call)
            assert (why in found) if why else not isinstance(found, str), found
        whole = first_scatter(stage, scatter_call("rows", out_dtype=torch.float32))
        assert not isinstance(whole, str) and whole.dtype == torch.float32
        blocks = scatter_call("blocks")._replace(orig_scatter_dim=1)
        assert "no whole blocks of 128" in first_scatter(stage, blocks)
