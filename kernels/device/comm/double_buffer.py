"""What a kernel needs for an epoch of a buffer: the host's side of double_buffer.cuh."""

from __future__ import annotations

import ctypes

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace


class BufferWords(ctypes.Structure):
    """Where the words of a buffer are; the twin of ``weft::BufferWords`` in double_buffer.cuh."""

    _fields_ = (
        ("epoch", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("done", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("flags_per_rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("limiter_clock", ctypes.c_int32),
        ("drawn", ctypes.c_int32),
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
