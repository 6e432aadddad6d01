"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import getitem
from pathlib import Path

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.double_buffer import BufferWords
from ..device.gemm import gemm
from ..device.gemm.gemm import boxes_of_b, boxes_of_rows, is_whole
from ..device.gemm.gemm_tiles import BLOCK_K
from ..device.gemm.scaling import ScaleKind, ScalesParams
from ..device.gemm.tensor_map import Maps, TensorMap, put_maps
from ..device.jit.program import Defines, Program, WaitParams, fields, program_of
from . import configs

SOURCE = Path(__file__).parent / "kernel.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("a", TensorMap * configs.MOST_PRODUCTS),
        ("b", TensorMap * configs.MOST_PRODUCTS),
        ("watch", WaitParams),
        ("buffer", BufferWords),
        *fields(ctypes.c_uint64, "receive_buffer staging out"),
        *fields(ctypes.c_int32, "batches m n products"),
        ("depths", ctypes.c_int32 * configs.MOST_PRODUCTS),
        *fields(ctypes.c_int32, "depth raster_group"),
        ("scale", ctypes.c_float),
        *fields(ctypes.c_uint64, "bias residual"),
        ("total", ctypes.c_int32),
        ("_size_is_a_multiple_of_64", ctypes.c_int32 * 5),
    )


_A, _B, _OUT, _BIAS, _RESIDUAL = (getattr(_Params, x).offset for x in ("a", "b", "out", "bias", "residual"))
_put_address = struct.Struct("Q").pack_into  # a store to a ctypes field costs twice as much


def scatter_defines(
    b: torch.Tensor, config: configs.ScatterPushConfig, world_size: int, rank: int, epilogue: configs.Epilogue
) -> Defines:
    """What kernel.cu is compiled with for B [K, N] and its like, or with ``split_n`` for a rank's columns of it."""
    return {
        **gemm.gemm_defines(config.tile, [b]),
        "SPLIT_N": int(config.split_n),
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "OUT_FLOAT32": int(epilogue.out_dtype == torch.float32),
        "BIAS": int(epilogue.bias),
        "RESIDUAL": int(epilogue.residual),
        "ALL_REDUCE": int(epilogue.to_all),
        "ALL_TO_ALL": int(epilogue.apart),
        **(config.scaled.defines if config.scaled else {}),
    }


def scatter_program(
    b: torch.Tensor, config: configs.ScatterPushConfig, epilogue: configs.Epilogue, ranks: tuple[int, int]
) -> Program:
    """That which is launched for the whole B. ``ranks``: how many, and which this is."""
    return program_of(SOURCE, **scatter_defines(_of_one(b, config, ranks[0]), config, *ranks, epilogue))


