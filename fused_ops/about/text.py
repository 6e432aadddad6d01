"""The text of ``python -m weft``, section by section."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import weft

from ...kernels.device.capability import HOPPER
from ...kernels.device.jit.program import cache_folder
from ...symm_mem.backends.host import HostBackend
from ...symm_mem.switches import unknown_variables
from ...symm_mem.timeouts import default_timeout
from ..drop_in.installation import installed
from .gpus import Gpu, copy_speed, driver_version, visible_gpus, why_not_on
from .kernels import what_runs_on

_PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "transformers", "accelerate")
_VARIABLES = ("WEFT_", "NCCL_", "TORCH_SYMM_MEM_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_")
_POINTS = {
    "torch_dynamo_backends": 'torch.compile(backend="weft")',
    "torch.backends": 'init_process_group("weft"), WEFT_INSTALL=1',
}


def about_text(*, measured: bool = True) -> str:
    """Everything.

    Args:
        measured: copies between GPUs are timed, which makes a context on each.
    """
    gpus = visible_gpus()
    sections = {
        "Versions": _versions(),
        "GPUs": _gpus(gpus, measured=measured),
        "CPU ranks": _cpu_ranks(),
        "Groups": _groups(),
        "Ops": _ops(gpus),
        "Plugged in": _plugged_in(),
        "Environment": _environment(),
    }
    return "\n\n".join(
        [
            _outlook(gpus),
            *(
                "\n".join([title, *(f"  {line}" for line in _up_to_error(lines))])
                for title, lines in sections.items()
            ),
        ]
    )


def _outlook(gpus: list[Gpu] | str) -> str:
    """In one sentence, how ops will run here."""
    if isinstance(gpus, str):
        return "no GPU: CPU ranks, for tests only"
    names = dict.fromkeys(gpu.name for gpu in gpus)
    here = f"{len(gpus)} {' and '.join(names)}"
    if len(gpus) == 1:
        return f"{here}: ops run unfused, as one rank has nobody to send to"
    if (why := why_not_on(gpus)) is not None:
        return f"{here}: ops run unfused over NCCL: {why}"
    if gpus[0].capability != HOPPER:
        first, *_ = what_runs_on(gpus[0].capability)
        return f"{here} that reach each other's memory: {first}"
    return f"{here} that reach each other's memory: fused kernels where they are predicted to be faster"


def _up_to_error(lines: Iterator[str]) -> Iterator[str]:
    """A variable of the environment that is wrong is named in place of the rest of its section."""
    try:
        yield from lines
    except ValueError as e:
        yield str(e)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[str]:
    yield f"weft {weft.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    # torch's own is that of the build, with "+cu130".
    yield ", ".join(f"{p} {torch.__version__ if p == 'torch' else _version(p)}" for p in _PACKAGES)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    yield f"CUDA: of torch {torch.version.cuda or 'none'}, of the driver {driver_version() or 'none'}; NCCL {nccl}"


def _gpus(gpus: list[Gpu] | str, *, measured: bool) -> Iterator[str]:
    if isinstance(gpus, str):
        yield f"none: {gpus}"
        return
    for gpu in gpus:
        yield str(gpu)
    if len(gpus) > 1:
        yield from _links(gpus, measured=measured)
        why = why_not_on(gpus)
        yield "a heap across all of them: " + ("possible" if why is None else f"not possible: {why}")
    else:
        yield "one GPU: WEFT_SHARE_GPUS=1 lets ranks take turns on it, for trying out"


def _links(gpus: list[Gpu], *, measured: bool) -> Iterator[str]:
    for gpu in gpus:
        others = [other.index for other in gpus if other != gpu]
        reached = "all others" if list(gpu.reaches) == others else f"GPUs {[*gpu.reaches]}"
        link = f", over {_link(gpu)}" if gpu.reaches else ""
        yield f"{gpu.index}: peer-to-peer access to {reached if gpu.reaches else 'none'}{link}"
    for gpu, peer in zip(gpus, [*gpus[1:], gpus[0]], strict=True) if measured else ():
        speed = copy_speed(gpu.index, peer.index)
        found = speed if isinstance(speed, str) else f"{speed:.0f} GB/s"
        yield f"copies {gpu.index} -> {peer.index}: {found}"


def _link(gpu: Gpu) -> str:
    if gpu.reaches == gpu.by_nvlink:
        return "NVLink"
    return "PCIe, where no kernel was run" + (f" but for {[*gpu.by_nvlink]}" if gpu.by_nvlink else "")


def _cpu_ranks() -> Iterator[str]:
    backend = HostBackend(torch.device("cpu"))
    why = backend.refuse([backend.identity()], 0)
    if why is None:
        try:
            fd, _ = backend.create(backend.granularity)
            os.close(fd)
        except OSError as e:
            why = f"no shared memory: {e}"
    yield "a heap in shared memory: " + ("possible" if why is None else f"not possible: {why}")


def _groups() -> Iterator[str]:
    there = {name: getattr(dist, f"is_{name}_available")() for name in ("nccl", "gloo", "mpi", "ucc")}
    yield f"backends of torch: {', '.join(name for name, found in there.items() if found) or 'none'}"
    yield "weft works over nccl on CUDA and over gloo between CPU ranks"
    yield f"a wait for a peer ends after {default_timeout():g} s"


def _ops(gpus: list[Gpu] | str) -> Iterator[str]:
    if not isinstance(gpus, str) and len(gpus) > 1 and why_not_on(gpus) is None:
        first, *more = what_runs_on(gpus[0].capability)
        yield f"on GPUs: {first}"
        yield from more
        if any(gpu.reaches != gpu.by_nvlink for gpu in gpus):
            yield (
                "over PCIe: a group's first heap is checked; collectives send to one peer after the other, "
                "as copy engines do for large matmuls"
            )
    yield "between CPU ranks: float32, bfloat16 and float16, as the GPUs' protocol"
    ops = [name for name in weft.fused_ops.__all__ if name.startswith(("fused_", "one_shot_"))]
    yield f"ops: {', '.join(ops)}"


def _plugged_in() -> Iterator[str]:
    for group, what in _POINTS.items():
        found = any(point.name == "weft" for point in metadata.entry_points(group=group))
        yield f"{what}: " + (
            "known to torch" if found else "unknown to torch: install weft anew (pip install -e .)"
        )
    yield f"torch.ops.symm_mem: {'on weft' if installed() else 'of torch'}"
    try:
        folder: Path | str = cache_folder()
    except OSError as e:
        folder = f"none: {e}"
    yield f"compiled kernels are kept in {folder}"


def _environment() -> Iterator[str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    unknown = dict(unknown_variables())
    for name, value in found.items():
        yield f"{name}={value}" + (f" ({unknown[name]})" if name in unknown else "")
    if not found:
        yield "nothing that weft or NCCL reads is set"
