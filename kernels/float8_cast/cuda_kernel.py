"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...symm_mem.backends import cuda_state
from ..device.comm.ll_exchange import DTYPES
from ..device.jit.empty import empty_on
from ..device.jit.program import Program, fields, program_of
from .reference import MOST, Float8

SOURCE = Path(__file__).parent / "kernel.cu"
_THREADS, _TILE = 256, (128, 64)  # as in kernel.cu
_BLOCKS = 1056  # eight for each SM of a Hopper
_VECTOR = 16


class _Matrix(ctypes.Structure):
    """The twin of ``Matrix`` in kernel.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "from numbers transposed inverse"),
        *fields(ctypes.c_int32, "rows columns"),
    )


class CastParams(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (("of", _Matrix * MOST), ("largest", ctypes.c_uint64), *fields(ctypes.c_int32, "count parts"))


def cast_program(of: torch.dtype, to: torch.dtype) -> Program:
    return program_of(SOURCE, DTYPE=DTYPES[of], E5M2=int(to == torch.float8_e5m2))


class Float8Cast:
    """One cast of up to ``MOST`` tensors of a dtype, on the current stream of the current device, where they lie.

    Args:
        tensors: rows of a multiple of 16 numbers; any strides.
        transposed: whether that is asked for, as by ``reference_cast``: a multiple of 16 rows.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype, transposed: Sequence[bool]) -> None:
        self._program = cast_program(tensors[0].dtype, dtype)
        self._given = [_readable(t) for t in tensors]
        self._empty = empty = empty_on(tensors[0].device)
        self._stream = cuda_state.current_stream_of(tensors[0])
        self._tiles, self._made, matrices = 0, list[Float8](), list[_Matrix]()
        for t, across in zip(self._given, transposed, strict=True):
            columns = t.shape[-1]
            rows = math.prod(t.shape[:-1])
            numbers, scale = empty((*t.shape,), t.stride(), dtype), empty((), (), torch.float32)
            matrix = empty((columns, rows), (rows, 1), dtype) if across else None
            self._made.append(Float8(numbers, scale, matrix))
            places = t.data_ptr(), numbers.data_ptr(), 0 if matrix is None else matrix.data_ptr()
            matrices.append(_Matrix(*places, scale.data_ptr(), rows, columns))
            self._tiles += -(-rows // _TILE[0]) * -(-columns // _TILE[1])
        self._params = CastParams((_Matrix * MOST)(*matrices), 0, len(matrices))

    def maxima(self) -> Tensor:
        """As ``reference_maxima``."""
        count, params = len(self._given), self._params
        found = self._empty((count,), (1,), torch.float32)
        most = max(t.numel() * t.element_size() for t in self._given) // _VECTOR
        params.largest, params.parts = found.data_ptr(), max(1, min(most // (4 * _THREADS), _BLOCKS))
        function = self._program.function("largest")
        cuda_state.state.clear(found.data_ptr(), 4 * count, self._stream)
        function.launch(count * params.parts, _THREADS, params, self._stream)
        return found

    def numbers(self, maxima: Tensor) -> list[Float8]:
        """As ``reference_cast``."""
        self._params.largest = maxima.data_ptr()
        blocks = max(1, min(self._tiles, _BLOCKS))
        self._program.function("cast").launch(blocks, _THREADS, self._params, self._stream)
        return self._made


def _readable(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t.clone() if t.data_ptr() % _VECTOR else t
