"""reduce_scatter(A @ B) as one persistent kernel that sends each tile to the rank that sums it.

Computes ``out = sum over ranks src of A_src[:, rank] @ B_src``: A [L, W, m, K] (L: the product of the dimensions
before the one that is scattered, W: the ranks), B [K, N], out [L, m, N]. Partial results are rounded to A's dtype once
to be sent, summed in float32 in rank order, a bias [N] and a residual [L, m, N] are added if there are, and the result
is rounded once.

Who writes: a tile for rank ``dst`` leaves by TMA store into slot ``src`` = the sender of dst's buffer [W, L, m, N].
Copies of the buffer lie one span apart, so one descriptor whose first dimension is the rank reaches all. The flag
``flags(buffer)[src][tile] = e`` follows one tile later: the stores overlap with the next main loop. Who waits: every
block, for ``done(buffer)[p] >= e - 1`` of every peer before its first store; the epilogue of a local tile, for the same
tile of every peer. The last block ends the epoch (``sync.leave_block``). Graph-safe.

Order: tiles for rank+1, rank+2, ..., the local ones last. Blocks wait for other ranks' blocks: all of a launch must be
resident, no more than there are SMs. docs/protocol.md#triton-kernels has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.jit.launch import (
    ANY_SPAN,
    LIKE_A_WORKSPACE,
    Launch,
    Operand,
    TritonProgram,
    check_operands,
    is_transposed,
    precision,
    workspace_numbers,
)
from ..device.triton import sync
from ..device.triton.tile_table import count_tiles
from ..device.triton.tiles import cut, grouped, load_b
from .configs import Epilogue, MatmulReduceScatterConfig, scatter_flags_per_rank


@triton.jit
def _product(
    a,
    b,
    batch,
    dst,
    row,
    column,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    acc = tl.zeros((BM, BN), tl.float32)
    for depth in range(0, k, BK):
        at = a.load([batch, dst, row, depth]).reshape(BM, BK)
        acc = tl.dot(at, load_b(b, depth, column, B_TRANSPOSED), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _send(peers, dst, batch, row, column, tile, BM: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr):
    if CHUNKS == 1:
        peers.store([dst, batch, row, column], tile.to(peers.dtype).reshape(1, 1, BM, BN))
    else:
        left, right = cut(tile, BM, BN)
        _send(peers, dst, batch, row, column, left, BM, BN // 2, CHUNKS // 2)
        _send(peers, dst, batch, row, column + BN // 2, right, BM, BN // 2, CHUNKS // 2)


@triton.jit
def _sum_up(
    out,
    receive_buffer,
    slot,
    batch,
    row,
    column,
    own,
    bias,
    residual,
    m,
    n,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    AVERAGE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    if CHUNKS == 1:
        rows = row + tl.arange(0, BM)[:, None]
        columns = column + tl.arange(0, BN)[None, :]
        place = (batch * m + rows).to(tl.int64) * n + columns
        at = receive_buffer + place
        inside = (rows < m) & (columns < n)
        total = tl.full((BM, BN), -0.0, tl.float32)  # x + -0 is x, of -0 too
        for src in tl.static_range(WORLD_SIZE):
            if src == RANK:
                total += own
            else:
                part = tl.load(at + src * slot, mask=inside, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
        if AVERAGE:
            total *= 1.0 / WORLD_SIZE
        if BIAS:
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)
        if RESIDUAL:
            total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        out.store([batch, row, column], total.to(out.dtype).reshape(1, BM, BN))
    else:
        left, right = cut(own, BM, BN)
        H: tl.constexpr = BN // 2
        P: tl.constexpr = CHUNKS // 2
        for side in tl.static_range(2):
            _sum_up(
                out,
                receive_buffer,
                slot,
                batch,
                row,
                column + side * H,
                left if side == 0 else right,
                bias,
                residual,
                m,
                n,
                RANK,
                WORLD_SIZE,
                AVERAGE,
                BIAS,
                RESIDUAL,
                BM,
                H,
                P,
            )


@triton.jit(do_not_specialize=["buffer", "flags_at", "done_at", "record", "timeout_ns"])
def matmul_reduce_scatter_kernel(
    a,  # [L, W, m, K]
    b,  # [K, N] or [N, K]
    peers,  # [W, L, m, N]: this rank's slot of the buffer on every rank
    out,  # [L, m, N]
    receive_buffer,  # [W, L, m, N]: the local buffer
    words,
    fault,
    bias,  # [N], and
    residual,  # [L, m, N]; anything without BIAS and RESIDUAL
    batches,
    m,
    n,
    k,
    buffer,
    flags_at,
    flags_per_rank,
    done_at,
    span_words: tl.int64,
    record: tl.int64,
    timeout_ns: tl.int64,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    AVERAGE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    epoch = tl.load(words + sync.EPOCH + buffer) + 1
    band_m = tl.cdiv(m, BM)
    tiles_m = band_m * batches
    tiles_n = tl.cdiv(n, BN)
    tiles = tiles_m * tiles_n
    remote = tiles * (WORLD_SIZE - 1)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)

    sync.wait_peers(words, fault, done_at, 1, epoch - 1, sync.WAIT_FREE, record, timeout_ns, RANK, WORLD_SIZE)
    sync.fence_proxy_async()
    sendable = remote
    if sync.is_broken(fault):
        sendable = 0  # a peer may still read what the stores would overwrite, or the data is invalid

    pending = tl.full((), 0, tl.int64)
    for tile in range(block, sendable, blocks):
        dst = (RANK + 1 + tile // tiles) % WORLD_SIZE
        tile_m, tile_n = grouped(tile % tiles, tiles_m, tiles_n, GROUP_M)
        batch = tile_m // band_m
        row = (tile_m % band_m) * BM
        column = tile_n * BN
        acc = _product(a, b, batch, dst, row, column, k, BM, BN, BK, B_TRANSPOSED, PRECISION)
        if pending != 0:
            sync.post_stored(words + pending, epoch)
        _send(peers, dst, batch, row, column, acc, BM, BN, CHUNKS)
        flag = flags_at + RANK * flags_per_rank + tile % tiles
        pending = tl.cast(dst - RANK, tl.int64) * span_words + flag
    if pending != 0:
        sync.post_stored(words + pending, epoch)

    own = block + tl.cdiv(tl.maximum(remote - block, 0), blocks) * blocks - remote
    slot = tl.cast(batches, tl.int64) * m * n
    for tile in range(own, tiles, blocks):
        tile_m, tile_n = grouped(tile, tiles_m, tiles_n, GROUP_M)
        batch = tile_m // band_m
        row = (tile_m % band_m) * BM
        column = tile_n * BN
        acc = _product(a, b, batch, RANK, row, column, k, BM, BN, BK, B_TRANSPOSED, PRECISION)
        sync.wait_peers(
            words,
            fault,
            flags_at + tile,
            flags_per_rank,
            epoch,
            sync.WAIT_DATA,
            record,
            timeout_ns,
            RANK,
            WORLD_SIZE,
        )
        _sum_up(
            out,
            receive_buffer,
            slot,
            batch,
            row,
            column,
            acc,
            bias,
            residual,
            m,
            n,
            RANK,
            WORLD_SIZE,
            AVERAGE,
            BIAS,
            RESIDUAL,
            BM,
            BN,
            CHUNKS,
        )
    sync.leave_block(words, fault, buffer, done_at, epoch, RANK, record, span_words, WORLD_SIZE, False)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    config: MatmulReduceScatterConfig,
    epilogue: Epilogue,
    *,
    rank: int,
    span: int,
) -> Launch:
    """``span``: bytes from one rank's copy of the heap to the next."""
    (batches, world_size, m, _), n, tile = a.shape, b.shape[1], config.tile
    part = (batches, m, n)
    chunk = (tile.block_m, tile.block_n // tile.chunks)
    operands = (
        Operand.of(a.shape, a.stride(), (1, 1, tile.block_m, tile.block_k)),
        Operand.of_b(b, tile),
        Operand.of((world_size, *part), (span // a.dtype.itemsize, m * n, n, 1), (1, 1, *chunk)),
        Operand.contiguous(part, (1, *chunk)),
    )
    constants = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "AVERAGE": epilogue.average,
        "BIAS": epilogue.bias,
        "RESIDUAL": epilogue.residual,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "GROUP_M": config.group_m,
        "CHUNKS": tile.chunks,
        "B_TRANSPOSED": is_transposed(b),
        "PRECISION": precision(a.dtype),
    }
    return Launch(matmul_reduce_scatter_kernel, operands, constants, tile.warps, tile.stages)


def triton_scatter_program(
    a: torch.Tensor, b: torch.Tensor, config: MatmulReduceScatterConfig, epilogue: Epilogue, rank: int
) -> TritonProgram:
    """What a launch compiles, wherever the workspace lies."""
    (batches, _, m, k), n = a.shape, b.shape[1]
    launch = _launch(a, b, config, epilogue, rank=rank, span=ANY_SPAN)
    # The buffer, words, the fault's words, bias and residual.
    tensors = a.dtype, torch.int32, torch.int32, a.dtype, a.dtype
    return TritonProgram(launch, ((a.dtype,) * 4, tensors), (batches, m, n, k, *LIKE_A_WORKSPACE), a.device)


class TritonMatmulReduceScatter:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.tiled_scatter_layout``, the same call site on every rank.
        a, b: examples of the operands: A [L, W, m, K] and B [K, N]. Every launch gets tensors of these sizes,
            strides and dtype; ``why_not`` must be None for them, too.
        config: of ``configs.choose_matmul_reduce_scatter``, the same on every rank.
        epilogue: what becomes of the sum; its dtype is that of the operands. Every launch gets the bias and the
            residual that it names, contiguous.
        num_sms: blocks to launch at most. As many must find an SM each, see above.

    Raises:
        ValueError: an operand is not supported, or the workspace is too small.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        a: torch.Tensor,
        b: torch.Tensor,
        config: MatmulReduceScatterConfig,
        epilogue: Epilogue,
        *,
        num_sms: int,
    ) -> None:
        check_operands("matmul_reduce_scatter", a, b)
        (batches, world_size, m, k), n = a.shape, b.shape[1]
        if world_size != workspace.world_size:
            raise ValueError(
                f"a: has {world_size} parts, must have one for each of {workspace.world_size} ranks"
            )
        tile, layout = config.tile, workspace.layout
        self._part = (batches, m, n)
        part_bytes = batches * m * n * a.dtype.itemsize
        flags = scatter_flags_per_rank(m, n, config, batches)
        if layout.flags_per_rank < flags or layout.buffer_bytes < world_size * part_bytes:
            raise ValueError(f"workspace: {layout} is too small for results of {self._part} {a.dtype}")
        self.workspace, self.dtype, self._epilogue = workspace, a.dtype, epilogue
        self._programs = min(num_sms, count_tiles(tile, batches * world_size, m, n))
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._numbers = (batches, m, n, k)
        self._launch = _launch(a, b, config, epilogue, rank=workspace.rank, span=workspace.span)

    def _buffer(self, buffer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's slot on rank 0, from where the descriptor counts the ranks, and the local buffer."""
        if (found := self._buffers.get(buffer)) is None:
            w = self.workspace
            shape = (w.world_size, *self._part)
            slot, receive_buffer = (
                w.buffer(0, buffer, shape, self.dtype).select(0, w.rank),
                w.buffer(w.rank, buffer, shape, self.dtype),
            )
            found = self._buffers[buffer] = (slot, receive_buffer)
        return found

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, _: int
    ) -> None:
        """``launch`` in the next buffer."""
        a, b, *terms = tensors
        self.launch(self.workspace.next_buffer(), a, b, results[0], *terms, timeout_ns=timeout_ns)

    def launch(
        self,
        buffer: int,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *terms: torch.Tensor,
        timeout_ns: int,
    ) -> None:
        """Compute ``out`` [L, m, N], contiguous, on the current stream: a whole epoch of the buffer.

        ``terms``: the bias and the residual that the epilogue names.
        """
        slot, receive_buffer = self._buffer(buffer)
        numbers = (*self._numbers, *workspace_numbers(self.workspace, buffer, timeout_ns))
        bias = terms[0] if self._epilogue.bias else receive_buffer
        residual = terms[-1] if self._epilogue.residual else receive_buffer
        tensors = (receive_buffer, self.workspace.words, self.workspace.fault.words, bias, residual)
        self._launch(self._programs, (a, b, slot, out), tensors, numbers)
