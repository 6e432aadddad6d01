"""What a kernel needs for an epoch of a buffer: the host's side of double_buffer.cuh."""

from __future__ import annotations

import ctypes

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace
from ..jit.program import fields


class BufferWords(ctypes.Structure):
    """Where the words of a buffer are; the twin of ``weft::BufferWords`` in double_buffer.cuh."""

    _fields_ = (
        *fields(ctypes.c_int32, "epoch left done flags flags_per_rank world_size limiter_clock drawn"),
        ("span", ctypes.c_uint64),
    )

    @staticmethod
    def of(workspace: Workspace[Layout], buffer: int) -> BufferWords:
        layout = workspace.layout
        return BufferWords(
            Layout.EPOCH + buffer,
            Layout.LEFT + buffer,
            layout.done(buffer),
            layout.flags(buffer),
            layout.flags_per_rank,
            workspace.world_size,
            Layout.LIMITER_CLOCK,
            Layout.DRAWN + buffer,
            workspace.span,
        )
