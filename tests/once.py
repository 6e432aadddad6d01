"""Files that take seconds to make: made once for all processes that run tests side by side, and kept for later runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

folder: Path | None = None  #: theirs; conftest.py says which
_KEPT = 7 * 24 * 3600.0  # seconds without use


def made_once(what: Iterable[object], make: Callable[[Path], object]) -> Path:
    """The file that ``make`` writes to the path that it is given.

    Args:
        what: all that the file's content depends on, from the sources' texts to the compiler.
    """
    assert folder is not None
    name = hashlib.sha256("\0".join(map(repr, what)).encode()).hexdigest()[:32]
    place = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            os.utime(place)
        else:
            begun = folder / f"{name}.new"
            make(begun)
            begun.rename(place)
    return place


def drop_unused() -> None:
    """Those that no run has asked for since a week."""
    assert folder is not None
    for file in folder.glob("*"):
        try:
            if time.time() - file.stat().st_mtime > _KEPT:
                file.unlink()
        except FileNotFoundError:  # another process was faster
            pass
