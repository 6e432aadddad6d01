"""Launches the acquire kernel before copies by copy engines, waits for a peer's, and the end of an epoch: see
acquire.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace
from ..jit.program import DEVICE_FOLDER, Program, WaitParams

_SOURCE = DEVICE_FOLDER / "comm" / "acquire.cu"
PROGRAM = Program(_SOURCE)  #: of all that is launched here


class _Params(ctypes.Structure):
    """The twin of ``Params`` in acquire.cu."""

    _fields_ = (
        ("watch", WaitParams),
        ("world_size", ctypes.c_int32),
        ("ticket", ctypes.c_int32),
        ("done", ctypes.c_int32),
        ("epoch", ctypes.c_int32),
        ("span", ctypes.c_uint64),
        ("peer", ctypes.c_int32),
        ("flag", ctypes.c_int32),
    )


def end_epoch_launcher(workspace: Workspace, buffer: int) -> Callable[[int], None]:
    """Called with a stream, ends this rank's epoch of ``buffer``: work before it on the stream has read everything
    there. Safe to capture in a CUDA graph.

    Raises:
        RuntimeError: the kernel cannot be compiled.
    """
    return PROGRAM.function("leave").bound(1, 32, _params(workspace, buffer, 0))


def load() -> None:
    """Compile the kernels and load them into the current context, without a launch."""
    for name in ("acquire", "leave", "arrive"):
        PROGRAM.function(name)


class Acquire:
    """The acquire kernel of one buffer, to be made once and launched often.

    Raises:
        RuntimeError: it cannot be compiled.
    """

    def __init__(self, workspace: Workspace, buffer: int) -> None:
        self._params = _params(workspace, buffer, 0)
        self._launch = PROGRAM.function("acquire").bound(1, 32, self._params)

    def launch(self, timeout_ns: int, stream: int) -> None:
        """Make ``stream`` wait until every peer's buffer is free for the next epoch, then write that to EPOCH_TICKET.

        Work after it on the stream may overwrite the buffer on every peer; the current device must be the
        workspace's. Safe to capture in a CUDA graph.

        Args:
            timeout_ns: nanoseconds until the wait expires; the workspace's record then says for whom it waited.
            stream: a CUstream as an integer.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._params.watch.timeout_ns = timeout_ns
        self._launch(stream)


class Arrival:
    """The wait for what a peer's copy engine has put into one buffer, before flag 0; launched often."""

    def __init__(self, workspace: Workspace, buffer: int, peer: int) -> None:
        layout = workspace.layout
        self._params = _params(workspace, buffer, 0)
        self._params.peer = peer
        self._params.flag = layout.flags(buffer) + peer * layout.flags_per_rank
        self._launch = PROGRAM.function("arrive").bound(1, 32, self._params)

    def launch(self, timeout_ns: int, stream: int) -> None:
        """Make ``stream`` wait. If that expires, the group is broken, and what comes after reads what lies there."""
        self._params.watch.timeout_ns = timeout_ns
        self._launch(stream)


def _params(workspace: Workspace, buffer: int, timeout_ns: int) -> _Params:
    layout = workspace.layout
    return _Params(
        WaitParams.of(workspace, timeout_ns),
        workspace.world_size,
        Layout.EPOCH_TICKET + buffer,
        layout.done(buffer),
        Layout.EPOCH + buffer,
        workspace.span,
        0,
        0,
    )
