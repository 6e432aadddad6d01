"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.gemm import gemm
from ..device.gemm.gemm import boxes_of_rows, is_whole
from ..device.gemm.gemm_tiles import BLOCK_K, Tile
from ..device.gemm.operands import ALIGNMENT, is_transposed
from ..device.gemm.tensor_map import Boxes, Maps, TensorMap, put_map
from ..device.jit.program import Function, Program
from .configs import MOST_EXPERTS, GroupedConfig

SOURCE = Path(__file__).parent / "kernel.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("from", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("offs", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("c", ctypes.c_uint64),
        ("tokens", ctypes.c_int32),
        ("total", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("stride", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("raster_group", ctypes.c_int32),
        # Tensor maps are aligned to 64 bytes, so there its size is a multiple of that.
        ("reserved", ctypes.c_int32 * 14),
    )


def lies_well(x: Tensor) -> bool:
    """Whether TMA and copies of 16 bytes read [.., rows, columns] as it lies: columns contiguous, and all else at
    multiples of 16 bytes."""
    *apart, step = x.stride()
    size = x.element_size()
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(stride * size % ALIGNMENT == 0 for stride in apart)
    return aligned and step == 1 and apart[-1] >= x.shape[-1]


def boxes_of_experts(b: Tensor, tile: Tile) -> Boxes:
    """Of B [E, K, N]: what one block of a cluster loads. Experts are a dimension of their own: past the end of K there
    are zeros, and not the next one's numbers."""
    (experts, k, n), (apart, *_), half = b.shape, b.stride(), BLOCK_K // 2
    if is_transposed(b[0]):
        shape, strides, box = (experts, n, k), (apart, b.stride(2), 1), (1, tile.block_n // 2, BLOCK_K)
        return Boxes(b.dtype, shape, strides, box)
    if is_whole([b[0]], tile):
        wide = (experts, n // 64, k, 64), (apart, 64, b.stride(1), 1), (1, -(-tile.block_n // 64), half, 64)
        return Boxes(b.dtype, *wide)
    return Boxes(b.dtype, (experts, k, n), (apart, b.stride(1), 1), (1, half, 64))


def grouped_program(b: Tensor, config: GroupedConfig, *, by_rows: bool) -> Program:
    """For this B [E, K, N] and its like."""
    defines = gemm.gemm_defines(config.tile, [b[0]], split_k=True)
    return gemm.gemm_program(SOURCE, (*defines.items(), ("BY_ROWS", int(by_rows))))


class GroupedMatmul:
    """The kernel on operands of these sizes, strides and dtype, in the current context: prepared once, launched often.

    Args:
        a, b: examples: A [T, K], and B [E, K, N] or its matrices transposed, as ``lies_well`` wants them.
        num_sms: blocks to launch.
    """

    def __init__(self, a: Tensor, b: Tensor, config: GroupedConfig, num_sms: int, *, by_rows: bool) -> None:
        tile, (experts, k, n) = config.tile, b.shape
        self._a = (
            None if by_rows else Maps(boxes_of_rows(a.dtype, (1, 1, *a.shape), (0, 0, *a.stride()), tile))
        )
        self._b = Maps(boxes_of_experts(b, tile))
        self._shared = config.shared(experts)
        self._function: Function = grouped_program(b, config, by_rows=by_rows).function(
            "grouped_matmul", shared=config.shared(MOST_EXPERTS)
        )
        clusters = self._function.most_clusters(2, gemm.THREADS, self._shared)
        self._blocks = 2 * min(num_sms // 2, clusters)
        self._fixed = (a.shape[0], experts, n, k, a.stride(0), -(-n // tile.block_n), config.raster_group)

    def launch(
        self, a: Tensor, b: Tensor, out: Tensor, index: tuple[Tensor, Tensor | None], bias: Tensor | None
    ) -> None:
        """On the current stream. ``index``: offs and rows."""
        offs, rows = index
        p = _Params()
        if self._a is not None:
            put_map(p, _Params.a.offset, self._a[a.data_ptr()])
        put_map(p, _Params.b.offset, self._b[b.data_ptr()])
        setattr(p, "from", a.data_ptr())
        p.offs, p.c, p.total = offs.data_ptr(), out.data_ptr(), out.shape[0]
        p.rows = 0 if rows is None else rows.data_ptr()
        p.bias = 0 if bias is None else bias.data_ptr()
        p.tokens, p.experts, p.n, p.k, p.stride, p.columns, p.raster_group = self._fixed
        self._function.launch(self._blocks, gemm.THREADS, p, current_stream_of(a), self._shared)
