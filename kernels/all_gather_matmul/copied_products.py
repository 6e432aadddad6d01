"""Copy engines push the shards while torch's kernels multiply what has arrived: float32, fp8, and where kernel.cu does
not run 16 bits.

On the current stream: acquire kernel, the products of the own rows, for each peer a wait for its slot and the products
of its rows, and the end of the epoch. On the copy stream: the own rows, of fp8 their scales, and then a flag, to one
peer after the other (device/comm/copy_engine.py). Who waits: `arrive` of acquire.cu.

Columns that are gathered are put side by side as they come, and multiplied when all have: products are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.copy_engine import CopiedCall, CopiedPiece
from ..device.gemm.scaling import ScaledProducts, ScaledTensors, ScaleKind, scaled_mm_out
from . import OP
from .configs import GatherKernelCall, copied_layout
from .estimate import scales_offset, slot_bytes

SCALED_OP = "fused_all_gather_scaled_matmul"


class AllGatherProductsCopied(CopiedCall):
    """This op. ``example``: a call of the sizes and strides that every call has; ``biased``: of fp8 operands, whether
    each B has a bias."""

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, biased: Sequence[bool] = ()
    ) -> None:
        scaled, (m, k), size = example.scaled, example.a.shape, workspace.world_size
        problem = example.problem(size)
        dtype, columns = (example.a.dtype, k) if scaled is None else (scaled.types[0], 2 * k)
        super().__init__(workspace, copied_layout(problem))
        self._scaled, self._biased = scaled, list(biased)
        self._split_k, self._return_A = example.split_k, example.return_A
        self._rows, self._columns = m, columns
        self._stride = example.a.stride(0) * (columns // k)
        slot, offset = slot_bytes(problem), scales_offset(problem)
        # In a peer's buffer: of the own rows, and of their scales.
        self._places = workspace.rank * slot, workspace.rank * slot + offset
        rows, sent = m * columns * dtype.itemsize, 0 if scaled is None else scaled.sent_bytes(m, k)
        # Of each buffer and rank the rows and their scales.
        self._slots = [
            [
                (
                    x[:rows].view(dtype).view(m, columns),
                    x[offset : offset + sent].view(torch.float32).view(-1, 1),
                )
                for x in workspace.buffer(workspace.rank, buffer, (size, slot), torch.uint8)
            ]
            for buffer in range(NUM_BUFFERS)
        ]

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """The copies, and the products; as ``AllGatherScaledMatmulOneShot.call``. Where the operands are not fp8, the
        gathered shards [W, m, K], with ``split_k`` [m, W * K], are the last result if they are wanted."""
        scaled, m = self._scaled, self._rows
        own = tensors[0].as_strided((m, self._columns), (self._stride, 1)).contiguous()
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], None]
        beside: torch.Tensor | None = None
        if self._split_k:
            wide = self.workspace.world_size * self._columns
            beside = own.new_empty(m, wide) if not self._return_A else _part(results[-1], 0, m, wide)
            given, multiply = None, partial(_put_beside, beside)
        elif scaled is None:
            given, multiply = None, partial(_multiply, tensors[1:], results)
        else:
            of = ScaledTensors.of(tensors, self._biased)
            given = of.a_scale  # of its own rows, or of those of all ranks
            if scaled.kind is ScaleKind.ROWS:
                given = given.reshape(-1, 1)
            multiply = partial(_multiply_scaled, scaled, of._replace(a_scale=given), results)
        # Three frames: this and two more, on the fast path and on the slow one.
        self.workspace.raise_if_broken(OP if scaled is None else SCALED_OP, inside=3)
        self.as_they_come(own, given, multiply, timeout_ns, stream)
        if beside is not None:
            for b, result in zip(tensors[1:], results, strict=False):
                torch.mm(beside, b, out=_part(result, 0, m, b.shape[1]))

    def as_they_come(
        self,
        own: torch.Tensor,
        given: torch.Tensor | None,
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], None],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """Sends the own rows [m, K], contiguous, and calls ``multiply(src, rows, scales)``: for them with the scales
        that are ``given``, then for each peer's, when those are there for what follows on the current stream."""
        workspace = self.workspace
        pieces = [CopiedPiece(own.data_ptr(), self._places[0], own.nbytes)]
        if given is not None and self._scaled is not None and self._scaled.travels:
            pieces.append(CopiedPiece(given.data_ptr(), self._places[1], 4 * self._rows))
        with self._whole():
            buffer = workspace.next_buffer()
            self._engine.start(buffer, lambda peer: pieces, timeout_ns)
            multiply(workspace.rank, own, given)
            for src, arrival in self._arrivals[buffer]:
                arrival.launch(timeout_ns, stream)
                multiply(src, *self._slots[buffer][src])
            self._ends[buffer](stream)
            self._engine.join(buffer)  # the shard may be overwritten then


def _multiply(
    bs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    src: int,
    rows: torch.Tensor,
    _: torch.Tensor | None,
) -> None:
    """Of rank ``src``; after the products its rows, if these are wanted."""
    for b, result in zip(bs, results, strict=False):
        torch.mm(rows, b, out=_part(result, src, rows.shape[0], b.shape[1]))
    if len(results) > len(bs):
        _part(results[-1], src, *rows.shape).copy_(rows)


def _put_beside(beside: torch.Tensor, src: int, rows: torch.Tensor, _: torch.Tensor | None) -> None:
    """Rank ``src``'s columns between the others'."""
    columns = rows.shape[1]
    beside[:, src * columns : (src + 1) * columns].copy_(rows)


def _multiply_scaled(
    scaled: ScaledProducts,
    of: ScaledTensors,
    results: Sequence[torch.Tensor],
    src: int,
    rows: torch.Tensor,
    arrived: torch.Tensor | None,
) -> None:
    """``of`` has the scales of the own rows, or of those of all ranks; ``arrived``: of these rows, if they travel."""
    m = rows.shape[0]
    scales = arrived if scaled.travels and arrived is not None else of.a_scale
    if scaled.kind is ScaleKind.ROWS and not scaled.travels:
        scales = of.a_scale[src * m : (src + 1) * m]
    for b, b_scale, bias, result in zip(of.bs, of.b_scales, of.biases, results, strict=True):
        scaled_mm_out(scaled, rows, b, (scales, b_scale), bias, _part(result, src, m, b.shape[1]))


def _part(result: torch.Tensor, src: int, rows: int, columns: int) -> torch.Tensor:
    """Rank ``src``'s of new results, whatever their shape."""
    return result.as_strided((rows, columns), (columns, 1), src * rows * columns)
