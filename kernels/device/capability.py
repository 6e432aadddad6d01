"""Which kernel runs on which GPU: one table, by the kernel's file. ``python -m weft kernels`` prints it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from ...symm_mem.backends import cuda_state
from ...symm_mem.backends.cuda_state import HOPPER
from ...symm_mem.switches import is_on

Capability: TypeAlias = tuple[int, int]

#: What kernels are compiled for, by compute capability.
ARCHS: dict[Capability, str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    HOPPER: "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}
#: Examples of such GPUs.
CARDS: dict[Capability, str] = {
    (8, 0): "A100",
    (8, 6): "A40, RTX 3090",
    (8, 9): "L40S, RTX 4090",
    HOPPER: "H100, H200",
    (10, 0): "B200",
    (10, 3): "B300",
    (12, 0): "RTX PRO 6000, RTX 5090",
}
_SIMULATED = ("80", "86", "89")  # whose PTX any later GPU takes


@dataclass(frozen=True)
class KernelRow:
    """A row of the table.

    Attributes:
        ops: whose kernel it is, by the names of their folders.
        archs: the compute capabilities that it compiles for.
        needs: of the GPU or its links, in words.
        cards, date, results: on what it was last run, when, and the file of bench/results that says so: all of them
            Hoppers, the only GPUs that any was run on; empty if it never was.
    """

    ops: tuple[str, ...]
    archs: tuple[Capability, ...]
    needs: str
    cards: str = ""
    date: str = ""
    results: str = ""

    @property
    def ran(self) -> tuple[Capability, ...]:
        """The compute capabilities of GPUs that it was run on."""
        return (HOPPER,) if self.cards else ()


#: Those on which torch multiplies with block-wise scales, from CUDA 12.9 on.
BLOCK_PRODUCTS: tuple[Capability, ...] = (HOPPER,)

ALL = tuple(ARCHS)
_FROM_ADA = tuple(c for c in ALL if c >= (8, 9))
_FROM_HOPPER = tuple(c for c in ALL if c >= HOPPER)
_WITH_GEMM = (HOPPER, (10, 0), (10, 3))  # wgmma, or tcgen05 and tensor memory
_GATHERS = ("all_gather_matmul", "all_gather_scaled_matmul")
_SCATTERS = ("matmul_reduce_scatter", "scaled_matmul_reduce_scatter")
_PEERS, _COPIES = "peer access", "peer access, copy engines"
_H200 = "2 H200", "2026-11-28"
#: By the file below kernels/. "peer access" is what a heap needs, over NVLink or PCIe.
KERNELS: dict[str, KernelRow] = {
    "all_gather/kernel.cu": KernelRow(
        ("all_gather", "matmul_all_gather"), ALL, _PEERS, *_H200, "h200-x2-all_gather.json"
    ),
    "all_gather_matmul/kernel.cu": KernelRow(
        _GATHERS,
        _WITH_GEMM,
        "peer access, clusters, TMA, wgmma or tcgen05",
        *_H200,
        "h200-x2-all_gather_matmul.json",
    ),
    "all_gather_matmul/scaled.py": KernelRow(
        _GATHERS[1:], _FROM_ADA, "peer access, torch's scaled product", *_H200, "h200-x2-scaled.txt"
    ),
    "all_gather_matmul/one_shot.cu": KernelRow(
        _GATHERS[:1], ALL, "peer access, cuBLAS", *_H200, "h200-x2-all_gather_matmul.json"
    ),
    "all_reduce/kernel.cu": KernelRow(("all_reduce",), ALL, _PEERS, *_H200, "h200-x2-all_reduce.json"),
    "all_reduce_rms_norm/kernel.cu": KernelRow(
        ("all_reduce_rms_norm",),
        ALL,
        "peer access; clusters for long rows",
        *_H200,
        "h200-x2-all_reduce_rms_norm.json",
    ),
    "all_reduce_rms_norm/quant.cuh": KernelRow(
        ("all_reduce_rms_norm_quant",), _FROM_ADA, "peer access, fp8", *_H200, "h200-x2-sanitizer.txt"
    ),
    "all_to_all/kernel.cu": KernelRow(
        ("all_to_all",), ALL, _PEERS, "H200", "2026-11-29", "h200-x1-all-to-all.txt"
    ),
    "async_collectives/kernel.cu": KernelRow(
        ("async_collectives",), ALL, _COPIES, "2 H200", "2026-11-30", "h200-x2-gathered-weights.txt"
    ),
    "device/comm/acquire.cu": KernelRow(
        ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_gather", "async_collectives"),
        ALL,
        _COPIES,
        *_H200,
        "h200-x2-sanitizer.txt",
    ),
    "float8_cast/kernel.cu": KernelRow((), _FROM_ADA, "fp8", "H200", "2026-11-29", "h200-x1-float8-cast.txt"),
    "grouped_matmul/kernel.cu": KernelRow(
        ("grouped_matmul",),
        _WITH_GEMM,
        "clusters, TMA, wgmma or tcgen05",
        "H200",
        "2026-11-29",
        "h200-x1-grouped-matmul.txt",
    ),
    "grouped_matmul/take_rows.cu": KernelRow((), ALL, "", "H200", "2026-11-29", "h200-x1-grouped-matmul.txt"),
    "matmul_all_reduce/kernel.cu": KernelRow(
        ("matmul_all_reduce",), ALL, _PEERS, *_H200, "h200-x2-matmul_all_reduce.json"
    ),
    "matmul_reduce_scatter/kernel.cu": KernelRow(
        (*_SCATTERS, "matmul_all_reduce"),
        _WITH_GEMM,
        "peer access, clusters, TMA, wgmma or tcgen05",
        *_H200,
        "h200-x2-matmul_reduce_scatter.json",
    ),
    "matmul_reduce_scatter/one_shot_kernel.py": KernelRow(
        _SCATTERS[1:], _FROM_ADA, "peer access, torch's scaled product", *_H200, "h200-x2-scaled.txt"
    ),
    "matmul_reduce_scatter/one_shot.cu": KernelRow(
        _SCATTERS[:1], ALL, "peer access, cuBLAS", *_H200, "h200-x2-matmul_reduce_scatter.json"
    ),
    "linear_cross_entropy/triton_kernel.py": KernelRow(
        ("linear_cross_entropy",), ALL, "", "2 H200", "2026-11-30", "h200-x2-vocabulary.json"
    ),
    "moe_dispatch/kernel.cu": KernelRow(
        ("moe_dispatch",), ALL, _PEERS, "2 H200", "2026-11-29", "h200-x2-expert_parallel.json"
    ),
    "moe_route/kernel.cu": KernelRow(
        ("moe_route",), _FROM_HOPPER, "clusters", "H200", "2026-11-29", "h200-x1-grouped-matmul.txt"
    ),
    "reduce_scatter/kernel.cu": KernelRow(
        ("reduce_scatter",), ALL, _PEERS, *_H200, "h200-x2-reduce_scatter.json"
    ),
    "transfer/kernel.cu": KernelRow(
        ("transfer",), ALL, _COPIES, "2 H200", "2026-11-26", "h200-x2-transfers.txt"
    ),
}


@cache
def simulated_capability() -> Capability | None:
    """That of WEFT_ARCH, asked once in a process: kernels and choices are such a GPU's, for tests on a later one.

    Raises:
        ValueError: WEFT_ARCH is not one of those whose programs later GPUs take.
    """
    if (said := os.environ.get("WEFT_ARCH")) is None:
        return None
    if said not in _SIMULATED:
        raise ValueError(f"WEFT_ARCH: is {said!r}, must be one of {', '.join(_SIMULATED)}")
    return int(said[0]), int(said[1])


def capability_of(device: torch.device) -> Capability:
    """That of a CUDA device, or of WEFT_ARCH. A GPU that is not there, as plans may ask about, is taken to be an
    H200."""
    return simulated_capability() or cuda_state.state.capability(device)


def arch_of(device: torch.device) -> str:
    """What programs are compiled for there. With WEFT_ARCH it is a virtual architecture, whose PTX the driver compiles.

    Raises:
        ValueError: no kernel is compiled for such a device.
    """
    if (simulated := simulated_capability()) is not None:
        return f"compute_{simulated[0]}{simulated[1]}"
    if (capability := capability_of(device)) not in ARCHS:
        raise ValueError(
            f"device: {device} has compute capability {_text(capability)}, must have {capabilities_text(ALL)}"
        )
    return ARCHS[capability]


def runs_on(kernel: str, device: torch.device) -> bool:
    """Whether a kernel of ``KERNELS`` runs on a CUDA device: it compiles, and was run on such GPUs or WEFT_UNTESTED is
    1."""
    capability, row = capability_of(device), KERNELS[kernel]
    return capability in row.archs and (capability in row.ran or takes_untested())


def has_tensor_memory(device: torch.device) -> bool:
    """Whether products add up in tensor memory there, by tcgen05."""
    return capability_of(device)[0] == 10


def has_clusters(device: torch.device) -> bool:
    """Whether blocks of a kernel can be clusters there."""
    return capability_of(device) >= HOPPER


def takes_untested() -> bool:
    """Whether kernels are taken that were never run on such a GPU (WEFT_UNTESTED=1).

    Raises:
        ValueError: WEFT_UNTESTED is neither 0 nor 1.
    """
    return is_on("WEFT_UNTESTED")


def is_untested(device: torch.device) -> bool:
    """Whether there are kernels that compile for a CUDA device, and none was ever run on such a one."""
    capability = capability_of(device)
    rows = [row for row in KERNELS.values() if capability in row.archs]
    return bool(rows) and not any(capability in row.ran for row in rows)


def why_no_kernel_on(op: str, device: torch.device) -> str | None:
    """Why no kernel of an op runs on a device; None if one does, or if that is the CPU. ``op``: as in ``KERNELS``."""
    if device.type != "cuda":
        return None
    return why_no_kernel(op, capability_of(device))


def why_no_kernel(op: str, capability: Capability) -> str | None:
    """The same of GPUs of a compute capability."""
    rows = _rows_of(op)
    if any(capability in row.archs and capability in row.ran for row in rows):
        return None
    archs = {arch for row in rows for arch in row.archs}
    if capability not in archs:
        return f"its kernels are for GPUs of compute capability {capabilities_text(tuple(archs))}"
    if takes_untested():
        return None
    return (
        f"its kernels compile for {ARCHS[capability]}, but were never run there: WEFT_UNTESTED=1 takes them"
    )


@cache
def _rows_of(op: str) -> tuple[KernelRow, ...]:
    return tuple(row for row in KERNELS.values() if op in row.ops)


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def capabilities_text(capabilities: tuple[Capability, ...]) -> str:
    return " or ".join(map(_text, sorted(capabilities)))
