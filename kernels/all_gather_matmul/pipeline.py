"""CUDA ranks: copy engines push the shards while the persistent GEMM computes what has arrived.

On the current stream: acquire kernel, GEMM for each B, the copy of A if it is returned, and the end of the epoch. On
the copy stream behind the acquire kernel: the pushes (device/comm/copy_engine.py). Who writes and who waits:
triton_kernel.py.
"""

from __future__ import annotations

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.acquire import end_epoch, load
from ..device.comm.copy_engine import CopyEngine
from ..device.jit.launch import compiling
from .configs import AllGatherMatmulConfig, GatherKernelCall, choose_all_gather_matmul
from .triton_kernel import TritonAllGatherMatmul


def configure(call: GatherKernelCall, world_size: int) -> AllGatherMatmulConfig:
    """One configuration for all products of a shard [m, K]: that of the widest B."""
    (m, k), n = call.a.shape, max(b.shape[1] for b in call.bs)
    return choose_all_gather_matmul(m, n, k, world_size, call.a.dtype, call.num_sms)


def prepare_gather_kernels(
    workspace: Workspace[Layout],
    call: GatherKernelCall,
    config: AllGatherMatmulConfig,
    timeout_ns: int,
) -> list[TritonAllGatherMatmul]:
    """A kernel for each B, compiled, for ``copy_engine_all_gather_matmul``.

    Args:
        call: its shard is contiguous, of each B rows or columns are; ``why_no_triton_gather`` says nothing of any.
    """
    a, bs = call.a, call.bs
    if "copy engine" not in workspace.copy_streams:
        workspace.copy_streams["copy engine"] = CopyEngine(workspace)
    kernels = []
    load()
    with compiling():  # Triton compiles at a launch
        for i, b in enumerate(bs):
            kernel = TritonAllGatherMatmul(workspace, a, b, config, num_sms=call.num_sms)
            final = i == len(bs) - 1 and not call.return_A
            c = a.new_empty(workspace.world_size, a.shape[0], b.shape[1])
            kernel.launch(0, a, b, c, final=final, timeout_ns=timeout_ns)
            kernels.append(kernel)
    return kernels


def copy_engine_all_gather_matmul(
    workspace: Workspace[Layout],
    kernels: list[TritonAllGatherMatmul],
    call: GatherKernelCall,
    config: AllGatherMatmulConfig,
    timeout_ns: int,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i].

    Args:
        kernels: what ``prepare_gather_kernels`` made for such tensors.
    """
    a, bs, return_A = call.a, call.bs, call.return_A
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
            end_epoch(workspace, buffer, torch.cuda.current_stream().cuda_stream)
    return gathered, products
