"""torchtitan 0.3: its dist_gemm modules, which call torch.ops.symm_mem by name, with ``weft.install()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import weft
from opcommon import check
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from weft.fused_ops.passes.backend import weft_backend

pytest.importorskip("torchtitan.models.common.dist_gemm")

DIM, HIDDEN, BATCH, SEQUENCE = 16, 24, 2, 6
BOUND = 1e-5  # a few products in float32


def feed_forward(backend: str, hidden: int) -> Any:
    from torchtitan.models.common.config_utils import make_ffn_config

    init = {"weight": nn.init.normal_, "bias": nn.init.zeros_}
    inits = {"w1_param_init": init, "w2w3_param_init": init}
    return make_ffn_config(dim=DIM, hidden_dim=hidden, tp_gemm_backend=backend, **inits).build()  # type: ignore[arg-type]


def shards(rank: int, size: int) -> tuple[Any, Any, Tensor, Tensor]:
    """(this rank's module, the stock one in float64, this rank's part of the sequence, all of it)."""
    whole = feed_forward("default", HIDDEN).double()
    torch.manual_seed(7)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    mine = feed_forward("dist_gemm", HIDDEN // size)
    with torch.no_grad():
        for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            getattr(mine, name).weight.copy_(getattr(whole, name).weight.chunk(size, dim)[rank])
    x = torch.randn(BATCH, SEQUENCE * size, DIM)
    return mine, whole, x.chunk(size, 1)[rank].clone().requires_grad_(), x.double().requires_grad_()


def trains(rank: int, size: int) -> list[str]:
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    # torchtitan's backward wants it in float32, and torch has no such product for CPU.
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    mine, whole, x, every = shards(rank, size)
    set_spmd_backend("spmd_types")
    weft.install()
    with set_current_spmd_mesh(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))):
        y = mine(x)
        want = whole(every)
        check("y", y, want.detach().chunk(size, 1)[rank], BOUND)
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
        y.backward(grad.chunk(size, 1)[rank])
        want.backward(grad.double())
    check("gradient of x", x.grad, every.grad.chunk(size, 1)[rank], BOUND)
    for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
        wanted = getattr(whole, name).weight.grad.chunk(size, dim)[rank]
        check(f"gradient of {name}", getattr(mine, name).weight.grad, wanted, BOUND)
    return [str(taken) for taken in weft.drop_in.installed_calls()]


def test_a_feed_forward_trains() -> None:
    """An all-gather for two weights and a reduce-scatter; in the backward two all-gathers and one more scatter."""
    for taken in run_ranks(trains, 2, fresh=True):
        assert taken == [
            "fused_all_gather_matmul: 3 calls by weft",
            "fused_matmul_reduce_scatter: 2 calls by weft",
        ]


def infers(rank: int, size: int) -> list[str]:
    """Compiled as torchtitan's apply_compile does. (Its backward has a product that Inductor cannot lower on CPU.)"""
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    mine, whole, x, every = shards(rank, size)
    set_spmd_backend("spmd_types")
    weft.install()
    mine.compile(backend=weft_backend, fullgraph=True)
    with set_current_spmd_mesh(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))), torch.no_grad():
        check("y", mine(x), whole(every).chunk(size, 1)[rank], BOUND)
    return [str(taken) for taken in weft.drop_in.installed_calls()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_feed_forward() -> None:
    for taken in run_ranks(infers, 2, fresh=True, timeout=500):
        assert taken == [
            "fused_all_gather_matmul: 1 call by weft",
            "fused_matmul_reduce_scatter: 1 call by weft",
        ]
