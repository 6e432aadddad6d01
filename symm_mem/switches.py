"""Environment variables that switch something on."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Whether the variable ``name`` is 1; it may be 0 or missing otherwise.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    said = os.environ.get(name, "0")
    if said not in ("0", "1"):
        raise ValueError(f"{name}: is {said!r}, must be 0 or 1")
    return said == "1"
