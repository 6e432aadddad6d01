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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_targets = [GPUTarget("cuda", 90, 32)]  # the last one counts
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """``registers`` a thread, ``spilled`` bytes a thread, ``shared`` bytes a block."""

    ptx: str
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
    options = {"num_warps": warps, "num_stages": stages}
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
    return Compiled(compiled.asm["ptx"], numbers["REG"], spilled, shared)
