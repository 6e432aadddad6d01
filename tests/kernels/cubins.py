"""Compiled CUDA programs, and what their machine code says of itself. No GPU is needed."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
import weft.kernels.device
from once import made_once
from weft.kernels.device.jit.program import Program, _key, compile_cubin

KERNELS = Path(weft.kernels.device.__file__).parent.parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARGUMENTS = 528  # in constant bank 0 of sm_90, kernel arguments begin here
_INSTRUCTION = 16  # bytes
_EXECUTABLE = 4  # a flag of a section of an ELF file


_compilers = ThreadPoolExecutor(os.cpu_count())
_compiled: dict[Program, Future[bytes]] = {}


def compiled(program: Program) -> Future[bytes]:
    """Its cubin; the same one is compiled once. It takes up to seconds: ask early."""
    if program not in _compiled:
        _compiled[program] = _compilers.submit(_compile, program)
    return _compiled[program]


def _compile(program: Program) -> bytes:
    def write(place: Path) -> None:
        place.write_bytes(compile_cubin(program.path, program.arch, program.defines))

    # The key of weft's own cache: sources, defines, options and compiler.
    return made_once((program.path.name, _key(program, program.arch)), write).read_bytes()


def names_of(programs: dict[str, Program]) -> list[Any]:
    """As parameters. As many as it takes for each value of each macro are compiled in every run, all in
    `make programs`."""
    values = {
        name: {(program.path, *macro) for macro in [("", ""), *program.defines.items()]}
        for name, program in programs.items()
    }
    missing, chosen = set().union(*values.values()), set()
    while missing:
        best = max(values, key=lambda name: len(values[name] & missing))
        missing -= values[best]
        chosen.add(best)
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in programs]


def compile_ahead(request: pytest.FixtureRequest, programs: dict[str, Program]) -> None:
    """What the tests of the module to come need is compiled while those before them run."""
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            compiled(programs[item.callspec.params["name"]])


def usage(program: Program, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """(kernel, {"REG": .., "STACK": .., "LOCAL": .., "CONSTANT[0]": ..}) for each kernel of a program."""
    file = folder / "program.cubin"
    file.write_bytes(compiled(program).result())
    text = subprocess.run(
        [TOOLS / "cuobjdump", "-res-usage", file], check=True, capture_output=True, text=True
    ).stdout
    for name, numbers in re.findall(r"Function (\w+):\s*\n\s*(.*)", text):
        yield name, {key: int(value) for key, value in re.findall(r"(\S+):(\d+)", numbers)}


def instructions_of(request: pytest.FixtureRequest, programs: dict[str, Program]) -> dict[str, str]:
    """Those of programs of one kernel each that the module to come needs. All in one: whatever the disassembler is
    given, it takes a fifth of a second before it begins."""
    names = [name for name in programs if any(_is_of(item, request, name) for item in request.session.items)]
    codes = [_kernel(compiled(programs[name]).result()) for name in names]

    def write(place: Path) -> None:
        code = place.with_suffix(".code")
        code.write_bytes(b"".join(codes))
        with open(place, "w") as file:
            subprocess.run([TOOLS / "nvdisasm", "--binary", "SM90a", code], check=True, stdout=file)
        code.unlink()

    text = made_once(("instructions", *codes), write).read_text()
    lines = {
        int(line[1], 16): line[2] for line in re.finditer(r"^\s*/\*([0-9a-f]+)\*/(.*)", text, re.MULTILINE)
    }
    found, begin = {}, 0
    for name, code in zip(names, codes, strict=True):
        addresses = range(begin, begin + len(code), _INSTRUCTION)
        found[name] = "\n".join(lines[address] for address in addresses)
        begin += len(code)
    return found


def _is_of(item: pytest.Item, request: pytest.FixtureRequest, name: str) -> bool:
    return item.path == request.path and hasattr(item, "callspec") and item.callspec.params["name"] == name


def _kernel(cubin: bytes) -> bytes:
    """The one section of an ELF file that holds instructions."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    ((_, _, _, _, begin, length),) = [header for header in headers if header[2] & _EXECUTABLE]
    return cubin[begin : begin + length]


def disassembled(program: Program, folder: Path) -> str:
    file = folder / "program.cubin"
    file.write_bytes(compiled(program).result())
    done = subprocess.run(
        [TOOLS / "nvdisasm", "-c", "--no-dataflow", file], check=True, capture_output=True, text=True
    )
    return done.stdout
