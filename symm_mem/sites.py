"""Where a call comes from: the nearest Python line that is neither weft's nor torch's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import torch

Site: TypeAlias = tuple[str, int]  # file and line: made for every call, put into words for an error only

_WEFT = Path(__file__).parent.parent
# tests, bench and examples may stand beside them and are callers.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(_WEFT / part for part in ("symm_mem", "kernels", "fused_ops")),
        Path(torch.__file__).parent,
    )
)
_known: dict[str, bool] = {}


def _is_library(file: str) -> bool:
    # Inductor's programs stand in a cache folder; "<...>" is code without a file.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    found = file.startswith(("<", *_LIBRARIES)) or cache in file
    return _known.setdefault(file, found)


def call_site(skip: int = 1) -> Site | None:
    """The caller of weft in this thread. None on a thread without one: that of autograd on CUDA, say.

    ``skip``: so many frames from this one up are weft's for certain. They are not looked at: each look costs.
    """
    frame: FrameType | None = sys._getframe(skip)
    known = _known
    while frame is not None:
        file = frame.f_code.co_filename
        inside = known.get(file)
        if inside is None:
            inside = _is_library(file)
        if not inside:
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def text(site: Site | None) -> str | None:
    """``file.py:12``; None for None."""
    return None if site is None else f"{site[0]}:{site[1]}"
