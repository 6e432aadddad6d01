"""Which kernel computes all_gather(A) @ B on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is gathered and A is not returned, to a one-shot all-gather with
cuBLAS after it; or, where kernel.cu does not run, to copy engines with cuBLAS beside them, as float32 does everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ...symm_mem.heap.heap import Heap
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig, algorithm_of, launch_prepared, likeliest
from ..device.gemm.operands import ALIGNMENT, is_transposed, why_not
from ..device.gemm.supported import WHY_NO_GEMM, why_last_dim_not_gathered
from ..device.jit.ahead import CompilableProgram
from ..device.tuning import tuner
from ..device.tuning.benchmark import Candidate
from ..device.tuning.choice import KernelChoice, KernelChoices, KernelSteps, make_together
from . import OP, configs, cuda_kernel
from .copied_products import AllGatherProductsCopied
from .one_shot_kernel import AllGatherMatmulOneShot
from .scaled import AllGatherScaledMatmulOneShot, AllGatherScaledMatmulPush

_choices: KernelChoices[configs.AnyConfig] = KernelChoices()


def takes_rows(flat: torch.Tensor) -> bool:
    """Whether a shard [m, K] need not be copied: its rows are such as kernel.cu takes them, or it is contiguous."""
    return flat.is_contiguous() or (flat.dtype in gemm.DTYPES and cuda_kernel.can_take(flat))


def choose_gather_kernel(
    call: configs.GatherKernelCall, world_size: int
) -> KernelChoice[configs.AnyConfig] | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.
    """
    problem = call.problem(world_size)
    strides = ((b.shape, b.stride()) for b in call.bs)
    key = (problem, call.preferred, call.a.stride(), call.a.dtype, *strides)
    return _choices.get(key, _choose, call, problem)


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


