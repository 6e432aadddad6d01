"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...symm_mem.backends.cuda_state import current_stream_of
from ..device.gemm import gemm
from ..device.gemm.gemm import boxes_of_b, boxes_of_rows, is_whole
from ..device.gemm.gemm_tiles import BLOCK_K, Tile
from ..device.gemm.operands import ALIGNMENT, is_transposed
from ..device.gemm.tensor_map import Boxes, Maps, TensorMap, put_map
from ..device.jit.program import Function, Program, fields, program_of
from .configs import MOST_EXPERTS, GroupedConfig

SOURCE = Path(__file__).parent / "kernel.cu"
MOST_BS = 4  # as in kernel.cu


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap * MOST_BS),
        ("ends", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * MOST_BS),
        ("c", ctypes.c_uint64 * MOST_BS),
        ("n", ctypes.c_int32 * MOST_BS),
        ("columns", ctypes.c_int32 * MOST_BS),
        *fields(ctypes.c_int32, "bs all_columns total groups k raster_group"),
    )


def lies_well(x: Tensor) -> bool:
    """Whether TMA and copies of 16 bytes read [.., rows, columns] as it lies: columns contiguous, and all else at
    multiples of 16 bytes."""
    *apart, step = x.stride()
    size = x.element_size()
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(stride * size % ALIGNMENT == 0 for stride in apart)
    return aligned and step == 1 and apart[-1] >= x.shape[-1]


def boxes_of_experts(b: Tensor, tile: Tile, whole: bool, gated: int = 0) -> Boxes:
    """Of B [E, K, N], as ``boxes_of_b``. ``gated``: N is two halves, of so many of which a box has columns."""
    if not gated:
        return boxes_of_b(b, tile, whole)
    (experts, k, n), (apart, _, row) = b.shape, b.stride()
    both = (experts, 2, n // 2, k), (apart, n // 2 * row, row, 1)
    return Boxes(b.dtype, *both, (1, gated, tile.block_n // 2 // gated, BLOCK_K))


def may_share(bs: Sequence[Tensor]) -> bool:
    """Whether one launch multiplies by all of these B."""
    return len(bs) <= MOST_BS and len({is_transposed(b[0]) for b in bs}) == 1


def grouped_program(bs: Sequence[Tensor], config: GroupedConfig) -> Program:
    """For these B [E, K, N_i] and their like."""
    defines = gemm.gemm_defines(config.tile, [b[0] for b in bs], split_k=True)
    if config.gated:
        defines["GATED"] = 1
    return program_of(SOURCE, **defines)


class GroupedMatmul:
    """The kernel on operands of these sizes, strides and dtype, in the current context: prepared once, launched often.

    Args:
        a, bs: examples: A [R, K], and each B [E, K, N_i] or its matrices transposed, as ``lies_well`` wants them and
            ``may_share`` says.
        num_sms: blocks to launch.
    """

    def __init__(self, a: Tensor, bs: Sequence[Tensor], config: GroupedConfig, num_sms: int) -> None:
        tile, (experts, k, _) = config.tile, bs[0].shape
        whole = is_whole([b[0] for b in bs], tile)
        self._a = Maps(boxes_of_rows(a.dtype, (1, 1, *a.shape), (0, 0, *a.stride()), tile))
        program = grouped_program(bs, config)
        self._threads = gemm.threads_of(program)
        # Where a warpgroup has all of a tile's columns, each block of a cluster loads one of gate and up.
        has_all = self._threads == gemm.THREADS and tile.block_m == 128
        halves = config.gated * (1 if has_all else 2)
        self._bs = [Maps(boxes_of_experts(b, tile, whole, halves)) for b in bs]
        self._shared = config.shared(experts)
        self._function: Function = program.function("grouped_matmul", shared=config.shared(MOST_EXPERTS))
        clusters = self._function.most_clusters(2, self._threads, self._shared)
        self._blocks = 2 * min(num_sms // 2, clusters)
        self._columns = [-(-b.shape[2] // tile.block_n) for b in bs]
        self._ns = [b.shape[2] // (1 + config.gated) for b in bs]
        self._fixed = (k, config.raster_group)

    def launch(
        self, a: Tensor, terms: Sequence[tuple[Tensor, Tensor | None]], outs: Sequence[Tensor], offs: Tensor
    ) -> None:
        """On the current stream. ``terms``: each B and its bias."""
        p = _Params()
        put_map(p, _Params.a.offset, self._a[a.data_ptr()])
        for i, ((b, bias), out) in enumerate(zip(terms, outs, strict=True)):
            put_map(p, _Params.b.offset + i * ctypes.sizeof(TensorMap), self._bs[i][b.data_ptr()])
            p.c[i], p.n[i], p.columns[i] = out.data_ptr(), self._ns[i], self._columns[i]
            p.bias[i] = 0 if bias is None else bias.data_ptr()
        p.bs, p.all_columns = len(terms), sum(self._columns)
        p.ends, p.groups = offs.data_ptr(), offs.shape[0]
        p.total, (p.k, p.raster_group) = outs[0].shape[0], self._fixed
        self._function.launch(self._blocks, self._threads, p, current_stream_of(a), self._shared)
