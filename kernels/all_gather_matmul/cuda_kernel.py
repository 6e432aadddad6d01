"""Launches kernel.cu, which says what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import gemm
from ..device.gate import leave
from ..device.gemm import Half, boxes_of_b, boxes_of_rows, is_whole, watch
from ..device.program import Watch
from ..device.tensor_map import Maps, TensorMap, contiguous
from .configs import PushConfig, push_flags_per_rank

MOST_BS = 4  # of one launch


SOURCE = Path(__file__).parent / "kernel.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("own", TensorMap),
        ("gathered", TensorMap),
        ("b", TensorMap * MOST_BS),
        ("watch", Watch),
        ("half", Half),
        ("a", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("c", ctypes.c_uint64 * MOST_BS),
        ("n", ctypes.c_int32 * MOST_BS),
        ("bs", ctypes.c_int32),
        ("columns", ctypes.c_int32 * MOST_BS),
        ("m", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("band", ctypes.c_int32),
        ("remote_band", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("senders", ctypes.c_int32),
        ("push", ctypes.c_int32),
        ("final", ctypes.c_int32),
        ("_size_is_a_multiple_of_64", ctypes.c_int32 * 3),
    )


def defines(bs: Sequence[torch.Tensor], config: PushConfig) -> gemm.Defines:
    """What kernel.cu is compiled with for these B [K, N_i] and their like."""
    return (
        *gemm.defines(config.tile, bs).items(),
        ("PIECE_ROWS", config.piece_rows),
        ("PIECE_COLUMNS", config.piece_columns),
        ("UNIT_COLUMNS", config.unit_columns),
    )


class AllGatherMatmulPush:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.push_layout``, the same call site on every rank.
        a, bs: examples of the operands: the shard [m, K] and up to MOST_BS matrices [K, N_i], all with K contiguous
            or all with N. Every launch gets tensors of these sizes, strides and dtype.
        config: of ``configs.choose_push``, the same on every rank.
        num_sms: blocks to launch. As many must find an SM each.

    Raises:
        ValueError: the workspace is too small.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        a: torch.Tensor,
        bs: Sequence[torch.Tensor],
        config: PushConfig,
        *,
        num_sms: int,
    ) -> None:
        (m, k), size, dtype, tile = a.shape, workspace.world_size, a.dtype, config.tile
        layout = workspace.layout
        flags = push_flags_per_rank(m, k, config)
        if layout.flags_per_rank < flags or layout.half_bytes < size * m * k * dtype.itemsize:
            raise ValueError(f"workspace: {layout} is too small for shards of {m} x {k} {dtype}")
        self.workspace, self._senders = workspace, config.senders
        rows = (1, 1, m, k)
        strides = (0, 0, *a.stride())
        self._own = Maps(boxes_of_rows(dtype, rows, strides, tile))
        self._bs = [Maps(boxes_of_b(b, tile, is_whole(bs, tile))) for b in bs]
        self._params = [self._fixed(half, m, k, dtype, bs, config) for half in (0, 1)]
        program = gemm.program(SOURCE, defines(bs, config))
        self._launches = gemm.launches(program, "all_gather_matmul", self._params, num_sms, tile.shared)

    def _fixed(
        self, half: int, m: int, k: int, dtype: torch.dtype, bs: Sequence[torch.Tensor], config: PushConfig
    ) -> _Params:
        w, tile = self.workspace, config.tile
        offset, shape = w.layout.half(half), (w.world_size, m, k)
        gathered = boxes_of_rows(dtype, (1, *shape), (0, *contiguous(shape)), tile)
        p = _Params()
        p.gathered = gathered.encode(w.address + offset)
        p.data = w.address + offset
        p.watch, p.half = watch(w), Half.of(w, half)
        p.bs, p.m, p.k = len(bs), m, k
        for i, b in enumerate(bs):
            p.n[i] = b.shape[1]
            p.columns[i] = -(-b.shape[1] // tile.block_n)
        p.band, p.group = config.band, config.group
        p.remote_band = config.remote_band
        return p

    def launch(
        self,
        half: int,
        a: int,
        bs: Sequence[int],
        cs: Sequence[int],
        *,
        push: bool,
        final: bool,
        timeout_ns: int,
        stream: int,
    ) -> None:
        """Compute each ``c`` [W, m, N_i], contiguous, from tensors at these addresses.

        Args:
            push: send the own shard; for the first launch on this use of the half.
            final: end the use; for the last one.
        """
        with self.workspace.lock:
            p = self._params[half]
            p.own, p.a = self._own[a], a
            for i, b in enumerate(bs):
                p.b[i], p.c[i] = self._bs[i][b], cs[i]
            p.watch.timeout_ns, p.final = timeout_ns, final
            p.senders = self._senders if push else 0
            p.push = push and self._senders == 0
            self._launches[half](stream)


def prepare(
    workspace: Workspace[Layout], a: torch.Tensor, bs: list[torch.Tensor], config: PushConfig, num_sms: int
) -> list[AllGatherMatmulPush]:
    """A kernel for each MOST_BS of these Bs, for ``all_gather_matmul``."""
    return [
        AllGatherMatmulPush(workspace, a, bs[i : i + MOST_BS], config, num_sms=num_sms)
        for i in range(0, len(bs), MOST_BS)
    ]


def all_gather_matmul(
    workspace: Workspace[Layout],
    kernels: list[AllGatherMatmulPush],
    a: torch.Tensor,
    bs: list[torch.Tensor],
    timeout_ns: int,
    *,
    return_A: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i], on the current stream.

    Args:
        kernels: what ``prepare`` made for such tensors.
        a: the own shard, [m, K], contiguous.
        bs: each [K, N_i], all with K contiguous or all with N.
    """
    size, (m, k) = workspace.world_size, a.shape
    products = [a.new_empty((size, m, b.shape[1])) for b in bs]
    half = workspace.next_half()
    stream = torch._C._cuda_getCurrentRawStream(a.get_device())
    for i, kernel in enumerate(kernels):
        some = slice(i * MOST_BS, (i + 1) * MOST_BS)
        kernel.launch(
            half,
            a.data_ptr(),
            [b.data_ptr() for b in bs[some]],
            [c.data_ptr() for c in products[some]],
            push=i == 0,
            final=i == len(kernels) - 1 and not return_A,
            timeout_ns=timeout_ns,
            stream=stream,
        )
    if not return_A:
        return None, products
    gathered = a.new_empty((size, m, k))
    gathered.copy_(workspace.half(workspace.rank, half, (size, m, k), a.dtype))
    gathered[workspace.rank].copy_(a)
    leave(workspace, half, stream)
    return gathered, products
