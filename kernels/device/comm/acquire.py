"""Launches the acquire kernel before copies by copy engines, waits for a peer's, and the end of an epoch: see
acquire.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace
from ..jit.program import DEVICE_FOLDER, Program, WaitParams, fields
from .double_buffer import BufferWords

_SOURCE = DEVICE_FOLDER / "comm" / "acquire.cu"
PROGRAM = Program(_SOURCE)  #: of all that is launched here


class _Params(ctypes.Structure):
    """The twin of ``Params`` in acquire.cu."""

    _fields_ = (("watch", WaitParams), ("buffer", BufferWords), *fields(ctypes.c_int32, "ticket peer"))


def end_epoch_launcher(workspace: Workspace[Layout], buffer: int) -> Callable[[int], None]:
    """Called with a stream, ends this rank's epoch of ``buffer``: work before it on the stream has read everything
    there. Safe to capture in a CUDA graph.

    Raises:
        RuntimeError: the kernel cannot be compiled.
    """
    return StreamWait("leave", workspace, buffer).bound


class StreamWait:
    """A kernel of one buffer after which a stream goes on, to be made once and launched often.

    Args:
        kernel: "acquire": every peer's buffer is free for the next epoch, whose number is in EPOCH_TICKET then; work
            after it may overwrite the buffer on every peer. "arrive": what the copy engine of ``peer`` has put before
            flag 0 is there.

    Raises:
        RuntimeError: it cannot be compiled.
    """

    def __init__(self, kernel: str, workspace: Workspace[Layout], buffer: int, peer: int = 0) -> None:
        watch, words = WaitParams.of(workspace), BufferWords.of(workspace, buffer)
        self._params = _Params(watch, words, Layout.EPOCH_TICKET + buffer, peer)
        self.bound = PROGRAM.function(kernel).bound(1, 32, self._params)

    def launch(self, timeout_ns: int, stream: int) -> None:
        """Make ``stream`` wait; the current device must be the workspace's. Safe to capture in a CUDA graph.

        Args:
            timeout_ns: nanoseconds until the wait expires; the workspace's record then says for whom it waited, and
                what comes after it reads what lies there.
            stream: a CUstream as an integer.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._params.watch.timeout_ns = timeout_ns
        self.bound(stream)