def _of_one(b: torch.Tensor, config: configs.ScatterPushConfig, world_size: int) -> torch.Tensor:
    """The columns of B that one rank's results have."""
    return b.narrow(1, 0, b.shape[1] // world_size) if config.split_n else b


class MatmulReduceScatterPush:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.scatter_push_layout``, the same call site on every rank.
        example: a call of the sizes, strides and dtype that every launch has, of MOST_PRODUCTS at most; with
            ``epilogue.to_all`` A is [1, 1, M, K]. Every launch gets the bias and the residual that its epilogue names.
        config: the same on every rank.

    Raises:
        ValueError: the workspace is too small.
    """

    params = _Params  #: the twin of what the kernel takes

    def __init__(
        self,
        workspace: Workspace[Layout],
        example: configs.ScatterKernelCall,
        config: configs.ScatterPushConfig,
    ) -> None:
        factors, epilogue, size = example.factors, example.epilogue, workspace.world_size
        (a, b), ks = factors[:2], [x.shape[-1] for x in factors[::2]]
        (batches, _, rows, _), dtype, tile, layout = a.shape, a.dtype, config.tile, workspace.layout
        of_one, problem = _of_one(b, config, size), example.problem(size)
        n, whole, m = problem.n, is_whole([of_one], tile), problem.rows_per_rank
        if not layout.holds(configs.scatter_push_layout(config, problem)):
            raise ValueError(f"workspace: {layout} is too small for results of {batches} x {m} x {n} {dtype}")
        self.workspace = workspace
        self._a = [Maps(boxes_of_rows(dtype, tuple(x.shape), x.stride(), tile)) for x in factors[::2]]
        self._b = [Maps(boxes_of_b(x, tile, whole)) for x in factors[1::2]]
        self._factors, self._put = len(factors), put_maps(len(ks))
        self._params, self._timeouts_ns = [], [0, 0]
        for buffer in (0, 1):
            p = self.params()
            p.watch, p.buffer = WaitParams.of(workspace), BufferWords.of(workspace, buffer)
            p.receive_buffer = workspace.address + layout.buffer(buffer)
            p.staging = workspace.address + layout.staging
            p.batches, p.m, p.n, p.raster_group, p.products = batches, m, n, config.raster_group, len(ks)
            p.depths[: len(ks)] = [-(-k // BLOCK_K) for k in ks]
            p.depth = sum(p.depths)
            p.scale = 1 / size if epilogue.average else 1
            p.total = rows
            self._params.append(p)
        self._terms = _BIAS if epilogue.bias else _RESIDUAL
        terms = epilogue.bias + epilogue.residual
        self._put_terms = struct.Struct(f"{terms}Q").pack_into if terms else None
        program = scatter_program(b, config, epilogue, (size, workspace.rank))
        grid = example.num_sms, tile.shared
        self._launches = gemm.launches(program, "matmul_reduce_scatter", self._params, *grid)

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole epoch of the buffer, from the addresses of the factors and what the epilogue adds, to that of out
        [L, m, N] ([M, N] with ``epilogue.to_all``, [W, L, m, N] with ``epilogue.apart``), contiguous.

        ``stream``: a CUstream as an integer.
        """
        with self.workspace.lock:
            p = self._params[buffer]
            self._put(p, _A, *map(getitem, self._a, operands[: self._factors : 2]))
            self._put(p, _B, *map(getitem, self._b, operands[1 : self._factors : 2]))
            if self._put_terms is not None:
                self._put_terms(p, self._terms, *operands[self._factors :])
            _put_address(p, _OUT, results[0])
            if timeout_ns != self._timeouts_ns[buffer]:
                p.watch.timeout_ns = self._timeouts_ns[buffer] = timeout_ns
            self._launches[buffer](stream)


class _ScaledParams(_Params):
    """The twin of ``Params`` in kernel.cu for fp8 operands."""

    _fields_ = (  # type: ignore[assignment]  # after those of its base
        ("scales", ctypes.c_uint64),
        ("of_b", ScalesParams),
        ("_size_is_still_a_multiple_of_64", ctypes.c_int32 * 8),
    )


class ScaledMatmulReduceScatterPush(MatmulReduceScatterPush):
    """The same of fp8 operands: an example of one product, without terms. ``strides``: of B's block-wise scales
    [K / 128, N / 128]."""

    params = _ScaledParams

    def __init__(
        self,
        workspace: Workspace[Layout],
        call: configs.ScatterKernelCall,
        strides: tuple[int, ...],
        config: configs.ScatterPushConfig,
    ) -> None:
        super().__init__(workspace, call, config)
        assert call.scaled is not None
        if call.scaled.kind is ScaleKind.BLOCKS:
            for p in self._params:
                p.of_b.b_block, p.of_b.b_column = strides

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole epoch of the buffer, to the address of out [L, m, N], contiguous.

        Args:
            operands: addresses of A and B; of the scales of A, one, [rows], or [K / 128, rows], contiguous; of those of
                B, one, [N], contiguous, from a multiple of 16 bytes on, or [K / 128, N / 128]; and of a bias [N] of
                each partial result, at such an address, if there is one.
        """
        a, b, a_scale, b_scale, *bias = operands
        with self.workspace.lock:
            p = self._params[buffer]
            p.scales, p.of_b.b, p.of_b.bias = a_scale, b_scale, bias[0] if bias else 0
            super().launch(buffer, (a, b), results, timeout_ns, stream)
