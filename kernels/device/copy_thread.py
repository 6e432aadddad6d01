"""The copy engine of CPU ranks: a thread that moves data while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...symm_mem.workspace import Workspace


@contextmanager
def copying(workspace: Workspace, push: Callable[[], None]) -> Iterator[None]:
    """Run ``push`` beside the body; the end of the body waits for it and raises what it raised.

    When one of the two fails, so does the workspace: then the other one waits for no peer any more.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            push()
        except BaseException as e:
            failure.append(e)
            workspace.abandon(e)

    thread = threading.Thread(target=run, name="weft-copy", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as e:
        workspace.abandon(e)
        raise
    finally:
        thread.join()  # its waits are bounded
    if failure:
        raise failure[0]
