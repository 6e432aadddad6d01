"""What Triton's interpreter lacks to run these kernels on CPU ranks: bfloat16 products and rounding, and the
inline assembly of kernels/device/triton/sync.py.

    run_ranks(check, 2, env={"TRITON_INTERPRET": "1"})    # and in check: interpreter.install()

Programs of a grid run one after the other, in the order of their index: a program may wait only for what earlier
ones, other threads or other ranks do. Plain loads and stores of aligned words are acquire and release on x86.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from weft.kernels.device.triton import sync

Builder = triton_interpreter.InterpreterBuilder
Handle = triton_interpreter.TensorHandle


class _Result:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_result(self, index: int) -> Any:
        assert index == 0
        return self._handle


def _word(pointer: Any) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(int(pointer.data.item()))


def _load(pointer: Any) -> int:
    return _word(pointer).value


def _load_and_yield(pointer: Any) -> int:
    os.sched_yield()  # there may be more ranks than cores
    return _word(pointer).value


def _store(pointer: Any, value: Any) -> int:
    _word(pointer).value = int(value.data.item())
    return 0


def _store_host(pointer: Any, value: Any) -> int:
    ctypes.c_int64.from_address(int(pointer.data.item())).value = int(value.data.item())
    return 0


def _set_once(pointer: Any, value: Any) -> int:
    before = _load(pointer)  # nobody else writes the word: programs take turns, and it is this rank's own
    if before == 0:
        _word(pointer).value = int(value.data.item())
    return before


def _nothing() -> int:
    return 0


_INSTRUCTIONS: dict[str, Callable[..., int]] = {
    sync.LOAD_ACQUIRE.value: _load_and_yield,
    sync.LOAD_RELAXED.value: _load,
    sync.STORE_RELEASE.value: _store,
    sync.STORE_HOST.value: _store_host,
    sync.SET_ONCE.value: _set_once,
    sync.CLOCK.value: time.monotonic_ns,
    sync.FENCE_SYSTEM.value: _nothing,
    sync.FENCE_PROXY_ASYNC.value: _nothing,
    sync.TMA_STORE_WAIT_ALL.value: _nothing,
}


def _inline_asm(
    self: Any, asm: str, constraints: str, values: list, types: list, is_pure: bool, pack: int
) -> _Result:
    assert not is_pure, "waits and posts have side effects"
    assert asm in _INSTRUCTIONS, f"no emulation of {asm!r}"
    result = _INSTRUCTIONS[asm](*values)
    dtype, kind = (np.int64, tl.int64) if asm == sync.CLOCK.value else (np.int32, tl.int32)
    return _Result(Handle(np.array([result], dtype=dtype), kind))


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(handle: Any) -> Any:
    """float32 to bfloat16, to the nearest, ties to even; the interpreter alone truncates."""
    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(handle.data), np.uint16(0x7FC0), rounded), tl.bfloat16)


def install() -> None:
    """Patch the interpreter of this process."""
    dot, cast = Builder.create_dot, Builder.cast_impl

    def patched_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, _widen(a), _widen(b), d, precision, imprecise)

    def patched_trunc(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return _round(source)
        return cast(self, source, target)

    def patched_extend(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return _widen(source)
        return cast(self, source, target)

    Builder.create_dot = patched_dot
    Builder.create_fp_trunc = patched_trunc
    Builder.create_fp_ext = patched_extend
    Builder.create_inline_asm = _inline_asm
