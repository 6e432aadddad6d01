"""Which kernel computes all_gather(A) @ B on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is gathered and A is not returned, to a one-shot all-gather with
cuBLAS after it. Others (float32), and Bs of both memory orders in one call, go to the Triton kernel with copy engines.
That takes whole rows only: with the last dimension gathered such calls run unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.workspace import Workspace
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig, algorithm_of, likeliest
from ..device.gemm.supported import why_last_dim_not_gathered
from ..device.jit.ahead import CompilableProgram
from ..device.jit.launch import ALIGNMENT, is_transposed, why_not
from ..device.tuning import tuner
from ..device.tuning.benchmark import Candidate
from ..device.tuning.choice import KernelChoice, KernelChoices, make_together
from . import configs, copied_products, cuda_kernel, host
from .one_shot_kernel import AllGatherMatmulOneShot
from .triton_kernel import TritonAllGatherMatmul

_choices: KernelChoices[configs.AnyConfig] = KernelChoices()


# From a workspace, a configuration, tensors for the results, and the timeout in nanoseconds: a launch.
Prepare: TypeAlias = Callable[
    [Workspace[Any], configs.FusedConfig, Sequence[torch.Tensor], int], Callable[[], None]
]


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
    a, bs, m, k = call.a, call.bs, problem.m, problem.k
    for i, b in enumerate(bs):
        if b.shape[1] == 0:
            return f"Bs[{i}] has no columns"
        if (reason := why_not(a, b)) is not None:
            return f"Bs[{i}]: {reason}"
    if k * a.element_size() % ALIGNMENT:  # of a part of B, where B as a whole may be fine
        return f"K: rows of {k} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    if a.dtype in gemm.DTYPES:
        if len({is_transposed(b) for b in bs}) > 1:
            return "Bs: some lie in rows and some in columns"
        us, config = likeliest(configs.rank_gather_kernels(problem), call.preferred)
        layout = configs.gather_layout(problem, config)
        profitable = configs.gather_is_profitable(problem)
        return KernelChoice(algorithm_of(config), config, layout, profitable, us)
    if call.split_k and (reason := why_last_dim_not_gathered(a.dtype, call.scaled)) is not None:
        return reason
    world_size = problem.world_size
    copied = copied_products.configure(call, world_size)
    layout = configs.copied_gather_layout(m, k, a.dtype, world_size, copied)
    n, itemsize = sum(problem.ns), a.element_size()
    profitable = configs.copy_engine_is_profitable(m, n, k, world_size, itemsize)
    return KernelChoice("copy_engine", copied, layout, profitable)


def tuned_gather(
    choice: KernelChoice[configs.AnyConfig],
    heap: Heap,
    call: configs.GatherKernelCall,
    prepare: Prepare | None = None,
) -> tuple[KernelChoice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned.

    Args:
        prepare: makes a launch of such a call with a configuration; None for one of 16 bits.
    """
    if choice.algorithm == "copy_engine":
        return choice, ""
    if call.preferred or not tuner.is_tuning():
        return choice, tuner.FROM_MODEL
    a, bs, num_sms, split_k = call.a, call.bs, call.num_sms, call.split_k
    problem = call.problem(heap.world_size)
    m, k, ns, size = problem.m, problem.k, problem.ns, problem.world_size
    op = f"{host.OP} of the last dimension" if split_k else host.OP
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

    def make(workspace: Workspace[Any], config: configs.FusedConfig, timeout_ns: int) -> Callable[[], None]:
        if not results:
            results.extend(results_of(call, size))
        if prepare is not None:
            return prepare(workspace, config, results, timeout_ns)
        stream = current_stream_of(a)
        kernels: Any = fused_gather(workspace, call, config)
        if isinstance(config, OneShotConfig):
            return lambda: kernels.call((a, *bs), results, timeout_ns, stream)
        operands, addresses = [x.data_ptr() for x in (a, *bs)], [x.data_ptr() for x in results]
        return lambda: kernels.launch(workspace.next_buffer(), operands, addresses, timeout_ns, stream)

    return tuner.tuned(heap, kind, choice, candidates, make)