def tuned_gather(
    choice: KernelChoice[configs.AnyConfig],
    heap: Heap,
    call: configs.GatherKernelCall,
) -> tuple[KernelChoice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned."""
    if choice.algorithm == "copy_engine":
        return choice, ""
    if call.preferred or not tuner.is_tuning():
        return choice, tuner.FROM_MODEL
    a, bs, num_sms, split_k = call.a, call.bs, call.num_sms, call.split_k
    problem = call.problem(heap.world_size)
    m, k, ns, size = problem.m, problem.k, problem.ns, problem.world_size
    op = configs.EXCHANGED_OP if call.exchanged else f"{OP} of the last dimension" if split_k else OP
    kind = f"{op} {m} x {k} @ {bs[0].shape[0]} x {'+'.join(map(str, ns))}, {a.dtype}, {num_sms} SMs"
    if call.return_A:
        kind += ", A returned"
    if call.scaled is not None:
        kind += f", {call.scaled}"
    candidates: list[Candidate[configs.AnyConfig]] = [
        Candidate(config, configs.gather_layout(problem, config), algorithm_of(config))
        for _, config in configs.varied(configs.rank_gather_kernels(problem))
        if not isinstance(config, configs.CopiedConfig)  # the tuner's workspaces are not for copy engines
    ]
    results: list[torch.Tensor] = []

    def make(workspace: Workspace[Any], config: configs.AnyConfig, timeout_ns: int) -> Callable[[], None]:
        if not results:
            results.extend(results_of(call, size))
        kernel, given = fused_gather(workspace, call, config), gather_operands(config, call)
        return lambda: launch_prepared(workspace, config, kernel, given, results, timeout_ns)

    return tuner.tuned(heap, kind, choice, candidates, make)


Kernel: TypeAlias = (
    cuda_kernel.AllGatherMatmulPushes
    | AllGatherMatmulOneShot
    | AllGatherScaledMatmulPush
    | AllGatherProductsCopied
)


def fused_gather(
    workspace: Workspace[Any], call: configs.GatherKernelCall, config: configs.AnyConfig
) -> Kernel:
    """What launches calls like this one."""
    scales = call.scales
    if isinstance(config, OneShotConfig):
        if scales is None:
            return AllGatherMatmulOneShot(workspace, call.a, config, split_k=call.split_k)
        return AllGatherScaledMatmulOneShot(workspace, call, scales, config)
    if isinstance(config, configs.CopiedConfig):
        biases = [] if scales is None else scales.biases
        return AllGatherProductsCopied(workspace, call, [bias is not None for bias in biases])
    if scales is not None:
        return AllGatherScaledMatmulPush(workspace, call, scales, config)
    return cuda_kernel.AllGatherMatmulPushes(
        workspace, call.a, call.bs, config, num_sms=call.num_sms, return_A=call.return_A
    )


def gather_programs(
    config: configs.AnyConfig, call: configs.GatherKernelCall, world_size: int, rank: int
) -> Sequence[CompilableProgram]:
    """What such calls launch."""
    if isinstance(config, OneShotConfig):
        kernel = AllGatherMatmulOneShot if call.scaled is None else AllGatherScaledMatmulOneShot
        return [kernel.program(world_size, rank)]
    if isinstance(config, configs.CopiedConfig):
        return [acquire.PROGRAM]
    return cuda_kernel.push_programs(call.bs, config, return_A=call.return_A)


def launch_all_gather_matmul(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.GatherKernelCall,
    timeout_ns: int,
    op: str,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, of fp8 in numbers of 16 bits, and the products, each [W, m, N_i].

    With ``split_k`` [m, W * K] and [m, N_i].

    Args:
        op: whose call it is.
    """
    config, key = choice.config, _key(choice, call)
    kernel = workspace.prepared.get(key)
    if kernel is None:
        sizes = call.a.shape, *(b.shape for b in call.bs), call.a.dtype
        same = (op, *sizes, config, call.num_sms, call.return_A)
        kernel = make_together(workspace, op, key, same, lambda: fused_gather(workspace, call, config))
    results = results_of(call, workspace.world_size)
    launch_prepared(workspace, config, kernel, gather_operands(config, call), results, timeout_ns)
    return (results.pop() if call.return_A else None), results


def gather_operands(config: configs.AnyConfig, call: configs.GatherKernelCall) -> list[torch.Tensor]:
    """The shard, the Bs, and the scales' tensors: fp8 for kernel.cu in numbers of 16 bits, for torch's kernel as it
    is."""
    a, bs = call.a, list(call.bs)
    if call.scaled is not None and not isinstance(config, configs.GatherPushConfig):
        of_a, of_b = call.scaled.types
        a, bs = a.view(of_a), [b.t().view(of_b).t() for b in bs]
    return [a, *bs, *(() if call.scales is None else call.scales.tensors)]


def results_of(call: configs.GatherKernelCall, world_size: int) -> list[torch.Tensor]:
    """Memory for the products and, after them, for the gathered shards if they are wanted."""
    a, bs = call.a, call.bs
    rows = (call.rows(world_size),) if call.split_k else (world_size, a.shape[0])
    dtype = a.dtype if call.scaled is None else call.scaled.out_dtype
    products = [a.new_empty((*rows, b.shape[1]), dtype=dtype) for b in bs]
    return [*products, a.new_empty((*rows, bs[0].shape[0]))] if call.return_A else products


def gather_launcher(
    choice: KernelChoice[configs.AnyConfig], workspace: Workspace[Any], call: configs.GatherKernelCall
) -> Kernel | None:
    """What ``launch_all_gather_matmul`` launched, for further such calls; None once it is dropped."""
    return workspace.prepared.get(_key(choice, call))


def _key(choice: KernelChoice[configs.AnyConfig], call: configs.GatherKernelCall) -> tuple[Any, ...]:
    """What a kernel is kept under."""
    if call.scales is None:
        return (choice, call.return_A)
    biased = (bias is not None for bias in call.scales.biases)
    return (choice, call.return_A, *(b.stride() for b in call.scales.bs), *biased)


GATHER_STEPS = KernelSteps(
    choose_gather_kernel,
    gather_programs,
    tuned_gather,
    launch_all_gather_matmul,
    gather_launcher,
    gather_operands,
)
