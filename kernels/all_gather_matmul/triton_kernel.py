"""all_gather(A) @ B as one persistent kernel that starts on the local rows while the others arrive.

Computes ``C[src] = A[src] @ B`` for every rank ``src``: A[src] [m, K] are the rows of rank src, B [K, N] is this
rank's, C [W, m, N]. Accumulators are float32.

Who writes: copy engines, on a stream of their own after the acquire kernel (device/comm/copy_engine.py): chunks of
``chunk_rows`` rows into slot ``src`` of every peer's buffer [W, m, K], and after each ``flags(buffer)[src][chunk] =
e``. Who waits: a tile of a peer's rows, for the flag of the chunk that its last row lies in; acquire, system scope. No
tile spans two chunks. Several Bs are several launches on one buffer; the last one is FINAL and ends the epoch
(``sync.leave_block``). Graph-safe.

Order: local tiles, then those of rank+1, rank+2, ..., as the copies arrive. A block waits only for copies, never for
another block: any grid is safe, resident or not. docs/protocol.md#triton-kernels has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.jit.launch import (
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
from .configs import AllGatherMatmulConfig, gather_flags_per_rank


@triton.jit
def _store(c, src, row, column, tile, BM: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr):
    if CHUNKS == 1:
        c.store([src, row, column], tile.to(c.dtype).reshape(1, BM, BN))
    else:
        left, right = cut(tile, BM, BN)
        _store(c, src, row, column, left, BM, BN // 2, CHUNKS // 2)
        _store(c, src, row, column + BN // 2, right, BM, BN // 2, CHUNKS // 2)


@triton.jit(do_not_specialize=["rank", "buffer", "flags_at", "done_at", "record", "timeout_ns"])
def all_gather_matmul_kernel(
    a_local,  # [1, m, K]: this rank's rows
    a_gathered,  # [W, m, K]: the buffer
    b,  # [K, N] or [N, K]
    c,  # [W, m, N]
    words,
    fault,
    m,
    n,
    k,
    chunk_rows,
    rank,
    buffer,
    flags_at,
    flags_per_rank,
    done_at,
    span_words: tl.int64,
    record: tl.int64,
    timeout_ns: tl.int64,
    WORLD_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    FINAL: tl.constexpr,
):
    epoch = tl.load(words + sync.EPOCH + buffer) + 1
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    tiles = tiles_m * tiles_n
    ready = rank * flags_per_rank  # the flag this block waited for last; at first one that nobody sets

    for tile in range(tl.program_id(0), tiles * WORLD_SIZE, tl.num_programs(0)):
        src = (rank + tile // tiles) % WORLD_SIZE
        tile_m, tile_n = grouped(tile % tiles, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BM
        column = tile_n * BN
        if src == rank:
            a = a_local
            slot = 0
        else:
            a = a_gathered
            slot = src
            flag = src * flags_per_rank + (tl.minimum(row + BM, m) - 1) // chunk_rows
            if flag != ready:
                sync.wait_flag(words, fault, flags_at + flag, epoch, src, sync.WAIT_DATA, record, timeout_ns)
                sync.fence_proxy_async()
                ready = flag

        acc = tl.zeros((BM, BN), tl.float32)
        for depth in range(0, k, BK):
            at = a.load([slot, row, depth]).reshape(BM, BK)
            acc = tl.dot(at, load_b(b, depth, column, B_TRANSPOSED), acc, input_precision=PRECISION)
        _store(c, src, row, column, acc, BM, BN, CHUNKS)

    if FINAL:
        sync.leave_block(words, fault, buffer, done_at, epoch, rank, record, span_words, WORLD_SIZE, True)


def _launch(
    a: torch.Tensor, b: torch.Tensor, config: AllGatherMatmulConfig, world_size: int, *, final: bool
) -> Launch:
    (m, k), n, tile = a.shape, b.shape[1], config.tile
    rows = (1, tile.block_m, tile.block_k)
    operands = (
        Operand.of((1, m, k), (m * k, *a.stride()), rows),
        Operand.contiguous((world_size, m, k), rows),
        Operand.of_b(b, tile),
        Operand.contiguous((world_size, m, n), (1, tile.block_m, tile.block_n // tile.chunks)),
    )
    constants = {
        "WORLD_SIZE": world_size,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "GROUP_M": config.group_m,
        "CHUNKS": tile.chunks,
        "B_TRANSPOSED": is_transposed(b),
        "PRECISION": precision(a.dtype),
        "FINAL": final,
    }
    return Launch(all_gather_matmul_kernel, operands, constants, tile.warps, tile.stages)


def triton_gather_program(
    a: torch.Tensor, b: torch.Tensor, config: AllGatherMatmulConfig, world_size: int, *, final: bool
) -> TritonProgram:
    """What a launch compiles, whatever the rank is, and where the workspace lies."""
    (m, k), n = a.shape, b.shape[1]
    launch = _launch(a, b, config, world_size, final=final)
    numbers = m, n, k, config.chunk_rows, 0, *LIKE_A_WORKSPACE
    return TritonProgram(launch, ((a.dtype,) * 4, (torch.int32,) * 2), numbers, a.device)


class TritonAllGatherMatmul:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: with room for ``configs.copied_gather_layout``, the same call site on every rank.
        a, b: examples of the operands: the shard [m, K] and B [K, N]. Every launch gets tensors of these
            sizes, strides and dtype; ``why_not`` must be None for them, too.
        config: of ``configs.choose_all_gather_matmul``, the same on every rank.
        num_sms: blocks to launch at most; what else runs at the same time keeps the other SMs.

    Raises:
        ValueError: an operand is not supported, or the workspace is too small.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        a: torch.Tensor,
        b: torch.Tensor,
        config: AllGatherMatmulConfig,
        *,
        num_sms: int,
    ) -> None:
        check_operands("all_gather_matmul", a, b)
        (m, k), n = a.shape, b.shape[1]
        tile, layout, self.world_size = config.tile, workspace.layout, workspace.world_size
        self._gathered = (self.world_size, m, k)
        flags = gather_flags_per_rank(m, config)
        if layout.flags_per_rank < flags or layout.buffer_bytes < self.world_size * m * k * a.dtype.itemsize:
            raise ValueError(f"workspace: {layout} is too small for shards of {m} x {k} {a.dtype}")
        self.workspace, self.dtype = workspace, a.dtype
        self._programs = min(num_sms, count_tiles(tile, self.world_size, m, n))
        self._buffers: dict[int, torch.Tensor] = {}
        self._tensors: Sequence[torch.Tensor] = (workspace.words, workspace.fault.words)
        self._numbers = (m, n, k, config.chunk_rows, workspace.rank)
        self._launches = tuple(_launch(a, b, config, self.world_size, final=final) for final in (False, True))

    def gathered(self, buffer: int) -> torch.Tensor:
        """The buffer as [W, m, K]; the local slot is not written by this op."""
        if (found := self._buffers.get(buffer)) is None:
            found = self._buffers[buffer] = self.workspace.buffer(
                self.workspace.rank, buffer, self._gathered, self.dtype
            )
        return found

    def launch(
        self, buffer: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, final: bool, timeout_ns: int
    ) -> None:
        """Compute ``c`` [W, m, N], contiguous, on the current stream.

        The pushes of this epoch may be under way, or still to come on another stream. ``final``: this is the
        last launch in this epoch of the buffer.
        """
        numbers = (*self._numbers, *workspace_numbers(self.workspace, buffer, timeout_ns))
        self._launches[final](self._programs, (a, self.gathered(buffer), b, c), self._tensors, numbers)
