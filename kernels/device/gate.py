"""Launches the gate in front of pushes by a copy engine, and the end of a use; gate.cu says what they do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...symm_mem.workspace import Layout, Workspace
from .program import DEVICE_FOLDER, Program, Watch

_SOURCE = DEVICE_FOLDER / "gate.cu"
_program = Program(_SOURCE)


class _Params(ctypes.Structure):
    """The twin of ``Params`` in gate.cu."""

    _fields_ = (
        ("watch", Watch),
        ("world_size", ctypes.c_int32),
        ("ticket", ctypes.c_int32),
        ("done", ctypes.c_int32),
        ("epoch", ctypes.c_int32),
        ("span", ctypes.c_uint64),
    )


def gate(workspace: Workspace, half: int, timeout_ns: int, stream: int) -> None:
    """Make ``stream`` wait until every peer's ``half`` is free for the next use, then count that use in TICKET.

    Work behind it on the stream may overwrite the half on every peer; the current device must be the
    workspace's. Safe to capture in a CUDA graph.

    Args:
        half: 0 or 1.
        timeout_ns: nanoseconds until the wait expires; the workspace's record then says for whom it waited.
        stream: a CUstream as an integer.

    Raises:
        RuntimeError: the kernel cannot be compiled or launched.
    """
    _launch("gate", workspace, half, timeout_ns, stream)


def leave(workspace: Workspace, half: int, stream: int) -> None:
    """End this rank's use of ``half``: work in front of it on the stream has read all it wanted there.

    Safe to capture in a CUDA graph.

    Raises:
        RuntimeError: the kernel cannot be compiled or launched.
    """
    _launch("leave", workspace, half, 0, stream)


def leaving(workspace: Workspace, half: int) -> Callable[[int], None]:
    """``leave`` with only the stream left open: what can be made once."""
    return _program.function("leave").bound(1, 32, _params(workspace, half, 0))


def load() -> None:
    """Compile both kernels and load them into the current context, without a launch."""
    for name in ("gate", "leave"):
        _program.function(name)


def _launch(name: str, workspace: Workspace, half: int, timeout_ns: int, stream: int) -> None:
    _program.function(name).launch(1, 32, _params(workspace, half, timeout_ns), stream)


def _params(workspace: Workspace, half: int, timeout_ns: int) -> _Params:
    layout = workspace.layout
    return _Params(
        Watch.of(workspace, timeout_ns),
        workspace.world_size,
        Layout.TICKET + half,
        layout.done(half),
        Layout.EPOCH + half,
        workspace.span,
    )
