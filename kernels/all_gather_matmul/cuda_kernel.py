"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import getitem
from pathlib import Path
from typing import Any

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.double_buffer import BufferWords
from ..device.gemm import gemm
from ..device.gemm.gemm import boxes_of_b, boxes_of_rows, is_whole
from ..device.gemm.gemm_tiles import BLOCK_K
from ..device.gemm.operands import ALIGNMENT
from ..device.gemm.tensor_map import Boxes, Maps, TensorMap, put_map, put_maps
from ..device.jit.program import Defines, Program, WaitParams, fields, program_of
from .configs import MOST_BS, GatherKernelCall, GatherPushConfig, gather_push_layout
from .estimate import CHUNK_COLUMNS

SOURCE = Path(__file__).parent / "kernel.cu"
ROWS = 64  # of a tile, that a warpgroup multiplies


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("own", TensorMap),
        ("gathered", TensorMap),
        ("returned", TensorMap),
        ("b", TensorMap * MOST_BS),
        ("watch", WaitParams),
        ("buffer", BufferWords),
        *fields(ctypes.c_uint64, "a data"),
        ("c", ctypes.c_uint64 * MOST_BS),
        ("n", ctypes.c_int32 * MOST_BS),
        ("bs", ctypes.c_int32),
        ("columns", ctypes.c_int32 * MOST_BS),
        *fields(
            ctypes.c_int32,
            "m k stride raster_group remote_raster_group group comm_sms skipped_steps first_wave push final",
        ),
        # Tensor maps are aligned to 64 bytes, so there its size is a multiple of that.
        ("reserved", ctypes.c_int32 * 12),
    )


_OWN, _RETURNED, _B, _A, _C, _COMM_SMS = (
    getattr(_Params, name).offset for name in ("own", "returned", "b", "a", "c", "comm_sms")
)
# A store to a ctypes field costs as much as all of these.
_put_address, _put_schedule = struct.Struct("Q").pack_into, struct.Struct("5i").pack_into


def gather_defines(
    bs: Sequence[torch.Tensor], config: GatherPushConfig, *, return_A: bool = False
) -> Defines:
    """What kernel.cu is compiled with for these B [K, N_i] and their like."""
    defines = {
        **gemm.gemm_defines(config.tile, bs, split_k=config.split_k),
        "CHUNK_ROWS": config.chunk_rows,
        "CHUNK_COLUMNS": CHUNK_COLUMNS,
        "K_CHUNK_COLUMNS": config.k_chunk_columns,
        "RETURN_A": int(return_A),
        "ALL_TO_ALL": int(config.exchanged),
    }
    if (scaled := config.scaled) is not None:
        defines |= {**scaled.defines, "OUT_FLOAT32": int(scaled.out_dtype == torch.float32)}
    return defines


def push_programs(
    bs: Sequence[torch.Tensor], config: GatherPushConfig, *, return_A: bool = False
) -> list[Program]:
    """Those of the launches for any number of Bs."""
    return [
        program_of(
            SOURCE, **gather_defines(bs[first : first + MOST_BS], config, return_A=return_A and not first)
        )
        for first in range(0, len(bs), MOST_BS)
    ]


def can_take(a: torch.Tensor) -> bool:
    """Whether a shard [m, K], at an address that is a multiple of 16, need not be copied: its rows are contiguous and
    lie at one distance, a multiple of 16 bytes, one after the other."""
    if a.is_contiguous():
        return True
    (distance, step), k = a.stride(), a.shape[1]
    nbytes = distance * a.element_size()  # of which a copy of rows takes less than 2 GiB
    return step == 1 and k <= distance and nbytes < 1 << 31 and nbytes % ALIGNMENT == 0


def row_stride(a: torch.Tensor) -> int:
    """From one row of a shard [m, K] to the next, in elements. (That of a single row may be anything.)"""
    return a.shape[1] if a.is_contiguous() else a.stride(0)


def boxes_returned(shard: tuple[int, int], dtype: torch.dtype, world_size: int, *, split_k: bool) -> Boxes:
    """Of the gathered shards [W, m, K], with ``split_k`` [m, W * K]: what a warpgroup stores of a stage."""
    m, k = shard
    distance, row = (k, world_size * k) if split_k else (m * k, k)
    return Boxes(dtype, (1, world_size, m, k), (0, distance, row, 1), (1, 1, ROWS, BLOCK_K))


