"""Tensors that no op takes: what is said of them, also under torch.compile, before anything is launched."""

from __future__ import annotations

import re

import pytest
import torch
from op_table import op_calls
from opcommon import world
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from weft import fused_ops
from weft.fused_ops.dispatch import plan


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@on_ranks(2)
def test_dtensors_nested_and_quantized_ones_are_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    untouched = fused_ops.Plan("nothing was launched")
    plan.ran(untouched)
    A = torch.ones(4, 6)
    calls = [call for name, call in op_calls().items() if hasattr(fused_ops, name.split()[0])]
    given = [each for call in calls for each in call.with_each()]
    for name, call in [*given, ("x", fused_ops.ColumnParallelLinear(6, 8, group=world()))]:
        sharded = DTensor.from_local(A, mesh, [Shard(0)])
        with pytest.raises(TypeError, match=f"^{re.escape(name)}: is a DTensor, must be what this rank"):
            call(sharded)
        nested = torch.nested.nested_tensor([A, A])
        with pytest.raises(ValueError, match=f"^{re.escape(name)}: is nested, must be one dense tensor"):
            call(nested)
        quantized = torch.quantize_per_tensor(A, 0.1, 0, torch.qint8)
        with pytest.raises(TypeError, match=f"^{re.escape(name)}: is torch.qint8, must be float32, bfloat16"):
            call(quantized)
    compiled = torch.compile(
        lambda x: fused_ops.one_shot_all_reduce(x, "sum", world()), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="x: is a DTensor"):
        compiled(sharded)
    assert fused_ops.last_plan() is untouched
