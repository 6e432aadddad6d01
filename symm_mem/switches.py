"""Environment variables: which there are, and those that switch something on."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator

_PREFIX = "WEFT_"
#: All that weft and its tests read.
VARIABLES = (
    *("WEFT_ARCH", "WEFT_CACHE_DIR", "WEFT_CHECK", "WEFT_FUZZ", "WEFT_INSTALL", "WEFT_NCCL_ALL_REDUCE_FROM"),
    *("WEFT_NVRTC_OPTIONS", "WEFT_PASS", "WEFT_PDL", "WEFT_REPORT", "WEFT_RESERVED_SMS", "WEFT_SHARE_GPUS"),
    *("WEFT_TEST_SHARED_GPUS", "WEFT_TIMEOUT", "WEFT_UNTESTED"),
)


def unknown_variables() -> Iterator[tuple[str, str]]:
    """Those of the environment that look like weft's and are none, and what to say of each."""
    names = [known.removeprefix(_PREFIX) for known in VARIABLES]
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), names, n=1)
            yield name, f"weft reads no such variable{f', but {_PREFIX}{close[0]}' if close else ''}"


def warn_of_unknown_variables() -> None:
    for name, text in unknown_variables():
        logging.getLogger("weft").warning("%s: %s", name, text)


def is_on(name: str, *, default: bool = False) -> bool:
    """Whether the variable ``name`` is 1, not 0; ``default`` where it is missing.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    said = os.environ.get(name, str(int(default)))
    if said not in ("0", "1"):
        raise ValueError(f"{name}: is {said!r}, must be 0 or 1")
    return said == "1"