class AllGatherMatmulPush:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.gather_push_layout``, the same call site on every rank.
        example: a call of the sizes, strides and dtype that every launch has, its Bs all with K contiguous or all with
            N. Blocks that send first must find one of its SMs each.
        config: the same on every rank.
        skip: Bs before those of this launch, which are up to MOST_BS.

    Attributes:
        push: whether a launch sends the own shard: an epoch's first one.
        final: whether it ends the epoch: its last one.

    Raises:
        ValueError: the workspace is too small.
    """

    params = _Params  #: the twin of what the kernel takes

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, config: GatherPushConfig, skip: int = 0
    ) -> None:
        end = min(skip + MOST_BS, len(example.bs))
        self.push, self.final = skip == 0, end == len(example.bs)
        self._mine = slice(skip + 1, end + 1), slice(skip, end)  # of the operands, and of the results
        a, bs, return_A = example.a, example.bs[skip:end], example.return_A and not skip
        (m, k), size, dtype, tile = a.shape, workspace.world_size, a.dtype, config.tile
        parts = size if config.exchanged else 1
        m //= parts
        if not workspace.layout.holds(gather_push_layout(m, k, size, config)):
            raise ValueError(f"workspace: {workspace.layout} is too small for shards of {m} x {k} {dtype}")
        self.workspace = workspace
        sends = (config.comm_sms, config.skipped_steps, config.first_wave, not config.comm_sms)
        self._sends = sends, (0, 0, 0, False)
        self._timeouts_ns = [0, 0]
        rows, strides = (1, parts, m, k), (0, m * row_stride(a) * config.exchanged, *a.stride())
        self._own = Maps(boxes_of_rows(dtype, rows, strides, tile))
        stacks = [b.unflatten(0, (size, -1)) if config.split_k else b for b in bs]
        self._bs = [Maps(boxes_of_b(b, tile, is_whole(bs, tile))) for b in stacks]
        returned = boxes_returned((m, k), dtype, size, split_k=config.split_k)
        self._returned = Maps(returned) if return_A else None
        self._params = [self._fixed(buffer, (a, m), bs, config) for buffer in (0, 1)]
        self._put_bs, self._put_cs = put_maps(len(bs)), struct.Struct(f"{len(bs)}Q").pack_into
        (program,) = push_programs(bs, config, return_A=return_A)
        grid = example.num_sms, tile.shared
        self._launches = gemm.launches(program, "all_gather_matmul", self._params, *grid)

    def _fixed(
        self,
        buffer: int,
        shard: tuple[torch.Tensor, int],
        bs: Sequence[torch.Tensor],
        config: GatherPushConfig,
    ) -> _Params:
        w, tile, (a, m), k = self.workspace, config.tile, shard, shard[0].shape[1]
        offset = w.layout.buffer(buffer)
        gathered = boxes_of_rows(a.dtype, (1, w.world_size, m, k), (0, m * k, k, 1), tile)
        p = self.params()
        p.gathered = gathered.encode(w.address + offset)
        p.data = w.address + offset
        p.watch, p.buffer = WaitParams.of(w), BufferWords.of(w, buffer)
        p.bs, p.m, p.k, p.stride = len(bs), m, k, row_stride(a)
        for i, b in enumerate(bs):
            p.n[i] = b.shape[1]
            p.columns[i] = -(-b.shape[1] // tile.block_n)
        p.raster_group, p.group = config.raster_group, config.group
        p.remote_raster_group = config.remote_raster_group
        return p

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """Its part of an epoch of the buffer.

        Args:
            operands: addresses of the local shard and of all Bs.
            results: addresses of the products, each [W, m, N_i], contiguous, and after them with ``return_A`` of the
                gathered shards [W, m, K]; with ``split_k`` [m, N_i] and [m, W * K].
            stream: a CUstream as an integer.
        """
        bs, outs = self._mine
        a = operands[0]
        with self.workspace.lock:
            p = self._params[buffer]
            put_map(p, _OWN, self._own[a])
            self._put_bs(p, _B, *map(getitem, self._bs, operands[bs]))
            self._put_cs(p, _C, *results[outs])
            _put_address(p, _A, a)
            if self._returned is not None:
                put_map(p, _RETURNED, self._returned[results[-1]])
            _put_schedule(p, _COMM_SMS, *self._sends[not self.push], self.final)
            if timeout_ns != self._timeouts_ns[buffer]:
                p.watch.timeout_ns = self._timeouts_ns[buffer] = timeout_ns
            self._launches[buffer](stream)


class AllGatherMatmulPushes:
    """The same of any number of Bs: a launch for each MOST_BS of them.

    Args: as for ``AllGatherMatmulPush``.
    """

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, config: GatherPushConfig
    ) -> None:
        skipped = range(0, len(example.bs), MOST_BS)
        self._kernels = [AllGatherMatmulPush(workspace, example, config, skip) for skip in skipped]

    def launch(self, *given: Any) -> None:
        """A whole epoch of the buffer; as ``AllGatherMatmulPush.launch``."""
        for kernel in self._kernels:
            kernel.launch(*given)
