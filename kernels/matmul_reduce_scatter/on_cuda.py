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
from ..device.chip import Chip, chip_of
from ..device.choice import Choice, Choices, make_together
from ..device.contest import Candidate
from ..device.launch import ALIGNMENT, compiling, why_not
from ..device.one_shot import OneShotConfig
from . import configs, host
from .cuda_kernel import MatmulReduceScatterPush
from .one_shot_kernel import MatmulReduceScatterOneShot
from .triton_kernel import MatmulReduceScatter

_choices: Choices[configs.AnyConfig] = Choices()


def choose(
    a: torch.Tensor, b: torch.Tensor, world_size: int, num_sms: int, split_n: bool = False
) -> Choice[configs.AnyConfig] | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.

    Args:
        a: [L, W, m, K]. b: [K, N]. Both begin at multiples of 16 bytes.
        split_n: ranks have columns of B of their own, not rows of A: a [1, 1, m, K], b [K, W * N].
    """
    chip = chip_of(b.device)
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), world_size, num_sms, split_n, chip)
    return _choices.get(key, _choose, a, b, world_size, num_sms, split_n, chip)


def _choose(
    a: torch.Tensor, b: torch.Tensor, world_size: int, num_sms: int, split_n: bool, chip: Chip
) -> Choice[configs.AnyConfig] | str:
    if (reason := why_not(a, b)) is not None:
        return reason
    (batches, _, m, k), n = a.shape, _columns(b, world_size, split_n)
    if split_n and n * a.element_size() % ALIGNMENT:
        return f"scatter_dim: rows of {n} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    if a.dtype in gemm.DTYPES:
        problem = configs.Problem(m, n, k, world_size, num_sms, batches, split_n, chip)
        (_, config), *_ = configs.fused_ranked(problem)
        pays = configs.fusing_pays(problem)
        layout = configs.fused_layout(m, n, config, world_size, num_sms, batches)
        return Choice(_algorithm(config), config, layout, pays)
    if split_n:
        return f"the last dimension is scattered, of {a.dtype}"
    stored = configs.choose(m, n, k, world_size, a.dtype, num_sms, batches)
    stored_in = configs.layout(m, n, a.dtype, world_size, stored, batches)
    return Choice("tma_store", stored, stored_in, batches * m >= 64)


def _columns(b: torch.Tensor, world_size: int, split_n: bool) -> int:
    """N: of a rank's result."""
    return b.shape[1] // world_size if split_n else b.shape[1]


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
    split_n: bool = False,
) -> tuple[Choice[configs.AnyConfig], str]:
    """What to run instead of the model's choice, if the tuner is on, and where it comes from; "" where nothing is
    tuned. ``terms`` as for ``run``, ``split_n`` as for ``choose``."""
    if isinstance(choice.config, configs.Config):
        return choice, ""
    if not tuner.is_on():
        return choice, tuner.FROM_MODEL
    (batches, _, m, k), size = a.shape, heap.world_size
    n = _columns(b, size, split_n)
    op = f"{host.OP} of the last dimension" if split_n else host.OP
    kind = f"{op} {batches} x {size} x {m} x {k} @ {k} x {n}, {a.dtype} to {epilogue.out_dtype}"
    kind += f"{' + bias' * epilogue.bias}{' + residual' * epilogue.residual}, {num_sms} SMs"
    problem = configs.Problem(m, n, k, size, num_sms, batches, split_n, chip_of(b.device))
    candidates: list[Candidate[configs.AnyConfig]] = [
        Candidate(c, configs.fused_layout(m, n, c, size, num_sms, batches), _algorithm(c))
        for _, config in configs.fused_ranked(problem)
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
    split_n: bool = False,
) -> torch.Tensor:
    """The own part of the sum with what the epilogue makes of it, [L, m, N].

    Args:
        terms: the bias and the residual that the epilogue names, contiguous. They begin at multiples of 16 bytes.
        split_n: as for ``choose``.
    """
    config, key = choice.config, (choice, epilogue)
    columns = _columns(b, workspace.world_size, split_n)
    out = a.new_empty((a.shape[0], a.shape[2], columns), dtype=epilogue.out_dtype)
    kernel = workspace.prepared.get(key)
    if kernel is None:

        def make() -> MatmulReduceScatterPush | MatmulReduceScatterOneShot | MatmulReduceScatter:
            if isinstance(config, OneShotConfig):
                return MatmulReduceScatterOneShot(workspace, a, b, config, epilogue, split_n=split_n)
            if isinstance(config, configs.PushConfig):
                return MatmulReduceScatterPush(workspace, a, b, config, epilogue, num_sms=num_sms)
            made = MatmulReduceScatter(workspace, a, b, config, epilogue, num_sms=num_sms)
            with compiling():  # Triton compiles at a launch
                made.launch(0, a, b, out, *terms, timeout_ns=timeout_ns)
            return made

        same = (host.OP, a.shape, b.shape, a.dtype, epilogue, config, num_sms, split_n)
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
    """What ``run`` launched, for more calls like it; None for the Triton kernel, or where it is forgotten already."""
    triton = isinstance(choice.config, configs.Config)
    return None if triton else workspace.prepared.get((choice, epilogue))
