"""Copy engines push the products of the peers' parts while torch's kernels multiply the next ones: of float32, and
where kernel.cu does not run 16 bits.

On the current stream: acquire kernel, the product of one peer's part after the other, that of the own part, a wait for
each peer's, their sum, and the end of the epoch. On the copy stream: a product as soon as it is there, and then a flag
(device/comm/copy_engine.py). Who waits: `arrive` of acquire.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.copy_engine import CopiedCall, CopiedPiece
from . import OP
from .configs import ScatterKernelCall, copied_parts_layout

_LEAST_ROWS = 512  # of a product that is cut


class MatmulReduceScatterCopied(CopiedCall):
    """This op. ``example``: a call of the sizes and strides that every call has."""

    def __init__(self, workspace: Workspace[Layout], example: ScatterKernelCall) -> None:
        size, rank, a = workspace.world_size, workspace.rank, example.a
        super().__init__(workspace, copied_parts_layout(example.problem(size)))
        self._epilogue, self._split_n = example.epilogue, example.split_n
        self._lies = a.shape, a.stride()
        self._part = a.shape[0], a.shape[2], example.columns(size)
        self._cuts = _cuts(*self._part[:2], size)
        shape = size, a.shape[0] * a.shape[2] * self._part[2]
        slots = [workspace.buffer(rank, buffer, shape, a.dtype) for buffer in range(NUM_BUFFERS)]
        self._slots = [x.view(size, *self._part) for x in slots]

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """The products, the copies and the sum; as ``MatmulReduceScatterOneShot.call``."""
        workspace, (a, b, *terms) = self.workspace, tensors
        parts = a.as_strided(*self._lies)
        made = a.new_empty(workspace.world_size - 1, *self._part)

        def pieces(peer: int) -> Iterator[CopiedPiece]:
            part, (left, right) = made[peer - (peer > workspace.rank)], self._factors(parts, b, peer)
            for rows in self._cuts:
                sent = part[:, rows]
                _multiply(left[:, rows], right, sent)
                self._engine.follow()
                offset = workspace.rank * part.nbytes + sent.data_ptr() - part.data_ptr()
                yield CopiedPiece(sent.data_ptr(), offset, sent.nbytes)

        # Three frames: this and two more, on the fast path and on the slow one.
        workspace.raise_if_broken(OP, inside=3)
        with self._whole():
            buffer = workspace.next_buffer()
            slots = self._slots[buffer]
            self._engine.start(buffer, pieces, timeout_ns)
            _multiply(*self._factors(parts, b, workspace.rank), slots[workspace.rank])
            for _, arrival in self._arrivals[buffer]:
                arrival.launch(timeout_ns, stream)
            self._add_up(slots, terms, results[0].view(self._part))
            self._ends[buffer](stream)
            self._engine.join(buffer)  # what was sent may be overwritten then

    def _factors(self, parts: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the part of a rank, [L, m, K] and [K, N]."""
        if self._split_n:
            return parts[:, 0], b.narrow(1, rank * self._part[2], self._part[2])
        return parts[:, rank], b

    def _add_up(self, slots: torch.Tensor, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """In float32, rounded once."""
        epilogue = self._epilogue
        direct = not (terms or epilogue.average)
        total = out if direct else torch.empty_like(out, dtype=torch.float32)
        torch.sum(slots, 0, dtype=total.dtype, out=total)
        if direct:
            return
        if epilogue.average:
            total *= 1 / len(slots)
        for term in terms:
            total += term.view(out.shape) if term.dim() > 1 else term
        out.copy_(total)


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    if len(left) == 1:
        torch.mm(left[0], right, out=out[0])
    else:
        torch.bmm(left, right.expand(len(left), -1, -1), out=out)


def _cuts(batches: int, rows: int, world_size: int) -> list[slice]:
    """The rows of a part that are multiplied and sent together. Between two ranks it is cut: else its sending would
    begin when half of all is multiplied."""
    cut = batches == 1 and world_size == 2 and rows >= 2 * _LEAST_ROWS
    return [slice(rows // 2), slice(rows // 2, rows)] if cut else [slice(rows)]
