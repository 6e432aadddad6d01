"""Which kernel computes reduce_scatter(A @ B) on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is scattered, to cuBLAS with a one-shot reduce-scatter after it.
float32 goes to the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.workspace import Workspace
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig, algorithm_of, launch_prepared, likeliest
from ..device.gemm.supported import why_last_dim_not_scattered
from ..device.jit.ahead import CompilableProgram
from ..device.jit.launch import ALIGNMENT, compiling, is_transposed, why_not
from ..device.tuning import tuner
from ..device.tuning.benchmark import Candidate
from ..device.tuning.choice import KernelChoice, KernelChoices, make_together
from . import configs, host
from .cuda_kernel import MatmulReduceScatterPush, ScaledMatmulReduceScatterPush, scatter_program
from .one_shot_kernel import MatmulReduceScatterOneShot, ScaledMatmulReduceScatterOneShot
from .triton_kernel import TritonMatmulReduceScatter, triton_scatter_program

_choices: KernelChoices[configs.AnyConfig] = KernelChoices()


def choose_scatter_kernel(
    call: configs.ScatterKernelCall, world_size: int
) -> KernelChoice[configs.AnyConfig] | str:
    """How to run a call, or why no kernel can. What its epilogue adds makes no difference.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.
    """
    problem = call.problem(world_size)
    key = (problem, call.preferred, call.a.dtype, *((x.shape, x.stride()) for x in call.factors))
    return _choices.get(key, _choose, call, problem)


def _choose(
    call: configs.ScatterKernelCall, problem: configs.MatmulReduceScatterProblem
) -> KernelChoice[configs.AnyConfig] | str:
    a = call.a
    if (reason := why_not(a, call.b)) is not None:
        return reason
    if problem.split_n and problem.n * a.element_size() % ALIGNMENT:
        return f"scatter_dim: rows of {problem.n} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    if a.dtype in gemm.DTYPES:
        us, config = likeliest(configs.rank_scatter_kernels(problem), call.preferred)
        layout = configs.scatter_layout(config, problem)
        profitable = configs.scatter_is_profitable(problem)
        return KernelChoice(algorithm_of(config), config, layout, profitable, us)
    if problem.split_n and (why := why_last_dim_not_scattered(a.dtype, call.scaled, problem.n)) is not None:
        return why
    stored = configs.choose_matmul_reduce_scatter(problem, a.dtype)
    stored_in = configs.tiled_scatter_layout(stored, problem, a.dtype)
    return KernelChoice("tma_store", stored, stored_in, problem.batches * problem.m >= 64)


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


def tuned_scatter(
    choice: KernelChoice[configs.AnyConfig],
    heap: Heap,
    call: configs.ScatterKernelCall,
    scales: Sequence[torch.Tensor] = (),
) -> tuple[KernelChoice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned.

    Args:
        scales: of fp8 operands, as ``scaled_operands`` takes them.
    """
    if isinstance(choice.config, configs.MatmulReduceScatterConfig):
        return choice, ""
    if call.preferred or not tuner.is_tuning():
        return choice, tuner.FROM_MODEL
    a, b, epilogue, terms, num_sms = call.a, call.b, call.epilogue, call.terms, call.num_sms
    problem = call.problem(heap.world_size)
    batches, m, n, k, size = problem.batches, problem.m, problem.n, problem.k, problem.world_size
    op = f"{host.OP} of the last dimension" if call.split_n else host.OP
    kind = f"{op} {batches} x {size} x {m} x {k} @ {k} x {n}, {a.dtype} to {epilogue.out_dtype}"
    kind += f"{' + bias' * epilogue.bias}{' + residual' * epilogue.residual}, {num_sms} SMs"
    if call.more:
        kind += f", K of {'+'.join(str(x.shape[-1]) for x in call.factors[::2])}"
    if call.scaled is not None:
        kind += f", {call.scaled}{' + bias' * (len(scales) > 2)}"
    candidates: list[Candidate[configs.AnyConfig]] = [
        Candidate(c, configs.scatter_layout(c, problem), algorithm_of(c))
        for _, config in configs.rank_scatter_kernels(problem)
        if not (call.more and isinstance(config, OneShotConfig))
        for c in _both_ways(config)
    ]
    results: list[torch.Tensor] = []

    def make(workspace: Workspace[Any], config: configs.FusedConfig, timeout_ns: int) -> Callable[[], None]:
        if not results:
            results.append(a.new_empty((batches, m, n), dtype=epilogue.out_dtype))
        if scales:
            given = scaled_operands(config, call, scales)
            scaled = _scaled_kernel(workspace, call, given, config)
            return lambda: launch_prepared(workspace, config, scaled, given, results, timeout_ns)
        stream = current_stream_of(a)
        kernel: Any = fused_scatter(workspace, call, config)
        if isinstance(config, OneShotConfig):
            return lambda: kernel.call((a, b, *terms), results, timeout_ns, stream)
        operands, out = [x.data_ptr() for x in (*call.factors, *terms)], (results[0].data_ptr(),)
        return lambda: kernel.launch(workspace.next_buffer(), operands, out, timeout_ns, stream)

    return tuner.tuned(heap, kind, choice, candidates, make)


