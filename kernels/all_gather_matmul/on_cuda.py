"""Which kernel computes all_gather(A) @ B on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is gathered and A is not returned, to a one-shot all-gather with
cuBLAS after it; or, where kernel.cu does not run, to copy engines with cuBLAS beside them, as float32 does everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig, algorithm_of, likeliest
from ..device.gemm.operands import ALIGNMENT, is_transposed, why_not
from ..device.gemm.supported import WHY_NO_GEMM, why_last_dim_not_gathered
from ..device.jit.program import Program
from ..device.kernel_choice import KernelChoice, KernelChoices, KernelSteps
from . import configs, cuda_kernel
from .copied_products import AllGatherProductsCopied
from .one_shot_kernel import AllGatherMatmulOneShot
from .scaled import AllGatherScaledMatmulOneShot, AllGatherScaledMatmulPush


def takes_rows(flat: torch.Tensor) -> bool:
    """Whether a shard [m, K] need not be copied: its rows are such as kernel.cu takes them, or it is contiguous."""
    return flat.is_contiguous() or (flat.dtype in gemm.DTYPES and cuda_kernel.can_take(flat))


def _choose(
    call: configs.GatherKernelCall, problem: configs.AllGatherMatmulProblem
) -> KernelChoice[configs.AnyConfig] | str:
    a, bs, k = call.a, call.bs, problem.k
    for i, b in enumerate(bs):
        if b.shape[1] == 0:
            return f"Bs[{i}] has no columns"
        if (reason := why_not(a, b)) is not None:
            return f"Bs[{i}]: {reason}"
    if k * a.element_size() % ALIGNMENT:  # of a part of B, where B as a whole may be fine
        return f"K: rows of {k} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    if a.dtype in gemm.DTYPES and len({is_transposed(b) for b in bs}) > 1:
        return "Bs: some lie in rows and some in columns"
    if call.split_k and (reason := why_last_dim_not_gathered(call.scaled)) is not None:
        return reason
    if not (ranked := configs.rank_gather_kernels(problem)):
        return WHY_NO_GEMM
    us, config = likeliest(ranked, call.preferred)
    layout, profitable = configs.gather_layout(problem, config), configs.gather_is_profitable(problem)
    predicted_us = us if a.dtype in gemm.DTYPES else None
    return KernelChoice(algorithm_of(config), config, layout, profitable, predicted_us)


def _kind(call: configs.GatherKernelCall) -> tuple[Any, ...]:
    return (call.preferred, call.a.stride(), call.a.dtype, *((b.shape, b.stride()) for b in call.bs))


choose_gather_kernel = KernelChoices(_choose, _kind)


def fused_gather(workspace: Workspace[Any], call: configs.GatherKernelCall, config: configs.AnyConfig) -> Any:
    """What launches calls like this one."""
    scales = call.scales
    if isinstance(config, OneShotConfig):
        if scales is None:
            return AllGatherMatmulOneShot(workspace, call, config)
        return AllGatherScaledMatmulOneShot(workspace, call, scales, config)
    if isinstance(config, configs.CopiedConfig):
        biases = [] if scales is None else scales.biases
        return AllGatherProductsCopied(workspace, call, [bias is not None for bias in biases])
    if scales is not None:
        return AllGatherScaledMatmulPush(workspace, call, scales, config)
    several = len(call.bs) > configs.MOST_BS
    push = cuda_kernel.AllGatherMatmulPushes if several else cuda_kernel.AllGatherMatmulPush
    return push(workspace, call, config)


def gather_programs(
    config: configs.AnyConfig, call: configs.GatherKernelCall, world_size: int, rank: int
) -> Sequence[Program]:
    """What such calls launch."""
    if isinstance(config, OneShotConfig):
        kernel = AllGatherMatmulOneShot if call.scaled is None else AllGatherScaledMatmulOneShot
        return [kernel.program(world_size, rank)]
    if isinstance(config, configs.CopiedConfig):
        return [acquire.PROGRAM]
    return cuda_kernel.push_programs(call.bs, config, return_A=call.return_A)


def gather_operands(config: configs.AnyConfig, call: configs.GatherKernelCall) -> list[torch.Tensor]:
    """The shard, the Bs, and the scales' tensors: fp8 for kernel.cu in numbers of 16 bits, for torch's kernel as it
    is."""
    a, bs = call.a, list(call.bs)
    if call.scaled is not None and not isinstance(config, configs.GatherPushConfig):
        of_a, of_b = call.scaled.types
        a, bs = a.view(of_a), [b.t().view(of_b).t() for b in bs]
    return [a, *bs, *(() if call.scales is None else call.scales.tensors)]


def results_of(call: configs.GatherKernelCall, world_size: int) -> list[torch.Tensor]:
    """Memory for the products [W, m, N_i], and after them for the gathered shards [W, m, K] if they are wanted, fp8 in
    numbers of 16 bits; with ``split_k`` [m, N_i] and [m, W * K]."""
    a, bs = call.a, call.bs
    rows = (call.rows(world_size),) if call.split_k else (world_size, a.shape[0])
    dtype = a.dtype if call.scaled is None else call.scaled.out_dtype
    products = [a.new_empty((*rows, b.shape[1]), dtype=dtype) for b in bs]
    return [*products, a.new_empty((*rows, bs[0].shape[0]))] if call.return_A else products


def _key(choice: KernelChoice[configs.AnyConfig], call: configs.GatherKernelCall) -> tuple[Any, ...]:
    """What a kernel is kept under."""
    if call.scales is None:
        return (choice, call.return_A)
    biased = (bias is not None for bias in call.scales.biases)
    return (choice, call.return_A, *(b.stride() for b in call.scales.bs), *biased)


def _same(config: configs.AnyConfig, call: configs.GatherKernelCall) -> tuple[Any, ...]:
    return (call.a.shape, *(b.shape for b in call.bs), call.a.dtype, config, call.num_sms, call.return_A)


GATHER_STEPS = KernelSteps(
    choose_gather_kernel, gather_programs, fused_gather, _key, _same, gather_operands, results_of
)
