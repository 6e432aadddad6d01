"""What a kernel is told of a use of a half: the host's side of half.cuh."""

from __future__ import annotations

import ctypes

from ...symm_mem.workspace import Layout, Workspace
from .program import Watch


class Half(ctypes.Structure):
    """Where the words of a half are; the twin of ``weft::Half`` in half.cuh."""

    _fields_ = (
        ("epoch", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("done", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("flags_per_rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("pace", ctypes.c_int32),
        ("span", ctypes.c_uint64),
    )

    @staticmethod
    def of(workspace: Workspace[Layout], half: int) -> Half:
        layout = workspace.layout
        return Half(
            Layout.EPOCH + half,
            Layout.LEFT + half,
            layout.done(half),
            layout.flags(half),
            layout.flags_per_rank,
            workspace.world_size,
            Layout.PACE,
            workspace.span,
        )


def watch(workspace: Workspace[Layout]) -> Watch:
    """What a kernel's waits are told; the launcher sets the timeout."""
    return Watch.of(workspace)
