"""The copy engine of CPU ranks: a thread that moves data while the caller computes."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from types import TracebackType

from ....symm_mem.workspace import Workspace


class CopyThread:
    """Runs ``push`` in a thread during the body of a ``with``. The end of the body waits for it, and raises what the
    first of the two raised.

    When one of them fails, so does the group on this rank: then the other one waits for no peer any more.

    Args:
        end: tells ``push`` that the body has nothing more for it; called however the body ends, also before it begins.
    """

    # A threading.Thread is thirty Python calls more than this one, at each call of an op.

    def __init__(
        self, workspace: Workspace, push: Callable[[], None], end: Callable[[], None] | None = None
    ) -> None:
        self._workspace, self._push, self._end = workspace, push, end
        self._failures: list[BaseException] = []
        self._begun, self._ended = allocate_lock(), allocate_lock()
        self._ended.acquire()

    def __enter__(self) -> None:
        try:
            start_new_thread(self._run, ())
        except BaseException as e:  # there can be no more threads, or Ctrl-C, before the start or after it
            self.__exit__(type(e), e, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        if self._end is not None:
            self._end()
        try:
            self._join()  # its waits are bounded
        except BaseException as e:  # Ctrl-C
            self._failed(e)
            self._join()
        if self._failures and self._failures[0] is not error:
            raise self._failures[0]

    def _failed(self, error: BaseException) -> None:
        self._failures.append(error)
        self._workspace.abandon(error)

    def _run(self) -> None:
        if not self._begun.acquire(False):
            return
        try:
            self._workspace.raise_if_broken()  # Ctrl-C may have come before this thread began
            self._push()
        except BaseException as e:
            self._failed(e)
        finally:
            self._ended.release()

    def _join(self) -> None:
        if self._failures and self._begun.acquire(False):
            return  # it has not begun, and does nothing if it does
        with self._ended:
            pass
