"""The table of kernels, as ``python -m weft kernels`` prints it, and what of it runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ...kernels.device.capability import (
    ARCHS,
    CARDS,
    KERNELS,
    Capability,
    KernelRow,
    takes_untested,
    why_no_kernel,
)
from .gpus import Gpu, visible_gpus

_OPS = {
    "all-reduces": "all_reduce",
    "all-gathers": "all_gather",
    "reduce-scatters": "reduce_scatter",
    "all-to-alls": "all_to_all",
    "norms": "all_reduce_rms_norm",
    "norms to fp8": "all_reduce_rms_norm_quant",
    "collectives on copy engines": "async_collectives",
    "transfers": "transfer",
    "matmul + all-reduce": "matmul_all_reduce",
    "all-gather + matmul": "all_gather_matmul",
    "matmul + reduce-scatter": "matmul_reduce_scatter",
    "matmul + all-gather": "matmul_all_gather",
    "all-gather + fp8 matmul": "all_gather_scaled_matmul",
    "fp8 matmul + reduce-scatter": "scaled_matmul_reduce_scatter",
    "grouped matmul": "grouped_matmul",
    "routing of experts": "moe_route",
    "tokens to experts": "moe_dispatch",
    "losses of a shared vocabulary": "linear_cross_entropy",
}
_OF_ONE_RANK = "grouped matmul", "routing of experts"  # between exchanges
_WITHOUT_GEMM = "around cuBLAS's, by one-shot exchanges or copy engines"
_GEMM = "all_gather_matmul/kernel.cu"


def kernels_text(gpus: list[Gpu] | str | None = None) -> str:
    """All kernels, and what runs here. ``gpus``: those of this process, or why there are none; by default it asks."""
    gpus = visible_gpus() if gpus is None else gpus
    lines = ["Kernels"]
    for name, kernel in KERNELS.items():
        lines += [f"  {name}", *(f"    {line}" for line in _of_kernel(kernel))]
    lines += ["", "Architectures"]
    lines += [f"  {arch}: {CARDS[capability]}" for capability, arch in ARCHS.items()]
    lines += ["", "Here"]
    if isinstance(gpus, str):
        lines.append(f"  no GPU: {gpus}")
    else:
        for capability in dict.fromkeys(gpu.capability for gpu in gpus):
            lines += [f"  {line}" for line in what_runs_on(capability)]
    return "\n".join(lines)


def _of_kernel(kernel: KernelRow) -> Iterator[str]:
    yield f"needs {kernel.needs or 'nothing else'}"
    if ran := ", ".join(ARCHS[capability] for capability in kernel.ran):
        yield f"run on {ran}: {kernel.cards}, {kernel.date} (bench/results/{kernel.results})"
    only = [arch for capability, arch in ARCHS.items() if capability in {*kernel.archs} - {*kernel.ran}]
    if only:
        yield f"only compiled for {', '.join(only)}"


def what_runs_on(capability: Capability) -> Iterator[str]:
    """Lines: what of weft runs on GPUs of a compute capability, and why other ops do not."""
    if capability not in ARCHS:
        yield why_no_kernel("all_reduce", capability) or ""
        return
    arch, whys = ARCHS[capability], {what: why_no_kernel(op, capability) for what, op in _OPS.items()}
    runs = [what for what, why in whys.items() if why is None]
    tested = any(capability in kernel.ran for kernel in KERNELS.values())
    yield f"{arch} ({CARDS[capability]}): " + (
        "float32, bfloat16 and float16 on weft's kernels where that is profitable"
        if tested
        else "kernels were only compiled for it, and run on no such GPU"
    )
    if tested:
        return
    if not takes_untested():
        could = [what for what, op in _OPS.items() if _compiles(op, capability)]
        yield "all ops run unfused over NCCL"
        yield f"WEFT_UNTESTED=1 takes weft's kernels, after a check, for: {', '.join(could)}"
        return
    yield f"WEFT_UNTESTED=1: on weft's kernels, after a check: {', '.join(runs)}"
    if capability not in KERNELS[_GEMM].archs:
        yield f"matmuls: {_WITHOUT_GEMM}"
    for what, why in whys.items():
        if why is not None:
            yield f"{what} {'by torch' if what in _OF_ONE_RANK else 'unfused'}: {why}"


def _compiles(op: str, capability: Capability) -> bool:
    return any(op in kernel.ops and capability in kernel.archs for kernel in KERNELS.values())
