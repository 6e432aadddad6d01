"""Copy engines push pieces of the product while torch's kernels multiply the next ones.

The product is cut into pieces of columns, or of rows where it has more of these. Of each, on the current stream: the
product, put where it belongs in the result; acquire kernel; after the next piece's product a wait for each peer's
piece, a copy of it to where it belongs, and the end of the epoch. On the copy stream: the piece, and then a flag, to
one peer after the other (device/comm/copy_engine.py). Who waits: `arrive` of acquire.cu. A call has as many epochs as
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedCall, CopiedConfig, CopiedPiece
from ..device.kernel_choice import KernelChoice, KernelSteps
from . import OP
from .configs import (
    MatmulAllGatherKernelCall,
    copied_pieces_layout,
    copied_pieces_save_us,
    estimate_copied_pieces_us,
)

VECTOR = torch.complex128  #: 16 bytes, as any


class MatmulAllGatherCopied(CopiedCall):
    """This op. ``example``: a call of the sizes and strides that every call has."""

    def __init__(self, workspace: Workspace[Layout], example: MatmulAllGatherKernelCall) -> None:
        size, rank, a = workspace.world_size, workspace.rank, example.a
        problem = example.problem(size)
        super().__init__(workspace, copied_pieces_layout(problem))
        self._lies, self._part = (a.shape, a.stride()), (problem.m, problem.n)
        self._pieces = problem.pieces()
        slot = problem.most_in_piece // a.dtype.itemsize
        # Torch copies rows that do not follow one another element by element: fewer, wider ones take half the time.
        vectors = problem.n * a.dtype.itemsize % VECTOR.itemsize == 0
        self._wide = VECTOR if vectors else a.dtype
        self._offset = rank * problem.most_in_piece
        self._slots = [workspace.buffer(rank, i, (size, slot), a.dtype) for i in range(NUM_BUFFERS)]

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """The products, and the copies; as ``MatmulReduceScatterOneShot.call``. The result is [..., W * N]."""
        workspace, (a, b), (m, n) = self.workspace, tensors, self._part
        a = a.as_strided(*self._lies)
        parts = results[0].view(m, workspace.world_size, n)
        own = parts[:, workspace.rank]
        # Three frames: this and two more, on the fast path and on the slow one.
        workspace.raise_if_broken(OP, inside=3)
        with self._whole():
            before = None
            for rows, columns in self._pieces:
                made = own[rows, columns]
                torch.mm(a[rows], b[:, columns], out=made)
                # The last piece's is still taken: it is put where it belongs after this one is sent.
                buffer = workspace.next_buffer() if before is None else workspace.take_buffer(1 - before[0])
                width, height = made.shape[1] * made.itemsize, made.shape[0]
                step = made.stride(0) * made.itemsize
                sent = [CopiedPiece(made.data_ptr(), self._offset, width, height, step)]
                self._engine.start(buffer, lambda peer, sent=sent: sent, timeout_ns)  # type: ignore[misc]
                if before is not None:
                    self._put(*before, timeout_ns, stream)
                before = buffer, parts[rows, :, columns]
            assert before is not None
            self._put(*before, timeout_ns, stream)
            self._engine.join(before[0])  # the own columns may be overwritten then

    def _put(self, buffer: int, parts: torch.Tensor, timeout_ns: int, stream: int) -> None:
        """Waits for the peers' pieces of an epoch, copies them to where they belong, and ends it."""
        height, _, width = parts.shape
        for src, arrival in self._arrivals[buffer]:
            arrival.launch(timeout_ns, stream)
            slot = self._slots[buffer][src, : height * width].view(height, width)
            parts[:, src].view(self._wide).copy_(slot.view(self._wide))
        self._ends[buffer](stream)


def choose_copied_pieces(
    call: MatmulAllGatherKernelCall, world_size: int
) -> KernelChoice[CopiedConfig] | str:
    """By copy engines, or why not.

    The same on all ranks whose tensors have the same sizes and dtypes.
    """
    problem = call.problem(world_size)
    if not problem.pieces():
        return "too little is multiplied and gathered"
    us, profitable = estimate_copied_pieces_us(problem), copied_pieces_save_us(problem) > 0
    return KernelChoice("copy_engine", CopiedConfig(), copied_pieces_layout(problem), profitable, us)


COPIED_STEPS = KernelSteps(
    choose_copied_pieces,
    lambda config, call, world_size, rank: [acquire.PROGRAM],
    lambda workspace, call, config: MatmulAllGatherCopied(workspace, call),
    lambda choice, call: (OP, choice.config, call.a.shape, call.a.stride(), call.b.shape[1], call.a.dtype),
    lambda config, call: (*call.a.shape, call.b.shape[1], call.a.dtype),
    lambda config, call: [*call],
    lambda call, world_size: [call.a.new_empty(call.a.shape[0], world_size * call.b.shape[1])],
)
