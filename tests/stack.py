"""Room for Python's frames: many tests call deeper than most programs, torch.compile above all.

Frames lie in chunks of 16 KiB. One is mapped when a call begins after the end of the chunk before, and unmapped when
that call returns: where a loop's calls cross such an end, all of them wait for the kernel, up to a sixth of the time of
compilations. A frame that wants more gets a chunk as large as it needs, and what it calls shares that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ROOM = 1 << 17  # words, of a mebibyte: the chunk is twice as large


def with_room(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``."""
    return fn(*args)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_ROOM)
