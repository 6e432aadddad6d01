"""The copy engine of CPU ranks: a thread that moves data while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ....symm_mem.workspace import Workspace


@contextmanager
def copying(
    workspace: Workspace, push: Callable[[], None], end: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run ``push`` in a thread during the body. The end of the body joins it, and raises what the first of the two
    raised.

    When one of them fails, so does the group on this rank: then the other one waits for no peer any more.

    Args:
        end: tells ``push`` that the body has nothing more for it; called however the body ends, also before it begins.
    """
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        workspace.abandon(error)

    def run() -> None:
        try:
            workspace.raise_if_broken()  # Ctrl-C may have come before this thread began
            push()
        except BaseException as e:
            failed(e)

    thread = threading.Thread(target=run, name="weft-copy", daemon=True)
    try:
        thread.start()
        yield
    except BaseException as e:
        failed(e)
    finally:
        end()
    try:
        _join(thread)  # its waits are bounded
    except BaseException as e:  # Ctrl-C
        failed(e)
        _join(thread)
    if failures:
        raise failures[0]


def _join(thread: threading.Thread) -> None:
    if thread.is_alive():  # not one that could not be started
        thread.join()
