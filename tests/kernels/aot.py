"""Compile a Triton kernel without a GPU, for Hopper or another one, and read what it needs.

Not under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.kernels.device.jit.launch import FIXED_OPTIONS, precision
from weft.kernels.device.triton.tile_table import TritonTile

_targets = [GPUTarget("cuda", 90, 32)]  # the last one counts
MAX_SHARED = 227 * 1024  # bytes a block may use on Hopper, 1 KiB of it the system's
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Compiled:
    """``registers`` a thread, ``spilled`` bytes a thread, ``shared`` bytes a block."""

    ptx: str
    ttgir: str
    registers: int
    spilled: int
    shared: int


@contextmanager
def compiled_for(arch: int) -> Iterator[None]:
    """Inside the body kernels are compiled for such GPUs: 80 is an A100's."""
    _targets.append(GPUTarget("cuda", arch, 32))
    try:
        yield
    finally:
        _targets.pop()


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...],
    warps: int,
    stages: int,
) -> Compiled:
    """``aligned``: arguments that are multiples of 16, as at a launch; without it other code comes out."""
    names = list(signature)
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, **FIXED_OPTIONS}
    compiled = triton.compile(source, target=_targets[-1], options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    shared = compiled.metadata.shared + numbers["SHARED"]
    spilled = numbers["STACK"] + numbers["LOCAL"]
    return Compiled(compiled.asm["ptx"], compiled.asm["ttgir"], numbers["REG"], spilled, shared)


def _descriptor(dtype: torch.dtype, *block: int) -> str:
    return f"tensordesc<{_NAMES[dtype]}[{','.join(map(str, block))}]>"


def _common(
    tile: TritonTile, dtype: torch.dtype, transposed: bool, world_size: int
) -> tuple[str, dict[str, Any]]:
    b = (tile.block_n, tile.block_k) if transposed else (tile.block_k, tile.block_n)
    constants = {
        "WORLD_SIZE": world_size,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "GROUP_M": 8,
        "CHUNKS": tile.chunks,
        "B_TRANSPOSED": transposed,
        "PRECISION": precision(dtype),
    }
    return _descriptor(dtype, *b), constants


def _numbers(*names: str) -> dict[str, str]:
    wide = ("span_words", "record", "timeout_ns")
    return {name: "i64" if name in wide else "i32" for name in names}


_USE = ("flags_at", "flags_per_rank", "done_at", "span_words", "record", "timeout_ns")


def all_gather_matmul(
    tile: TritonTile, dtype: torch.dtype, transposed: bool, world_size: int = 4
) -> Compiled:
    from weft.kernels.all_gather_matmul.triton_kernel import all_gather_matmul_kernel

    b, constants = _common(tile, dtype, transposed, world_size)
    rows = _descriptor(dtype, 1, tile.block_m, tile.block_k)
    signature = {
        "a_local": rows,
        "a_gathered": rows,
        "b": b,
        "c": _descriptor(dtype, 1, tile.block_m, tile.block_n // tile.chunks),
        "words": "*i32",
        "fault": "*i32",
        **_numbers("m", "n", "k", "chunk_rows", "rank", "buffer", *_USE),
    }
    aligned = ("words", "fault", "m", "n", "k", "chunk_rows", "span_words")
    return compile_kernel(
        all_gather_matmul_kernel, signature, {**constants, "FINAL": True}, aligned, tile.warps, tile.stages
    )


def matmul_reduce_scatter(
    tile: TritonTile, dtype: torch.dtype, transposed: bool, world_size: int = 4, more: bool = False
) -> Compiled:
    """``more``: with an average, a bias and a residual."""
    from weft.kernels.matmul_reduce_scatter.triton_kernel import matmul_reduce_scatter_kernel

    b, constants = _common(tile, dtype, transposed, world_size)
    chunk = (tile.block_m, tile.block_n // tile.chunks)
    signature = {
        "a": _descriptor(dtype, 1, 1, tile.block_m, tile.block_k),
        "b": b,
        "peers": _descriptor(dtype, 1, 1, *chunk),
        "out": _descriptor(dtype, 1, *chunk),
        "receive_buffer": f"*{_NAMES[dtype]}",
        "words": "*i32",
        "fault": "*i32",
        "bias": f"*{_NAMES[dtype]}",
        "residual": f"*{_NAMES[dtype]}",
        **_numbers("batches", "m", "n", "k", "buffer", *_USE),
    }
    constants = {"RANK": 1, "AVERAGE": more, "BIAS": more, "RESIDUAL": more, **constants}
    aligned = ("receive_buffer", "words", "fault", "bias", "residual", "m", "n", "k", "span_words")
    return compile_kernel(
        matmul_reduce_scatter_kernel, signature, constants, aligned, tile.warps, tile.stages
    )
