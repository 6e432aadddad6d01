"""Compiled CUDA programs, and what their machine code says of itself. No GPU is needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import triton
import weft.kernels.device
from weft.kernels.device.program import Program, compile_cubin

KERNELS = Path(weft.kernels.device.__file__).parent.parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARGUMENTS = 528  # in constant bank 0 of sm_90, kernel arguments begin here


@cache
def cubin(program: Program) -> bytes:
    return compile_cubin(program.path, program.arch, program.defines)


def usage(program: Program, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """(kernel, {"REG": .., "STACK": .., "LOCAL": .., "CONSTANT[0]": ..}) for each kernel of a program."""
    file = folder / "program.cubin"
    file.write_bytes(cubin(program))
    text = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", file], check=True, capture_output=True, text=True
    ).stdout
    for name, numbers in re.findall(r"Function (\w+):\s*\n\s*(.*)", text):
        yield name, {key: int(value) for key, value in re.findall(r"(\S+):(\d+)", numbers)}


def disassembled(program: Program, folder: Path) -> str:
    file = folder / "program.cubin"
    file.write_bytes(cubin(program))
    done = subprocess.run([TOOLS / "nvdisasm", "-c", file], check=True, capture_output=True, text=True)
    return done.stdout
