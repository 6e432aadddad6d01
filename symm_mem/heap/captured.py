"""Whether a captured CUDA graph is still there.

torch has no word for it: an executable graph outlives the graph that was captured, and is destroyed when nobody in
Python looks. So the graph is given an object to hold, as does everything that is made of it. When the last of them
is destroyed, and what was launched of it has ended, the driver calls the object's destructor: sem_post of the C
library, since Python must not run in that thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ..backends import cuda_state

_SEMAPHORE = 64  # bytes: more than any C library's sem_t


class CapturedGraph:
    """The graph that a stream is being captured into, and the executable graphs made of it.

    Args:
        stream: a CUstream as an integer, which is being captured.

    Raises:
        RuntimeError: it is not.
    """

    def __init__(self, stream: int) -> None:
        libc = _libc()
        # Not Python's memory: the driver writes to it whenever it likes, also when the process ends.
        self._gone = ctypes.c_void_p(libc.malloc(_SEMAPHORE))
        libc.sem_init(self._gone, 0, 0)
        destructor = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        assert self._gone.value is not None and destructor is not None
        cuda_state.state.hold_in_graph(stream, self._gone.value, destructor)

    def is_gone(self) -> bool:
        """Whether nothing of it is left, and nothing of it runs. May be asked at any time, costs no driver call."""
        if (said := self._gone.value) is not None and _libc().sem_trywait(self._gone) == 0:
            self._gone.value = None  # before it is freed: Ctrl-C may come in between
            _libc().free(ctypes.c_void_p(said))
        return self._gone.value is None


def release_gone_graphs(workspaces: dict[Any, Any], quiesced: set[int]) -> None:
    """Take those of graphs that are gone out of a heap's workspaces. A peer's graph may be there yet.

    Args:
        quiesced: takes the numbers of their blocks, to which nothing of this rank writes any more. Each is in one of
            both at any moment, whenever Ctrl-C comes: a reset leaves the peers their workspaces of such a graph.
    """
    for key, workspace in list(workspaces.items()):
        if workspace.graph is not None and workspace.graph.is_gone():
            quiesced.update(workspace.release())
            del workspaces[key]


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return libc
