"""Which kernel computes all_gather(A) @ B on CUDA, and the call of it.

16-bit operands go to kernel.cu, which sends by itself. Others (float32), and Bs of both orders in one call, go to the
Triton kernel, for which copy engines send.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import gemm
from ..device.launch import is_transposed, why_not
from . import configs, cuda_kernel, pipeline


@dataclass(frozen=True)
class Choice:
    """How a call is run. ``half_bytes`` of a half of the workspace and ``flags`` for each rank are what it takes."""

    algorithm: str
    config: configs.PushConfig | configs.Config
    half_bytes: int
    flags: int


def refuses(a: torch.Tensor, bs: list[torch.Tensor]) -> str | None:
    """Why no kernel can take a shard [m, K] and these Bs; None if one can."""
    for i, b in enumerate(bs):
        if b.shape[1] == 0:
            return f"Bs[{i}] has no columns"
        if (reason := why_not(a, b)) is not None:
            return f"Bs[{i}]: {reason}"
    return None


def pays(a: torch.Tensor, bs: list[torch.Tensor], world_size: int, num_sms: int) -> bool:
    """Whether fusing is thought to be faster than an all-gather in front of the products."""
    (m, k), ns = a.shape, [b.shape[1] for b in bs]
    if _pushes(a, bs):
        return configs.push_pays(m, ns, k, world_size, num_sms)
    return configs.pays(m, sum(ns), k, world_size, a.element_size())


def choose(a: torch.Tensor, bs: list[torch.Tensor], world_size: int, num_sms: int) -> Choice:
    """The same on all ranks whose tensors have the same sizes, strides and dtypes."""
    m, k = a.shape
    if _pushes(a, bs):
        config = configs.choose_push(m, [b.shape[1] for b in bs], k, world_size, num_sms)
        layout = configs.push_layout(m, k, world_size, config)
        return Choice("push", config, layout.half_bytes, layout.flags_per_rank)
    copied = pipeline.configure(a, bs, world_size, num_sms)
    return Choice("copy_engine", copied, *pipeline.needs(a, copied, world_size))


def run(
    choice: Choice,
    workspace: Workspace[Layout],
    a: torch.Tensor,
    bs: list[torch.Tensor],
    num_sms: int,
    timeout_ns: int,
    *,
    return_A: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i]."""
    if isinstance(choice.config, configs.PushConfig):
        call = cuda_kernel.all_gather_matmul
        return call(workspace, a, bs, choice.config, num_sms, timeout_ns, return_A=return_A)
    return pipeline.all_gather_matmul(workspace, a, bs, choice.config, num_sms, timeout_ns, return_A=return_A)


def _pushes(a: torch.Tensor, bs: list[torch.Tensor]) -> bool:
    return a.dtype in gemm.DTYPES and len({is_transposed(b) for b in bs}) == 1
