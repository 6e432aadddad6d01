"""The copy engine of CPU ranks: a thread that moves data while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def copying(push: Callable[[], None]) -> Iterator[None]:
    """Run ``push`` beside the body; the end of the body waits for it and raises what it raised."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            push()
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=run, name="weft-copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()  # its waits are bounded
    if failure:
        raise failure[0]