def _both_ways(config: configs.FusedConfig) -> list[configs.FusedConfig]:
    """With fragments staged and not, where that makes a difference."""
    if isinstance(config, OneShotConfig):
        return [config]
    return [config, replace(config, staged=not config.staged)]


def fused_scatter(
    workspace: Workspace[Any], call: configs.ScatterKernelCall, config: configs.FusedConfig
) -> MatmulReduceScatterPush | MatmulReduceScatterOneShot:
    """What launches calls like this one, of 16 bits."""
    if isinstance(config, OneShotConfig):
        return MatmulReduceScatterOneShot(
            workspace, call.a, call.b, config, call.epilogue, split_n=call.split_n
        )
    return MatmulReduceScatterPush(workspace, call.factors, config, call.epilogue, num_sms=call.num_sms)


def scatter_programs(
    config: configs.AnyConfig, call: configs.ScatterKernelCall, world_size: int, rank: int
) -> Sequence[CompilableProgram]:
    """What such calls launch."""
    epilogue, ranks = call.epilogue, (world_size, rank)
    if isinstance(config, configs.MatmulReduceScatterConfig):
        return [triton_scatter_program(call.a, call.b, config, epilogue, rank)]
    if isinstance(config, OneShotConfig):
        sent = call.a.dtype if call.scaled is None else epilogue.out_dtype
        return [MatmulReduceScatterOneShot.program(sent, epilogue, ranks)]
    return [scatter_program(call.b, config, epilogue, ranks)]


def launch_matmul_reduce_scatter(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.ScatterKernelCall,
    timeout_ns: int,
) -> torch.Tensor:
    """The own part of the sum with what the epilogue makes of it, [L, m, N]."""
    a, b, epilogue, terms, num_sms = call.a, call.b, call.epilogue, call.terms, call.num_sms
    config, key = choice.config, _key(choice, call)
    columns = call.columns(workspace.world_size)
    out = a.new_empty((a.shape[0], a.shape[2], columns), dtype=epilogue.out_dtype)
    kernel: Any = workspace.prepared.get(key)
    if kernel is None:

        def make() -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | TritonMatmulReduceScatter:
            if not isinstance(config, configs.MatmulReduceScatterConfig):
                return fused_scatter(workspace, call, config)
            made = TritonMatmulReduceScatter(workspace, a, b, config, epilogue, num_sms=num_sms)
            with compiling():  # Triton compiles at a launch
                made.launch(0, a, b, out, *terms, timeout_ns=timeout_ns)
            return made

        # Of all products: whether a rank stacks their factors or not is its own affair.
        depth = sum(x.shape[-1] for x in call.factors[::2])
        same = (
            *(host.OP, a.shape[:-1], depth, b.shape[1], a.dtype, epilogue, config, num_sms, call.split_n),
        )
        kernel = make_together(workspace, host.OP, key, same, make)
    stream = current_stream_of(a)
    if isinstance(config, OneShotConfig):
        kernel.call((a, b, *terms), (out,), timeout_ns, stream)
        return out
    buffer = workspace.next_buffer()
    if isinstance(config, configs.ScatterPushConfig):
        operands = [x.data_ptr() for x in (*call.factors, *terms)]
        kernel.launch(buffer, operands, (out.data_ptr(),), timeout_ns, stream)
    else:
        kernel.launch(buffer, a, b, out, *terms, timeout_ns=timeout_ns)
    return out


