"""What Triton's interpreter lacks to run these kernels on the CPU: conversions of bfloat16, and rounding to it.

run_ranks(check, 2, env={"TRITON_INTERPRET": "1"})    # and in check: interpreter.install()
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

Builder = triton_interpreter.InterpreterBuilder
Handle = triton_interpreter.TensorHandle


def _widen(handle: Any) -> Any:
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(handle: Any) -> Any:
    """float32 to bfloat16, to the nearest, ties to even; the interpreter alone truncates."""
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(handle.data), np.uint16(0x7FC0), rounded), tl.bfloat16)


def install() -> None:
    """Patch the interpreter of this process."""
    cast = Builder.cast_impl

    def patched_trunc(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return _round(source)
        return cast(self, source, target)

    def patched_extend(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return _widen(source)
        return cast(self, source, target)

    Builder.create_fp_trunc = patched_trunc
    Builder.create_fp_ext = patched_extend
