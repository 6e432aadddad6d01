"""What the parts of the rig have in common: waiting for what is let go of, errors, and what cannot be verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_SHOWN = 5  # problems in an error
_A_MOMENT = 1.0  # seconds that a backend's thread may take to let go of what has been waited for

#: Whether what cannot be verified runs unverified; else it is an error.
may_skip = False


def not_verified(what: str, why: str) -> None:
    """
    Raises:
        AssertionError: unless ``may_skip``.
    """
    if not may_skip:
        raise AssertionError(f"{what} is not verified: {why}")


def comes(is_so: Callable[[], bool]) -> bool:
    """Whether it is so, or soon will be."""
    until = time.monotonic() + _A_MOMENT
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True


def shown(problems: Sequence[str]) -> str:
    """The first of them."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
