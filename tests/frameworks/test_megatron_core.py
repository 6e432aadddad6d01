"""Megatron-LM's tensor-parallel layers over the process group "weft". Sequence parallelism wants CUDA there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import weft
from opcommon import check, gather
from ranks import run_ranks
from torch.nn import functional as F

pytest.importorskip("megatron.core")

ROWS, WIDTH, HIDDEN, BOUND = 7, 10, 12, 1e-5


def megatron_trains(rank: int, size: int) -> dict[str, int]:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    group = dist.new_group(backend="weft")
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=torch.float32
    )
    given = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "tp_group": group}
    up = ColumnParallelLinear(WIDTH, HIDDEN * size, gather_output=False, skip_bias_add=True, **given)
    down = RowParallelLinear(HIDDEN * size, WIDTH, input_is_parallel=True, skip_bias_add=True, **given)
    x = torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(7)).requires_grad_()
    y, _ = down(F.gelu(up(x)[0]))
    y.square().sum().backward()

    wide = torch.cat(gather(up.weight.detach().double())).requires_grad_()
    deep = torch.cat(gather(down.weight.detach().double()), 1).requires_grad_()
    exact = x.detach().double().requires_grad_()
    want = F.gelu(exact @ wide.t()) @ deep.t()
    want.square().sum().backward()
    check("y", y, want, BOUND)
    check("gradient of x", x.grad, exact.grad, BOUND)
    check("gradient of up", up.weight.grad, wide.grad.chunk(size)[rank], BOUND)
    check("gradient of down", down.weight.grad, deep.grad.chunk(size, 1)[rank], BOUND)
    return {call.op: call.count for call in weft.process_group(group).calls() if call.by == "weft"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_megatron() -> None:
    for taken in run_ranks(megatron_trains, 2, fresh=True, timeout=500):
        assert taken == {"all_reduce": 2}  # of y, and of the gradient of x
