"""Launches take_rows.cu."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.jit.program import Program, fields

PROGRAM = Program(Path(__file__).parent / "take_rows.cu")
_WARPS, _BYTES, _VECTOR = 4, 4096, 16  # of a block; of a row, by a warp; of an access
_MOST_SLICES = 256  # of an expert's rows


class Own(NamedTuple):
    """This rank's tokens, of ``tokens`` of all ranks."""

    first: int
    end: int
    tokens: int


class TakeParams(ctypes.Structure):
    """The twin of ``TakeParams`` in take_rows.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "from rows offs to stride"),
        *fields(ctypes.c_int32, "tokens total width pieces experts slices first end takes_own"),
    )


def take_rows(
    a: Tensor, rows: Tensor, offs: Tensor, out: Tensor, own: Own | None = None, *, takes_own: bool = True
) -> None:
    """``out[i] = a[rows[i]]`` of rows i of experts, on the current stream of the current device. Indices that name no
    row are clamped.

    Args:
        a: [T, K] of 16 bits, columns contiguous, rows at multiples of 16 bytes.
        rows, offs: [R] and [E] int32, contiguous. out: [R, K], contiguous.
        own: ``rows`` names tokens of all ranks. With ``takes_own`` those of this rank alone are taken, and ``a`` has
            these; else all others are, and ``a`` has all ranks'. None: all of ``a`` are this rank's.
    """
    if rows.shape[0] == 0:
        return
    size, experts = a.element_size(), offs.shape[0]
    first, end, tokens = own or (0, a.shape[0], a.shape[0])
    begin = a.data_ptr() - (first * a.stride(0) * size if takes_own else 0)
    width, pieces = a.shape[1] * size // _VECTOR, -(-a.shape[1] * size // _BYTES)
    slices = min(_MOST_SLICES, -(-rows.shape[0] * pieces // (experts * _WARPS)))
    addresses = begin, rows.data_ptr(), offs.data_ptr(), out.data_ptr()
    sizes = a.stride(0) * size // _VECTOR, tokens, rows.shape[0], width, pieces, experts, slices
    params = TakeParams(*addresses, *sizes, first, end, int(takes_own))
    function = PROGRAM.function("take_rows")
    function.launch(experts * slices, 32 * _WARPS, params, current_stream_of(a))
