"""Launches exponentials.cu."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.gemm import gemm
from ..device.gemm.gemm import boxes_of_b, boxes_of_rows, is_whole
from ..device.gemm.gemm_tiles import TILES
from ..device.gemm.tensor_map import Maps, TensorMap, put_map
from ..device.jit.program import Function, Program

SOURCE = Path(__file__).parent / "exponentials.cu"
TILE = TILES[0]
SHARED = TILE.shared + 8 * 2048  # bytes: a buffer of each warp
_PAIR = 2 * TILE.block_m  # rows
_RASTER_GROUP = 16  # pairs: of 4096 rows, whose x stays in the L2 cache


class _Params(ctypes.Structure):
    """The twin of ``Params`` in exponentials.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("targets", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("scores", ctypes.c_uint64),
        ("excess", ctypes.c_uint64),
        ("exceeded", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("stride", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("raster_group", ctypes.c_int32),
        ("again", ctypes.c_int32),
        ("scale", ctypes.c_float),
        # Tensor maps are aligned to 64 bytes, so there its size is a multiple of that.
        ("reserved", ctypes.c_int32 * 7),
    )


def exponentials_program(weight: Tensor) -> Program:
    """For weights [n, K] that lie like this one."""
    return gemm.gemm_program(SOURCE, tuple(gemm.gemm_defines(TILE, [weight.t()]).items()))


class Exponentials:
    """The kernel on operands of these sizes, strides and dtype, in the current context: prepared once, launched often.

    Args:
        x, weight: examples: [m, K] and [n, K], with m a multiple of 8.
        stride: elements from one column of the result to the next, a multiple of 8.
        temperature: by which scores are divided.
        num_sms: blocks to launch.
    """

    def __init__(self, x: Tensor, weight: Tensor, stride: int, temperature: float, num_sms: int) -> None:
        (m, k), n, b = x.shape, weight.shape[0], weight.t()
        self._x = Maps(boxes_of_rows(x.dtype, (1, 1, *x.shape), (0, 0, *x.stride()), TILE))
        self._weight = Maps(boxes_of_b(b, TILE, is_whole([b], TILE)))
        program = exponentials_program(weight)
        self._threads = gemm.threads_of(program)
        self._function: Function = program.function("exponentials", shared=SHARED)
        self._blocks = 2 * min(num_sms // 2, self._function.most_clusters(2, self._threads, SHARED))
        self.columns = -(-n // TILE.block_n)
        self._sizes = m, n, k, stride, -(-m // _PAIR), self.columns, _RASTER_GROUP
        self._scale = 1 / (temperature * math.log(2))

    def launch(self, x: Tensor, weight: Tensor, rows: tuple[Tensor, ...], out: Tensor) -> None:
        """On the current stream. Both launches: the second one is of rows whose exponentials overflowed.

        Args:
            rows: targets [m], start [1], base [m], sums [columns, m], scores [m], excess [m + 1] of zeros.
            out: [n, m], the last dimension contiguous.
        """
        p = _Params()
        put_map(p, _Params.a.offset, self._x[x.data_ptr()])
        put_map(p, _Params.b.offset, self._weight[weight.data_ptr()])
        p.targets, p.start, p.base, p.sums, p.scores, p.excess = (t.data_ptr() for t in rows)
        p.exceeded, p.out = p.excess + 4 * x.shape[0], out.data_ptr()
        p.m, p.n, p.k, p.stride, p.pairs, p.columns, p.raster_group = self._sizes
        p.scale, stream = self._scale, current_stream_of(x)
        for p.again in (0, 1):
            self._function.launch(self._blocks, self._threads, p, stream, SHARED)
