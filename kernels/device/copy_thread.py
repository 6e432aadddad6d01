"""The copy engine of CPU ranks: a thread that moves data while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...symm_mem.workspace import Workspace


@contextmanager
def copying(workspace: Workspace, push: Callable[[], None]) -> Iterator[None]:
    """Run ``push`` beside the body. The end of the body waits for it, and raises what the first of the two raised.

    When one of them fails, so does the group on this rank: then the other one waits for no peer any more.
    """
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        workspace.abandon(error)

    def run() -> None:
        try:
            push()
        except BaseException as e:
            failed(e)

    thread = threading.Thread(target=run, name="weft-copy", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as e:
        failed(e)
    try:
        thread.join()  # its waits are bounded
    except BaseException as e:  # Ctrl-C
        failed(e)
        thread.join()
    if failures:
        raise failures[0]
