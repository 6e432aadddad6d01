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
from . import configs, cuda_kernel, host, pipeline


@dataclass(frozen=True, eq=False)
class Choice:
    """How calls of one kind are run.

    ``half_bytes`` of a half of the workspace and ``flags`` for each rank are what it takes. ``pays``: it is thought
    to be faster than an all-gather in front of the products.
    """

    algorithm: str
    config: configs.PushConfig | configs.Config
    half_bytes: int
    flags: int
    pays: bool


_choices: dict[tuple[object, ...], Choice | str] = {}
_MOST_CHOICES = 4096  # kept before all are forgotten


def choose(a: torch.Tensor, bs: list[torch.Tensor], world_size: int, num_sms: int) -> Choice | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.

    Args:
        a: the own shard, [m, K], contiguous. bs: each [K, N_i]. All begin at multiples of 16 bytes.
    """
    key = (a.shape, a.dtype, world_size, num_sms, *((b.shape, b.stride()) for b in bs))
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= _MOST_CHOICES:
            _choices.clear()
        found = _choices[key] = _refuses(a, bs) or _chosen(a, bs, world_size, num_sms)
    return found


def _refuses(a: torch.Tensor, bs: list[torch.Tensor]) -> str | None:
    """Why no kernel can take a shard [m, K] and these Bs; None if one can."""
    for i, b in enumerate(bs):
        if b.shape[1] == 0:
            return f"Bs[{i}] has no columns"
        if (reason := why_not(a, b)) is not None:
            return f"Bs[{i}]: {reason}"
    return None


def _chosen(a: torch.Tensor, bs: list[torch.Tensor], world_size: int, num_sms: int) -> Choice:
    (m, k), ns = a.shape, [b.shape[1] for b in bs]
    if a.dtype in gemm.DTYPES and len({is_transposed(b) for b in bs}) == 1:
        config = configs.choose_push(m, ns, k, world_size, num_sms)
        layout = configs.push_layout(m, k, world_size, config)
        pays = configs.push_pays(m, ns, k, world_size, num_sms)
        return Choice("push", config, layout.half_bytes, layout.flags_per_rank, pays)
    copied = pipeline.configure(a, bs, world_size, num_sms)
    pays = configs.pays(m, sum(ns), k, world_size, a.element_size())
    return Choice("copy_engine", copied, *pipeline.needs(a, copied, world_size), pays)


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
    config = choice.config
    if isinstance(config, configs.PushConfig):
        kernels = workspace.prepared.get(choice)
        if kernels is None:

            def make() -> list[cuda_kernel.AllGatherMatmulPush]:
                return cuda_kernel.prepare(workspace, a, bs, config, num_sms)

            # Ranks compile together: no wait counts what a peer still compiles. The strides are left out: each rank
            # may have others.
            key = (host.OP, a.shape, *(b.shape for b in bs), a.dtype, config, num_sms)
            workspace.heap.prepare(host.OP, key, make)
            kernels = workspace.prepared[choice] = make()
        return cuda_kernel.all_gather_matmul(workspace, kernels, a, bs, timeout_ns, return_A=return_A)
    return pipeline.all_gather_matmul(workspace, a, bs, config, num_sms, timeout_ns, return_A=return_A)
