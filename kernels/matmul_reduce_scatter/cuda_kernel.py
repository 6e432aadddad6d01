"""Launches kernel.cu, which says what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import gemm
from ..device.gemm import Half, boxes_of_b, boxes_of_rows, is_whole, watch
from ..device.program import Watch
from ..device.tensor_map import Maps, TensorMap, put_map
from .configs import BulkConfig, bulk_needs

SOURCE = Path(__file__).parent / "kernel.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("watch", Watch),
        ("half", Half),
        ("inbox", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("batches", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("band", ctypes.c_int32),
        ("average", ctypes.c_int32),
        ("_size_is_a_multiple_of_64", ctypes.c_int32 * 4),
    )


_A, _B = _Params.a.offset, _Params.b.offset


def defines(
    b: torch.Tensor, config: BulkConfig, world_size: int, out_dtype: torch.dtype | None = None
) -> gemm.Defines:
    """What kernel.cu is compiled with for B [K, N] and its like; the result is float32 or, by default, like B."""
    return (
        *gemm.defines(config.tile, [b]).items(),
        ("WORLD_SIZE", world_size),
        ("OUT_FLOAT32", int(out_dtype == torch.float32)),
    )


class MatmulReduceScatterBulk:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.bulk_needs``, the same call site on every rank.
        a, b: examples of the operands: A [L, W, m, K] and B [K, N]. Every launch gets tensors of these sizes,
            strides and dtype.
        config: of ``configs.choose_bulk``, the same on every rank.
        average: the mean of the ranks instead of the sum.
        out_dtype: of the result: float32, or that of the operands.
        num_sms: blocks to launch at most. As many must find an SM each.

    Raises:
        ValueError: the workspace is too small.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        a: torch.Tensor,
        b: torch.Tensor,
        config: BulkConfig,
        *,
        average: bool,
        out_dtype: torch.dtype,
        num_sms: int,
    ) -> None:
        (batches, size, m, k), n, dtype, tile = a.shape, b.shape[1], a.dtype, config.tile
        nbytes, flags = bulk_needs(m, n, config, size, batches)
        layout = workspace.layout
        if layout.flags_per_rank < flags or layout.half_bytes < nbytes:
            raise ValueError(f"workspace: {layout} is too small for results of {batches} x {m} x {n} {dtype}")
        self.workspace = workspace
        self._a = Maps(boxes_of_rows(dtype, tuple(a.shape), a.stride(), tile))
        self._b = Maps(boxes_of_b(b, tile, is_whole([b], tile)))
        self._params = []
        for half in (0, 1):
            p = _Params()
            p.watch, p.half = watch(workspace), Half.of(workspace, half)
            p.inbox = workspace.address + layout.half(half)
            p.batches, p.m, p.n, p.k, p.band, p.average = batches, m, n, k, config.band, average
            self._params.append(p)
        program = gemm.program(SOURCE, defines(b, config, size, out_dtype))
        self._launches = gemm.launches(program, "matmul_reduce_scatter", self._params, num_sms, tile.shared)

    def launch(
        self, half: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole use of the half, from the addresses of A and B, to that of out [L, m, N], contiguous.

        ``stream``: a CUstream as an integer.
        """
        with self.workspace.lock:
            p = self._params[half]
            put_map(p, _A, self._a[operands[0]])
            put_map(p, _B, self._b[operands[1]])
            p.out, p.watch.timeout_ns = results[0], timeout_ns
            self._launches[half](stream)
