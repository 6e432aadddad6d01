"""The fast path of a matmul that was called before: what other arguments than tensors make of it."""

from __future__ import annotations

import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
from fake_gpu import NAME, SLOW, TAKEN, Stage, run_on_cuda
from weft.fused_ops import fused_matmul_reduce_scatter
from weft.fused_ops.ops import matmul_reduce_scatter
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall

stage, op = matmuls.stage, matmuls.op


@pytest.mark.parametrize("gradient", [False, True])
def test_a_result_of_another_dtype_takes_the_slow_path(stage: Stage, gradient: bool) -> None:
    A, B = matmuls.numbers(6, 4, 8), matmuls.numbers(8, 16)
    run_on_cuda(matmul_reduce_scatter, stage.where, MatmulReduceScatterCall(A, B, "sum", 0, NAME, A.dtype))
    A.requires_grad_(gradient)
    for call in (fused_matmul_reduce_scatter, torch.ops.weft.fused_matmul_reduce_scatter):
        call(A, B, "sum", 0, NAME)
        with pytest.raises(SLOW, match=TAKEN):
            call(A, B, "sum", 0, NAME, out_dtype=torch.float32)
    assert len(stage.launched) == 3


def test_wrong_arguments_are_refused_as_ever(stage: Stage, op: matmuls.Op) -> None:
    dim = "gather_dim" if len(op.given) == 3 else "scatter_dim"
    for value in (False, 0.0, None):
        with pytest.raises(TypeError, match=f"{dim}: is .*must be an integer"):
            op.call(*op.given, **{dim: value})
    with pytest.raises(TypeError, match="must be a tensor"):
        op.call(*op.given[:-1], op.given[-1].tolist())
    with pytest.raises(ValueError, match="must be strided"):
        op.call(op.given[0].to_sparse(), *op.given[1:])
    with pytest.raises(TypeError, match="group: must be"):
        op.call(*op.given, group=3)
    if len(op.given) == 3:
        with pytest.raises(TypeError, match="return_A: is"):
            op.call(*op.given, return_A=1)
    else:
        with pytest.raises(SLOW, match=TAKEN):  # another kernel
            op.call(*op.given, reduce_op="avg")
        with pytest.raises(ValueError, match="reduce_op: is 'max'"):
            op.call(*op.given, reduce_op="max")
    assert not stage.launched
