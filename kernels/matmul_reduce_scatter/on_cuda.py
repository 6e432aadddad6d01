"""Which kernel computes reduce_scatter(A @ B) on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is scattered, to cuBLAS with a one-shot reduce-scatter after it; or,
where kernel.cu does not run, to cuBLAS with copy engines beside it, as float32 does everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedConfig
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig, algorithm_of, likeliest
from ..device.gemm.operands import ALIGNMENT, is_transposed, why_not
from ..device.gemm.supported import WHY_NO_GEMM, why_last_dim_not_scattered
from ..device.jit.program import Program
from ..device.kernel_choice import KernelChoice, KernelChoices, KernelSteps
from . import configs
from .copied_products import MatmulReduceScatterCopied
from .cuda_kernel import MatmulReduceScatterPush, ScaledMatmulReduceScatterPush, scatter_program
from .one_shot_kernel import MatmulReduceScatterOneShot, ScaledMatmulReduceScatterOneShot, sent_as


def _choose(
    call: configs.ScatterKernelCall, problem: configs.MatmulReduceScatterProblem
) -> KernelChoice[configs.AnyConfig] | str:
    a = call.a
    if (reason := why_not(a, call.b)) is not None:
        return reason
    if problem.split_n and problem.n * a.element_size() % ALIGNMENT:
        return f"scatter_dim: rows of {problem.n} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    is_modelled = a.dtype in gemm.DTYPES
    if problem.split_n and (why := why_last_dim_not_scattered(call.scaled, problem.n)) is not None:
        return why
    if call.epilogue.apart or call.epilogue.to_all:
        return _by_kernel(problem)
    if not (ranked := configs.rank_scatter_kernels(problem)):
        return WHY_NO_GEMM
    us, config = likeliest(ranked, call.preferred)
    layout, profitable = configs.scatter_layout(config, problem), configs.scatter_is_profitable(problem)
    return KernelChoice(algorithm_of(config), config, layout, profitable, us if is_modelled else None)


def _by_kernel(problem: configs.MatmulReduceScatterProblem) -> KernelChoice[configs.AnyConfig] | str:
    """Of products that are not summed, and of sums for all ranks: kernel.cu, profitable where it beats cuBLAS with an
    exchange or an all-reduce after it."""
    if not (pushes := configs.rank_scatter_pushes(problem)):
        return WHY_NO_GEMM
    us, config = pushes[0]
    if problem.to_all:
        profitable = configs.sum_to_all_is_profitable(problem)
    else:
        profitable = us < configs.estimate_one_shot_scatter_us(problem)
    return KernelChoice("push", config, configs.scatter_push_layout(config, problem), profitable, us)


def _kind(call: configs.ScatterKernelCall) -> tuple[Any, ...]:
    """What its epilogue adds makes no difference."""
    how = call.preferred, call.epilogue.apart, call.a.dtype
    return (*how, *((x.shape, x.stride()) for x in call.factors))


choose_scatter_kernel = KernelChoices(_choose, _kind)


def adds_products(call: configs.ScatterKernelCall, world_size: int) -> bool:
    """Whether the kernel of choice adds all products of a call itself; else their factors are to be stacked.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.
    """
    pairs = list(zip(call.factors[::2], call.factors[1::2], strict=True))
    if not call.more:
        return True
    if call.a.dtype not in gemm.DTYPES or len(pairs) > configs.MOST_PRODUCTS:
        return False
    if len({is_transposed(b) for _, b in pairs}) > 1 or any(why_not(a, b) is not None for a, b in pairs):
        return False
    choice = choose_scatter_kernel(call, world_size)
    return isinstance(choice, KernelChoice) and isinstance(choice.config, configs.ScatterPushConfig)


def fused_scatter(
    workspace: Workspace[Any], call: configs.ScatterKernelCall, config: configs.AnyConfig
) -> Any:
    """What launches calls like this one."""
    if isinstance(config, OneShotConfig):
        one_shot = MatmulReduceScatterOneShot if call.scaled is None else ScaledMatmulReduceScatterOneShot
        return one_shot(workspace, call, config)
    if isinstance(config, CopiedConfig):
        return MatmulReduceScatterCopied(workspace, call)
    if call.scaled is not None:
        return ScaledMatmulReduceScatterPush(workspace, call, call.terms[1].stride(), config)
    return MatmulReduceScatterPush(workspace, call, config)


def scatter_programs(
    config: configs.AnyConfig, call: configs.ScatterKernelCall, world_size: int, rank: int
) -> Sequence[Program]:
    """What such calls launch."""
    epilogue, ranks = call.epilogue, (world_size, rank)
    if isinstance(config, OneShotConfig):
        return [MatmulReduceScatterOneShot.program(sent_as(call), epilogue, ranks)]
    if isinstance(config, CopiedConfig):
        return [acquire.PROGRAM]
    return [scatter_program(call.b, config, epilogue, ranks)]


def _results_of(call: configs.ScatterKernelCall, world_size: int) -> list[torch.Tensor]:
    """Memory for the own part of the sum with what the epilogue makes of it, [L, m, N]; or of each rank apart,
    [W, L, m, N]."""
    apart = (world_size,) * call.epilogue.apart
    shape = (*apart, call.a.shape[0], call.a.shape[2], call.columns(world_size))
    return [call.a.new_empty(shape, dtype=call.epilogue.out_dtype)]


def _key(choice: KernelChoice[configs.AnyConfig], call: configs.ScatterKernelCall) -> tuple[Any, ...]:
    """What a kernel is kept under: a choice, of a product of the same size, says nothing of its parts."""
    parts = ((x.shape[-1], x.stride()) for x in call.more)
    scaled = () if call.scaled is None else (call.a.stride(), call.terms[1].stride())
    return (choice, call.epilogue, *parts, *scaled)


def scatter_operands(config: configs.AnyConfig, call: configs.ScatterKernelCall) -> list[torch.Tensor]:
    """The factors and the terms: fp8 factors for kernel.cu in numbers of 16 bits, for torch's kernel as they are."""
    factors = call.factors
    if call.scaled is not None and isinstance(config, OneShotConfig):
        of_a, of_b = call.scaled.types
        factors = call.a.view(of_a), call.b.t().view(of_b).t()
    return [*factors, *call.terms]


def _same(config: configs.AnyConfig, call: configs.ScatterKernelCall) -> tuple[Any, ...]:
    # Of all products: whether a rank stacks their factors or not is its own affair.
    depth = sum(x.shape[-1] for x in call.factors[::2])
    sizes = call.a.shape[:-1], depth, call.b.shape[1], call.a.dtype
    return (*sizes, call.epilogue, config, call.num_sms, call.split_n)


SCATTER_STEPS = KernelSteps(
    choose_scatter_kernel, scatter_programs, fused_scatter, _key, _same, scatter_operands, _results_of
)