def scatter_launcher(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.ScatterKernelCall,
) -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | None:
    """What ``launch_matmul_reduce_scatter`` launched, for further such calls; None for the Triton kernel, or once it is
    dropped."""
    triton = isinstance(choice.config, configs.MatmulReduceScatterConfig)
    return None if triton else workspace.prepared.get(_key(choice, call))


def _key(choice: KernelChoice[configs.AnyConfig], call: configs.ScatterKernelCall) -> tuple[Any, ...]:
    """What a kernel is kept under: a choice, of a product of the same size, says nothing of its parts."""
    return (choice, call.epilogue, *((x.shape[-1], x.stride()) for x in call.more))


ScaledScatterKernel: TypeAlias = ScaledMatmulReduceScatterPush | ScaledMatmulReduceScatterOneShot


def scaled_operands(
    config: configs.AnyConfig, call: configs.ScatterKernelCall, scales: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A, B, their scales and the bias, if there is one: for kernel.cu as in ``ScatterScales``, for torch's kernel as
    that takes them.

    Args:
        scales: of A and of B, and the bias.
    """
    pair = [call.a, call.b]
    if isinstance(config, OneShotConfig):
        assert call.scaled is not None
        of_a, of_b = call.scaled.types
        pair = [call.a.view(of_a), call.b.t().view(of_b).t()]
    return [*pair, *scales]


def _scaled_kernel(
    workspace: Workspace[Any],
    call: configs.ScatterKernelCall,
    given: Sequence[torch.Tensor],
    config: configs.AnyConfig,
) -> ScaledScatterKernel:
    if isinstance(config, OneShotConfig):
        return ScaledMatmulReduceScatterOneShot(workspace, call, config)
    assert isinstance(config, configs.ScatterPushConfig)
    return ScaledMatmulReduceScatterPush(workspace, call, given[3].stride(), config)


def launch_scaled_matmul_reduce_scatter(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.ScatterKernelCall,
    given: Sequence[torch.Tensor],
    timeout_ns: int,
) -> torch.Tensor:
    """The own part of the sum, [L, m, N], of fp8 operands.

    Args:
        given: what ``scaled_operands`` returns for the choice.
    """
    config, a = choice.config, call.a
    columns = call.columns(workspace.world_size)
    out = a.new_empty((a.shape[0], a.shape[2], columns), dtype=call.epilogue.out_dtype)
    kernel = scaled_scatter_launcher(choice, workspace, call, given)
    if kernel is None:
        same = (configs.SCALED_OP, a.shape, call.b.shape, call.epilogue, config, call.num_sms, call.split_n)
        kernel = make_together(
            *(workspace, configs.SCALED_OP, _scaled_key(choice, call, given), same),
            lambda: _scaled_kernel(workspace, call, given, config),
        )
    launch_prepared(workspace, config, kernel, given, [out], timeout_ns)
    return out


def scaled_scatter_launcher(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.ScatterKernelCall,
    given: Sequence[torch.Tensor],
) -> ScaledScatterKernel | None:
    """What ``launch_scaled_matmul_reduce_scatter`` launched, for further such calls; None once it is dropped."""
    return workspace.prepared.get(_scaled_key(choice, call, given))


def _scaled_key(
    choice: KernelChoice[configs.AnyConfig], call: configs.ScatterKernelCall, given: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    return (choice, call.epilogue, call.a.stride(), given[3].stride())
