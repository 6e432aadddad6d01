"""Tensors that no op takes: what is said of them, also under torch.compile, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opcommon import world
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from weft.fused_ops import (
    ColumnParallelLinear,
    Plan,
    cross_entropy_of_sharded_logits,
    fused_all_gather_grouped_matmul,
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_all_reduce_layer_norm,
    fused_all_reduce_rms_norm,
    fused_all_reduce_rms_norm_quant,
    fused_all_to_all_matmul,
    fused_grouped_matmul_all_reduce,
    fused_grouped_matmul_reduce_scatter,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
    fused_matmul_all_reduce,
    fused_matmul_all_to_all,
    fused_matmul_reduce_scatter,
    fused_moe_combine_all_reduce,
    fused_moe_combine_all_reduce_rms_norm,
    fused_moe_combine_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
    last_plan,
    moe_combine,
    moe_dispatch,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_,
    one_shot_all_to_all,
    one_shot_gather,
    one_shot_reduce_scatter,
)
from weft.fused_ops.dispatch import plan

A, B = torch.ones(4, 6), torch.ones(6, 8)
EXPERTS, INDEX = torch.ones(1, 32, 8), torch.zeros(1, dtype=torch.int32)
TARGETS = torch.zeros(4, dtype=torch.int64)
SLOTS, SHARES = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
HANDLE = SLOTS, INDEX, INDEX
A8, B8, ONE = (
    torch.ones(4, 32).to(torch.float8_e4m3fn),
    torch.ones(16, 32).to(torch.float8_e4m3fn).t(),
    torch.ones(()),
)
CALLS: dict[str, Callable[[Any], Any]] = {
    "A_shard": lambda x: fused_all_gather_matmul(x, [B], 0, world()),
    r"Bs\[1\]": lambda x: fused_all_gather_matmul(A, [B, x], 0, world()),
    "A": lambda x: fused_matmul_reduce_scatter(x, B, "sum", 0, world()),
    "residual": lambda x: fused_matmul_reduce_scatter(A, B, "sum", 0, world(), residual=x),
    "B": lambda x: fused_matmul_all_reduce(A, x, "sum", world()),
    "A_shard ": lambda x: fused_all_gather_scaled_matmul(x, [B8], ONE, [ONE], 0, world()),
    r"Bs\[0\]": lambda x: fused_all_gather_scaled_matmul(A8, [x], ONE, [ONE], 0, world()),
    r"B_scales\[0\]": lambda x: fused_all_gather_scaled_matmul(A8, [B8], ONE, [x], 0, world()),
    r"biases\[0\]": lambda x: fused_all_gather_scaled_matmul(A8, [B8], ONE, [ONE], 0, world(), [x]),
    "A_scale": lambda x: fused_scaled_matmul_reduce_scatter(A8, B8, x, ONE, "sum", 0, world()),
    "bias": lambda x: fused_scaled_matmul_reduce_scatter(A8, B8, ONE, ONE, "sum", 0, world(), bias=x),
    "weight": lambda x: fused_all_reduce_rms_norm(A, A, x, 1e-5, world()),
    "scale": lambda x: fused_all_reduce_rms_norm_quant(A, A, A[0], 1e-5, world(), scale=x),
    "residual ": lambda x: fused_all_reduce_rms_norm_quant(A, x, A[0], 1e-5, world()),
    "bias ": lambda x: fused_all_reduce_layer_norm(A, A, A[0], x, 1e-5, world()),
    "x": lambda x: one_shot_all_reduce(x, "sum", world()),
    "x ": lambda x: one_shot_all_reduce_(x, "sum", world()),
    "x  ": lambda x: one_shot_all_gather(x, 0, world()),
    "x   ": lambda x: one_shot_reduce_scatter(x, "sum", 0, world()),
    "x     ": lambda x: one_shot_all_to_all(x, 0, 1, world()),
    "x       ": lambda x: one_shot_gather(x, 0, 1, world()),
    "A  ": lambda x: fused_matmul_all_to_all(x, B, 0, world()),
    "B  ": lambda x: fused_all_to_all_matmul(A, x, 0, world()),
    "weight_shard": lambda x: fused_linear_cross_entropy(A, x, TARGETS, world()),
    "bias  ": lambda x: fused_linear_cross_entropy(A, B.t(), TARGETS, world(), bias=x),
    "x    ": lambda x: fused_linear_log_probs(x, B.t(), TARGETS, world()),
    "targets": lambda x: fused_linear_log_probs(A, B.t(), x, world()),
    "logits_shard": lambda x: cross_entropy_of_sharded_logits(x, TARGETS, world()),
    "A_shard  ": lambda x: fused_all_gather_grouped_matmul(x, [EXPERTS], INDEX, INDEX, 0, world()),
    r"Bs\[1\] ": lambda x: fused_all_gather_grouped_matmul(A8, [EXPERTS, x], INDEX, INDEX, 0, world()),
    "rows": lambda x: fused_all_gather_grouped_matmul(A8, [EXPERTS], x, INDEX, 0, world()),
    "offs": lambda x: fused_all_gather_grouped_matmul(A8, [EXPERTS], INDEX, x, 0, world()),
    r"biases\[0\] ": lambda x: fused_all_gather_grouped_matmul(
        A8, [EXPERTS], INDEX, INDEX, 0, world(), biases=[x]
    ),
    "A ": lambda x: fused_grouped_matmul_all_reduce(x, EXPERTS, INDEX, SLOTS, SHARES, "sum", world()),
    "B ": lambda x: fused_grouped_matmul_all_reduce(A, x, INDEX, SLOTS, SHARES, "sum", world()),
    "offs ": lambda x: fused_grouped_matmul_reduce_scatter(A, EXPERTS, x, SLOTS, SHARES, "sum", 0, world()),
    "slots ": lambda x: fused_grouped_matmul_reduce_scatter(A, EXPERTS, INDEX, x, SHARES, "sum", 0, world()),
    "weights ": lambda x: fused_grouped_matmul_all_reduce(A, EXPERTS, INDEX, SLOTS, x, "sum", world()),
    "bias   ": lambda x: fused_grouped_matmul_all_reduce(
        A, EXPERTS, INDEX, SLOTS, SHARES, "sum", world(), bias=x
    ),
    "residual   ": lambda x: fused_grouped_matmul_all_reduce(
        A, EXPERTS, INDEX, SLOTS, SHARES, "sum", world(), residual=x
    ),
    "shared ": lambda x: fused_grouped_matmul_reduce_scatter(
        A, EXPERTS, INDEX, SLOTS, SHARES, "sum", 0, world(), shared=x
    ),
    "y": lambda x: fused_moe_combine_all_reduce(x, SLOTS, SHARES, world()),
    "slots": lambda x: fused_moe_combine_all_reduce(A, x, SHARES, world()),
    "weights": lambda x: fused_moe_combine_reduce_scatter(A, SLOTS, x, 0, world()),
    "shared": lambda x: fused_moe_combine_reduce_scatter(A, SLOTS, SHARES, 0, world(), shared=x),
    "x      ": lambda x: moe_dispatch(x, SLOTS, 2, world()),
    "topk_ids": lambda x: moe_dispatch(A, x, 2, world()),
    "y ": lambda x: moe_combine(x, HANDLE, SHARES, world()),
    r"handle\.slots": lambda x: moe_combine(A, (x, INDEX, INDEX), SHARES, world()),
    r"handle\.choices": lambda x: moe_combine(A, (SLOTS, x, INDEX), SHARES, world()),
    r"handle\.ranks": lambda x: moe_combine(A, (SLOTS, INDEX, x), SHARES, world()),
    "weights  ": lambda x: moe_combine(A, HANDLE, x, world()),
    "residual  ": lambda x: fused_moe_combine_all_reduce_rms_norm(A, SLOTS, SHARES, x, A[0], 1e-5, world()),
    "weight ": lambda x: fused_moe_combine_all_reduce_rms_norm(A, SLOTS, SHARES, None, x, 1e-5, world()),
    "out": lambda x: one_shot_all_gather(A, 0, world(), out=x),
    "out ": lambda x: one_shot_reduce_scatter(A, "sum", 0, world(), out=x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@on_ranks(2)
def test_dtensors_nested_and_quantized_ones_are_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    untouched = Plan("nothing was launched")
    plan.ran(untouched)
    layer = ColumnParallelLinear(6, 8, group=world())
    for name, call in [*CALLS.items(), ("x", layer)]:
        sharded = DTensor.from_local(A, mesh, [Shard(0)])
        with pytest.raises(TypeError, match=f"^{name.strip()}: is a DTensor, must be what this rank holds"):
            call(sharded)
        nested = torch.nested.nested_tensor([A, A])
        with pytest.raises(ValueError, match=f"^{name.strip()}: is nested, must be one dense tensor"):
            call(nested)
        quantized = torch.quantize_per_tensor(A, 0.1, 0, torch.qint8)
        with pytest.raises(TypeError, match=f"^{name.strip()}: is torch.qint8, must be float32, bfloat16 or"):
            call(quantized)
    compiled = torch.compile(CALLS["x"], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="x: is a DTensor"):
        compiled(sharded)
    assert last_plan() is untouched
