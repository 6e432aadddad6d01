"""Which kernel computes reduce_scatter(A @ B) on CUDA, and the call of it.

16-bit operands go to kernel.cu; or, where little is scattered, to cuBLAS, and what comes of it in one shot to all
ranks. float32 goes to the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...symm_mem.heap import Heap
from ...symm_mem.workspace import Workspace
from ..device import gemm, tuner
from ..device.choice import Choice, Choices, make_together
from ..device.contest import Candidate
from ..device.launch import compiling, why_not
from ..device.one_shot import OneShotConfig
from . import configs, host
from .cuda_kernel import MatmulReduceScatterPush
from .one_shot_kernel import MatmulReduceScatterOneShot
from .triton_kernel import MatmulReduceScatter

_choices: Choices[configs.AnyConfig] = Choices()


def choose(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> Choice[configs.AnyConfig] | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.

    Args:
        a: [L, W, m, K]. b: [K, N]. Both begin at multiples of 16 bytes.
    """
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), num_sms)
    return _choices.get(key, _choose, a, b, num_sms)


def _choose(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> Choice[configs.AnyConfig] | str:
    if (reason := why_not(a, b)) is not None:
        return reason
    (batches, world_size, m, k), n = a.shape, b.shape[1]
    if a.dtype in gemm.DTYPES:
        (_, config), *_ = configs.fused_ranked(m, n, k, world_size, num_sms, batches)
        pays = configs.fusing_pays(m, n, k, world_size, num_sms, batches)
        needs = configs.fused_needs(m, n, config, world_size, num_sms, batches)
        return Choice(_algorithm(config), config, *needs, pays)
    stored = configs.choose(m, n, k, world_size, a.dtype, num_sms, batches)
    nbytes = world_size * batches * m * n * a.element_size()
    flags = configs.flags_per_rank(m, n, stored, batches)
    return Choice("tma_store", stored, nbytes, flags, batches * m >= 64)


def _algorithm(config: configs.FusedConfig) -> str:
    return "one_shot" if isinstance(config, OneShotConfig) else "push"


def tuned(
    choice: Choice[configs.AnyConfig],
    heap: Heap,
    a: torch.Tensor,
    b: torch.Tensor,
    terms: Sequence[torch.Tensor],
    num_sms: int,
    epilogue: configs.Epilogue,
) -> tuple[Choice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned. ``terms`` as for ``run``."""
    if isinstance(choice.config, configs.Config):
        return choice, ""
    if not tuner.is_on():
        return choice, tuner.FROM_MODEL
    (batches, size, m, k), n = a.shape, b.shape[1]
    kind = f"{host.OP} {batches} x {size} x {m} x {k} @ {k} x {n}, {a.dtype} to {epilogue.out_dtype}"
    kind += f"{' + bias' * epilogue.bias}{' + residual' * epilogue.residual}, {num_sms} SMs"
    candidates: list[Candidate[configs.AnyConfig]] = [
        Candidate(c, *configs.fused_needs(m, n, c, size, num_sms, batches), _algorithm(c))
        for _, config in configs.fused_ranked(m, n, k, size, num_sms, batches)
        for c in _both_ways(config)
    ]
    results: list[torch.Tensor] = []

    def make(workspace: Workspace[Any], config: configs.FusedConfig, timeout_ns: int) -> Callable[[], None]:
        if not results:
            results.append(a.new_empty((batches, m, n), dtype=epilogue.out_dtype))
        stream = torch._C._cuda_getCurrentRawStream(a.get_device())
        if isinstance(config, OneShotConfig):
            one_shot = MatmulReduceScatterOneShot(workspace, a, b, config, epilogue)
            return lambda: one_shot.call((a, b, *terms), results, timeout_ns, stream)
        kernel = MatmulReduceScatterPush(workspace, a, b, config, epilogue, num_sms=num_sms)
        operands, out = [x.data_ptr() for x in (a, b, *terms)], (results[0].data_ptr(),)
        return lambda: kernel.launch(workspace.next_half(), operands, out, timeout_ns, stream)

    return tuner.tuned(heap, kind, choice, candidates, make)


def _both_ways(config: configs.FusedConfig) -> list[configs.FusedConfig]:
    """With parts staged and not, where that makes a difference."""
    if isinstance(config, OneShotConfig):
        return [config]
    return [config, replace(config, staged=not config.staged)]


def run(
    choice: Choice[configs.AnyConfig],
    workspace: Workspace[Any],
    a: torch.Tensor,
    b: torch.Tensor,
    terms: Sequence[torch.Tensor],
    num_sms: int,
    timeout_ns: int,
    epilogue: configs.Epilogue,
) -> torch.Tensor:
    """The own part of the sum with what the epilogue makes of it, [L, m, N].

    Args:
        terms: the bias and the residual that the epilogue names, contiguous. They begin at multiples of 16 bytes.
    """
    config, key = choice.config, (choice, epilogue)
    out = a.new_empty((a.shape[0], a.shape[2], b.shape[1]), dtype=epilogue.out_dtype)
    kernel = workspace.prepared.get(key)
    if kernel is None:

        def make() -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | MatmulReduceScatter:
            if isinstance(config, OneShotConfig):
                return MatmulReduceScatterOneShot(workspace, a, b, config, epilogue)
            if isinstance(config, configs.PushConfig):
                return MatmulReduceScatterPush(workspace, a, b, config, epilogue, num_sms=num_sms)
            made = MatmulReduceScatter(workspace, a, b, config, epilogue, num_sms=num_sms)
            with compiling():  # Triton compiles at a launch
                made.launch(0, a, b, out, *terms, timeout_ns=timeout_ns)
            return made

        same = (host.OP, a.shape, b.shape, a.dtype, epilogue, config, num_sms)
        kernel = make_together(workspace, host.OP, key, same, make)
    stream = torch._C._cuda_getCurrentRawStream(a.get_device())
    if isinstance(kernel, MatmulReduceScatterOneShot):
        kernel.call((a, b, *terms), (out,), timeout_ns, stream)
        return out
    half = workspace.next_half()
    if isinstance(kernel, MatmulReduceScatterPush):
        operands = [x.data_ptr() for x in (a, b, *terms)]
        kernel.launch(half, operands, (out.data_ptr(),), timeout_ns, stream)
    else:
        kernel.launch(half, a, b, out, *terms, timeout_ns=timeout_ns)
    return out


def launcher(
    choice: Choice[configs.AnyConfig],
    workspace: Workspace[Any],
    epilogue: configs.Epilogue,
) -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | None:
    """What ``run`` launched, for more calls like it; None for the Triton kernel."""
    triton = isinstance(choice.config, configs.Config)
    return None if triton else workspace.prepared[choice, epilogue]
