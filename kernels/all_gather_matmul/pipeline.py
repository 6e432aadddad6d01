"""CUDA ranks: copy engines push the shards while the persistent GEMM computes what has arrived.

On the current stream: acquire kernel, GEMM for each B, the copy of A if it is returned, and the end of the epoch. On
the copy stream behind the acquire kernel: the pushes (device/comm/copy_engine.py). Who writes and who waits:
triton_kernel.py.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.acquire import end_use, load
from ..device.comm.copy_engine import CopyEngine
from ..device.jit.launch import compiling
from .configs import AllGatherMatmulConfig, choose_all_gather_matmul
from .triton_kernel import TritonAllGatherMatmul


def configure(
    a: torch.Tensor, bs: list[torch.Tensor], world_size: int, num_sms: int
) -> AllGatherMatmulConfig:
    """One configuration for all products of a shard [m, K]: that of the widest B."""
    m, k = a.shape
    return choose_all_gather_matmul(m, max(b.shape[1] for b in bs), k, world_size, a.dtype, num_sms)


def prepare_gather_kernels(
    workspace: Workspace[Layout],
    a: torch.Tensor,
    bs: list[torch.Tensor],
    config: AllGatherMatmulConfig,
    num_sms: int,
    timeout_ns: int,
    *,
    return_A: bool,
) -> list[TritonAllGatherMatmul]:
    """A kernel for each B, compiled, for ``copy_engine_all_gather_matmul``.

    Args:
        a: the local shard, [m, K], contiguous.
        bs: each [K, N_i], rows or columns contiguous; ``why_no_triton_gather`` is None for all.
    """
    if "copy engine" not in workspace.copy_streams:
        workspace.copy_streams["copy engine"] = CopyEngine(workspace)
    kernels = []
    load()
    with compiling():  # Triton compiles at a launch
        for i, b in enumerate(bs):
            kernel = TritonAllGatherMatmul(workspace, a, b, config, num_sms=num_sms)
            final = i == len(bs) - 1 and not return_A
            c = a.new_empty(workspace.world_size, a.shape[0], b.shape[1])
            kernel.launch(0, a, b, c, final=final, timeout_ns=timeout_ns)
            kernels.append(kernel)
    return kernels


def copy_engine_all_gather_matmul(
    workspace: Workspace[Layout],
    kernels: list[TritonAllGatherMatmul],
    a: torch.Tensor,
    bs: list[torch.Tensor],
    config: AllGatherMatmulConfig,
    timeout_ns: int,
    *,
    return_A: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i].

    Args:
        kernels: what ``prepare_gather_kernels`` made for such tensors.
    """
    engine: CopyEngine = workspace.copy_streams["copy engine"]
    products = [a.new_empty(workspace.world_size, a.shape[0], b.shape[1]) for b in bs]
    buffer = workspace.next_buffer()
    gathered: torch.Tensor | None = None
    with engine.pushing(buffer, a, config.chunk_rows, timeout_ns):
        for i, (kernel, b, c) in enumerate(zip(kernels, bs, products, strict=True)):
            final = i == len(bs) - 1 and not return_A
            kernel.launch(buffer, a, b, c, final=final, timeout_ns=timeout_ns)
        if return_A:  # the GEMM has waited for all of it
            gathered = torch.empty_like(kernels[0].gathered(buffer))
            gathered.copy_(kernels[0].gathered(buffer))
            gathered[workspace.rank].copy_(a)
            end_use(workspace, buffer, torch.cuda.current_stream().cuda_stream)
    return gathered, products
