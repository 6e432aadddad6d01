"""Which kernel computes reduce_scatter(A @ B) on CUDA, and the call of it.

16-bit operands go to kernel.cu, float32 to the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import gemm
from ..device.launch import why_not
from . import configs, cuda_kernel
from .triton_kernel import MatmulReduceScatter


@dataclass(frozen=True)
class Choice:
    """How a call is run. ``half_bytes`` of a half of the workspace and ``flags`` for each rank are what it takes."""

    algorithm: str
    config: configs.BulkConfig | configs.Config
    half_bytes: int
    flags: int


def refuses(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why no kernel can take A [L, W, m, K] and B [K, N]; None if one can."""
    return why_not(a, b)


def pays(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> bool:
    """Whether fusing is thought to be faster than a reduce-scatter behind the product."""
    batches, world_size, m, k = a.shape
    if a.dtype in gemm.DTYPES:
        return configs.bulk_pays(m, b.shape[1], k, world_size, num_sms, batches)
    return batches * m >= 64


def choose(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> Choice:
    """The same on all ranks whose tensors have the same sizes, strides and dtypes."""
    (batches, world_size, m, k), n = a.shape, b.shape[1]
    if a.dtype in gemm.DTYPES:
        config = configs.choose_bulk(m, n, k, world_size, num_sms, batches)
        return Choice("bulk", config, *configs.bulk_needs(m, n, config, world_size, batches))
    stored = configs.choose(m, n, k, world_size, a.dtype, num_sms, batches)
    nbytes = world_size * batches * m * n * a.element_size()
    return Choice("tma_store", stored, nbytes, configs.flags_per_rank(m, n, stored, batches))


def run(
    choice: Choice,
    workspace: Workspace[Layout],
    a: torch.Tensor,
    b: torch.Tensor,
    num_sms: int,
    timeout_ns: int,
    *,
    average: bool,
) -> torch.Tensor:
    """The own part of the sum, or of the mean, [L, m, N]."""
    config = choice.config
    if isinstance(config, configs.BulkConfig):
        call = cuda_kernel.matmul_reduce_scatter
        return call(workspace, a, b, config, num_sms, timeout_ns, average=average)
    out = a.new_empty(a.shape[0], a.shape[2], b.shape[1])
    key = ("tma_store", a.shape, a.stride(), a.dtype, b.shape, b.stride(), average, config, num_sms)
    kernel = workspace.prepared.get(key)
    if kernel is None:
        kernel = workspace.prepared[key] = MatmulReduceScatter(
            workspace, a, b, config, average=average, num_sms=num_sms
        )
    kernel.launch(workspace.next_half(), a, b, out, timeout_ns=timeout_ns)
    return out
