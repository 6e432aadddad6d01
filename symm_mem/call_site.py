"""The call site of a call: the nearest Python line that is neither weft's nor torch's; and the op that is called."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeAlias

import torch
import typing_extensions

# Code and its current instruction, taken for every call. Only an error looks up the line.
Site: TypeAlias = tuple[CodeType, int]

_WEFT = Path(__file__).parent.parent
# tests, bench and examples may stand next to them and are callers.
_LIBRARIES = (
    *(f"{_WEFT / part}{os.sep}" for part in ("symm_mem", "kernels", "fused_ops")),
    f"{Path(torch.__file__).parent}{os.sep}",
    threading.__file__,
    contextlib.__file__,
    typing_extensions.__file__,  # around deprecated functions of torch
)
_known: dict[str, bool] = {}


class _Calling(threading.local):
    op: str | None = (
        None  #: that this thread is making a call of, for errors of steps on the way to its kernel
    )
    site: Site | None = None  #: where a call came from that this thread makes for another one


calling = _Calling()


def _is_library(file: str) -> bool:
    # Inductor's programs stand in a cache folder; "<...>" is code without a file.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    found = file.startswith(("<", *_LIBRARIES)) or cache in file
    return _known.setdefault(file, found)


def call_site(skip: int = 1) -> Site | None:
    """The caller of weft in this thread. None on a thread without one, such as autograd's on CUDA.

    ``skip``: how many frames from this one up are certainly weft's. They are not looked at: each look costs.
    """
    return site_from(sys._getframe(skip)) or calling.site


def site_from(frame: FrameType | None) -> Site | None:
    """That of the call in which a frame is."""
    known = _known
    while frame is not None:
        code = frame.f_code
        inside = known.get(code.co_filename)
        if inside is None:
            inside = _is_library(code.co_filename)
        if not inside:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def text(site: Site | None) -> str | None:
    """``file.py:12``; None for None."""
    if site is None:
        return None
    code, at = site
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"
