"""Environment variables that switch something on."""

from __future__ import annotations

import os


def is_on(name: str, *, default: bool = False) -> bool:
    """Whether the variable ``name`` is 1, not 0; ``default`` where it is missing.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    said = os.environ.get(name, str(int(default)))
    if said not in ("0", "1"):
        raise ValueError(f"{name}: is {said!r}, must be 0 or 1")
    return said == "1"
