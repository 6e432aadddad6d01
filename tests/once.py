"""Files that take seconds to make, made once for all processes that run tests side by side."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

folder: Path | None = None  #: theirs; conftest.py says which


def made_once(what: Iterable[object], make: Callable[[Path], object]) -> Path:
    """The file that ``make`` writes to the path that it is given.

    Args:
        what: all that the file's content depends on.
    """
    assert folder is not None
    name = hashlib.sha256("\0".join(map(repr, what)).encode()).hexdigest()[:32]
    place = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            begun = folder / f"{name}.new"
            make(begun)
            begun.rename(place)
    return place