def fused_gather(
    workspace: Workspace[Any], call: configs.GatherKernelCall, config: configs.FusedConfig
) -> cuda_kernel.AllGatherMatmulPushes | AllGatherMatmulOneShot:
    """What launches calls like this one, of 16 bits."""
    if isinstance(config, OneShotConfig):
        return AllGatherMatmulOneShot(workspace, call.a, config)
    assert isinstance(config, configs.GatherPushConfig)
    return cuda_kernel.AllGatherMatmulPushes(
        workspace, call.a, call.bs, config, num_sms=call.num_sms, return_A=call.return_A
    )


def gather_programs(
    config: configs.AnyConfig, call: configs.GatherKernelCall, world_size: int, rank: int
) -> Sequence[CompilableProgram]:
    """What such calls launch, of 16 bits or float32."""
    if isinstance(config, configs.AllGatherMatmulConfig):
        return copied_products.copied_programs(call, config, world_size)
    if isinstance(config, OneShotConfig):
        return [AllGatherMatmulOneShot.program(world_size, rank)]
    assert isinstance(config, configs.GatherPushConfig)
    return cuda_kernel.push_programs(call.bs, config, return_A=call.return_A)


def launch_all_gather_matmul(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    call: configs.GatherKernelCall,
    timeout_ns: int,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i].

    With ``split_k`` [m, W * K] and [m, N_i].
    """
    a, bs, num_sms, return_A = call.a, call.bs, call.num_sms, call.return_A
    config = choice.config
    key = (choice, return_A)
    kernels: Any = workspace.prepared.get(key)
    if kernels is None:

        def make() -> (
            cuda_kernel.AllGatherMatmulPushes | AllGatherMatmulOneShot | list[TritonAllGatherMatmul]
        ):
            if isinstance(config, configs.AllGatherMatmulConfig):
                return copied_products.prepare_gather_kernels(workspace, call, config, timeout_ns)
            return fused_gather(workspace, call, config)

        same = (host.OP, a.shape, *(b.shape for b in bs), a.dtype, config, num_sms, return_A)
        kernels = make_together(workspace, host.OP, key, same, make)
    if isinstance(config, configs.AllGatherMatmulConfig):
        return copied_products.copy_engine_all_gather_matmul(workspace, kernels, call, config, timeout_ns)
    results = results_of(call, workspace.world_size)
    stream = current_stream_of(a)
    if isinstance(config, OneShotConfig):
        kernels.call((a, *bs), results, timeout_ns, stream)
    else:
        operands, addresses = [x.data_ptr() for x in (a, *bs)], [x.data_ptr() for x in results]
        kernels.launch(workspace.next_buffer(), operands, addresses, timeout_ns, stream)
    return (results.pop() if return_A else None), results


def results_of(call: configs.GatherKernelCall, world_size: int) -> list[torch.Tensor]:
    """Memory for the products and, after them, for the gathered shards if they are wanted."""
    a, bs = call.a, call.bs
    rows = a.shape[:1] if call.split_k else (world_size, a.shape[0])
    dtype = a.dtype if call.scaled is None else call.scaled.out_dtype
    products = [a.new_empty((*rows, b.shape[1]), dtype=dtype) for b in bs]
    return [*products, a.new_empty((*rows, bs[0].shape[0]))] if call.return_A else products


def gather_launcher(
    choice: KernelChoice[configs.AnyConfig], workspace: Workspace[Any], return_A: bool
) -> cuda_kernel.AllGatherMatmulPushes | AllGatherMatmulOneShot | None:
    """What ``launch_all_gather_matmul`` launched, for further such calls; None for copy engines, or once it is
    dropped."""
    return (
        None
        if isinstance(choice.config, configs.AllGatherMatmulConfig)
        else workspace.prepared.get((choice, return_A))
    )
