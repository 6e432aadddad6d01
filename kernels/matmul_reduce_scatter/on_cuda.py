"""Which kernel computes reduce_scatter(A @ B) on CUDA, and its call.

16-bit operands go to kernel.cu; or, where little is scattered, to cuBLAS with a one-shot reduce-scatter behind it.
float32 goes to the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...symm_mem.heap.heap import Heap
from ...symm_mem.workspace import Workspace
from ..device.device_spec import DeviceSpec, device_spec_of
from ..device.gemm import gemm
from ..device.gemm.one_shot import OneShotConfig
from ..device.jit.launch import ALIGNMENT, compiling, why_not
from ..device.tuning import tuner
from ..device.tuning.benchmark import Candidate
from ..device.tuning.choice import KernelChoice, KernelChoices, make_together
from . import configs, host
from .cuda_kernel import MatmulReduceScatterPush
from .one_shot_kernel import MatmulReduceScatterOneShot
from .triton_kernel import TritonMatmulReduceScatter

_choices: KernelChoices[configs.AnyConfig] = KernelChoices()


def choose_scatter_kernel(
    a: torch.Tensor, b: torch.Tensor, world_size: int, num_sms: int, split_n: bool = False
) -> KernelChoice[configs.AnyConfig] | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.

    Args:
        a: [L, W, m, K]. b: [K, N]. Both begin at multiples of 16 bytes.
        split_n: ranks have columns of B of their own, not rows of A: a [1, 1, m, K], b [K, W * N].
    """
    spec = device_spec_of(b.device)
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), world_size, num_sms, split_n, spec)
    return _choices.get(key, _choose, a, b, world_size, num_sms, split_n, spec)


def _choose(
    a: torch.Tensor, b: torch.Tensor, world_size: int, num_sms: int, split_n: bool, spec: DeviceSpec
) -> KernelChoice[configs.AnyConfig] | str:
    if (reason := why_not(a, b)) is not None:
        return reason
    (batches, _, m, k), n = a.shape, _columns(b, world_size, split_n)
    if split_n and n * a.element_size() % ALIGNMENT:
        return f"scatter_dim: rows of {n} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    if a.dtype in gemm.DTYPES:
        problem = configs.MatmulReduceScatterProblem(m, n, k, world_size, num_sms, batches, split_n, spec)
        (_, config), *_ = configs.rank_scatter_kernels(problem)
        profitable = configs.scatter_is_profitable(problem)
        layout = configs.scatter_layout(m, n, config, world_size, num_sms, batches)
        return KernelChoice(_algorithm(config), config, layout, profitable)
    if split_n:
        return f"the last dimension is scattered, of {a.dtype}"
    stored = configs.choose_matmul_reduce_scatter(m, n, k, world_size, a.dtype, num_sms, batches)
    stored_in = configs.tiled_scatter_layout(m, n, a.dtype, world_size, stored, batches)
    return KernelChoice("tma_store", stored, stored_in, batches * m >= 64)


def _columns(b: torch.Tensor, world_size: int, split_n: bool) -> int:
    """N: of a rank's result."""
    return b.shape[1] // world_size if split_n else b.shape[1]


def _algorithm(config: configs.FusedConfig) -> str:
    return "one_shot" if isinstance(config, OneShotConfig) else "push"


