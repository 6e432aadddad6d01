"""Environment variables: which there are, and those that switch something on, such as the checked mode."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator

import torch.distributed as dist

from .call_cache import invalidate_calls

_PREFIX = "WEFT_"
#: All that weft and its tests read.
VARIABLES = (
    *("WEFT_ARCH", "WEFT_CACHE_DIR", "WEFT_CHECK", "WEFT_FUZZ", "WEFT_INSTALL"),
    *("WEFT_NVRTC_OPTIONS", "WEFT_PASS", "WEFT_PDL", "WEFT_REPORT", "WEFT_RESERVED_SMS", "WEFT_SHARE_GPUS"),
    *("WEFT_TEST_SHARED_GPUS", "WEFT_TIMEOUT", "WEFT_UNTESTED"),
)
_on: bool | None = None  # the checked mode; None: the environment was not asked yet


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


def is_checked() -> bool:
    """Whether calls are compared across ranks.

    >>> from weft import symm_mem
    >>> symm_mem.set_checked(False)
    >>> symm_mem.is_checked()
    False

    What ``set_checked`` said counts, else WEFT_CHECK, else whether TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch
    compares calls, too.
    """
    global _on
    if _on is None:
        _on = is_on("WEFT_CHECK", default=dist.get_debug_level() == dist.DebugLevel.DETAIL)
    return _on


def set_checked(on: bool) -> None:
    """Compare each call of an op across ranks before it is launched, or the first ones only, in all groups.

    >>> import torch, torch.distributed as dist
    >>> from weft import symm_mem
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> symm_mem.set_checked(True)
    >>> try:
    ...     y = one_shot_all_reduce(torch.ones(2 + dist.get_rank()), "sum", None)
    ... except symm_mem.RankMismatch as error:
    ...     print(error)
    call 1 in group '0': rank 1 asked for ...
    >>> symm_mem.set_checked(False)

    All ranks must say so between the same calls. A call that differs raises RankMismatch on every rank, and names the
    first rank that differs from rank 0, the number of the call, and both calls with their file and line. The hosts of
    the ranks wait for each other at every call. A captured graph is checked at its capture, its replays are not. The
    group is usable afterwards.

    The first call of each op on a group's heap, and the first one after a reset, is compared outside of the checked
    mode, too. WEFT_CHECK=0 turns that off, WEFT_CHECK=1 is the checked mode, and so is
    TORCH_DISTRIBUTED_DEBUG=DETAIL where WEFT_CHECK is not set; all ranks must have the same.

    Args:
        on: whether to compare.

    Raises:
        TypeError: ``on`` is not a bool.
    """
    global _on
    if not isinstance(on, bool):
        raise TypeError(f"on: is {on!r}, must be True or False")
    _on = on
    invalidate_calls()