def tuned_scatter(
    choice: KernelChoice[configs.AnyConfig],
    heap: Heap,
    a: torch.Tensor,
    b: torch.Tensor,
    terms: Sequence[torch.Tensor],
    num_sms: int,
    epilogue: configs.Epilogue,
    split_n: bool = False,
) -> tuple[KernelChoice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned. ``terms`` as for ``launch_matmul_reduce_scatter``, ``split_n`` as for ``choose_scatter_kernel``."""
    if isinstance(choice.config, configs.MatmulReduceScatterConfig):
        return choice, ""
    if not tuner.is_tuning():
        return choice, tuner.FROM_MODEL
    (batches, _, m, k), size = a.shape, heap.world_size
    n = _columns(b, size, split_n)
    op = f"{host.OP} of the last dimension" if split_n else host.OP
    kind = f"{op} {batches} x {size} x {m} x {k} @ {k} x {n}, {a.dtype} to {epilogue.out_dtype}"
    kind += f"{' + bias' * epilogue.bias}{' + residual' * epilogue.residual}, {num_sms} SMs"
    problem = configs.MatmulReduceScatterProblem(
        m, n, k, size, num_sms, batches, split_n, device_spec_of(b.device)
    )
    candidates: list[Candidate[configs.AnyConfig]] = [
        Candidate(c, configs.scatter_layout(m, n, c, size, num_sms, batches), _algorithm(c))
        for _, config in configs.rank_scatter_kernels(problem)
        for c in _both_ways(config)
    ]
    results: list[torch.Tensor] = []

    def make(workspace: Workspace[Any], config: configs.FusedConfig, timeout_ns: int) -> Callable[[], None]:
        if not results:
            results.append(a.new_empty((batches, m, n), dtype=epilogue.out_dtype))
        stream = torch._C._cuda_getCurrentRawStream(a.get_device())
        if isinstance(config, OneShotConfig):
            one_shot = MatmulReduceScatterOneShot(workspace, a, b, config, epilogue, split_n=split_n)
            return lambda: one_shot.call((a, b, *terms), results, timeout_ns, stream)
        kernel = MatmulReduceScatterPush(workspace, a, b, config, epilogue, num_sms=num_sms)
        operands, out = [x.data_ptr() for x in (a, b, *terms)], (results[0].data_ptr(),)
        return lambda: kernel.launch(workspace.next_buffer(), operands, out, timeout_ns, stream)

    return tuner.tuned(heap, kind, choice, candidates, make)


def _both_ways(config: configs.FusedConfig) -> list[configs.FusedConfig]:
    """With fragments staged and not, where that makes a difference."""
    if isinstance(config, OneShotConfig):
        return [config]
    return [config, replace(config, staged=not config.staged)]


def launch_matmul_reduce_scatter(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    a: torch.Tensor,
    b: torch.Tensor,
    terms: Sequence[torch.Tensor],
    num_sms: int,
    timeout_ns: int,
    epilogue: configs.Epilogue,
    split_n: bool = False,
) -> torch.Tensor:
    """The local part of the sum, behind the epilogue, [L, m, N].

    Args:
        terms: the bias and the residual that the epilogue names, contiguous. They begin at multiples of 16 bytes.
        split_n: as for ``choose_scatter_kernel``.
    """
    config, key = choice.config, (choice, epilogue)
    columns = _columns(b, workspace.world_size, split_n)
    out = a.new_empty((a.shape[0], a.shape[2], columns), dtype=epilogue.out_dtype)
    kernel = workspace.prepared.get(key)
    if kernel is None:

        def make() -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | TritonMatmulReduceScatter:
            if isinstance(config, OneShotConfig):
                return MatmulReduceScatterOneShot(workspace, a, b, config, epilogue, split_n=split_n)
            if isinstance(config, configs.ScatterPushConfig):
                return MatmulReduceScatterPush(workspace, a, b, config, epilogue, num_sms=num_sms)
            made = TritonMatmulReduceScatter(workspace, a, b, config, epilogue, num_sms=num_sms)
            with compiling():  # Triton compiles at a launch
                made.launch(0, a, b, out, *terms, timeout_ns=timeout_ns)
            return made

        same = (host.OP, a.shape, b.shape, a.dtype, epilogue, config, num_sms, split_n)
        kernel = make_together(workspace, host.OP, key, same, make)
    stream = torch._C._cuda_getCurrentRawStream(a.get_device())
    if isinstance(kernel, MatmulReduceScatterOneShot):
        kernel.call((a, b, *terms), (out,), timeout_ns, stream)
        return out
    buffer = workspace.next_buffer()
    if isinstance(kernel, MatmulReduceScatterPush):
        operands = [x.data_ptr() for x in (a, b, *terms)]
        kernel.launch(buffer, operands, (out.data_ptr(),), timeout_ns, stream)
    else:
        kernel.launch(buffer, a, b, out, *terms, timeout_ns=timeout_ns)
    return out


def scatter_launcher(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Any],
    epilogue: configs.Epilogue,
) -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | None:
    """What ``launch_matmul_reduce_scatter`` launched, for further such calls; None for the Triton kernel, or once it is
    dropped."""
    triton = isinstance(choice.config, configs.MatmulReduceScatterConfig)
    return None if triton else workspace.prepared.get((choice, epilogue))
