"""A forked child of a rank, and what it is told."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

_PATIENCE = 60.0  # seconds until a child counts as hung

#: How a child ends: at once, as multiprocessing's do; as a program does; or it is killed.
ENDS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(0),
    "exit": lambda: ctypes.pythonapi.Py_Exit(0),  # no exception, which the rank's caller would catch
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def fields(e: BaseException) -> dict[str, Any]:
    named = {k: v for k, v in vars(e).items() if isinstance(v, str | int | float | bool)}
    return {"kind": type(e).__name__, "text": str(e), **named}


def refusal(call: Callable[[], object]) -> dict[str, Any] | None:
    """What a call raises."""
    try:
        call()
    except Exception as e:
        return fields(e)
    return None


def in_child(work: Callable[[], Any], end: str = "_exit") -> Any:
    """What ``work`` returns in a forked child, which has ended since."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = True, work()
        except BaseException:
            said = False, traceback.format_exc()
        os.write(tells, pickle.dumps(said))
        os.close(tells)
        ENDS[end]()
    os.close(tells)
    ended = os.pidfd_open(child)
    try:
        with os.fdopen(told, "rb") as f:
            assert select.select([f], [], [], _PATIENCE)[0], "the child hangs"
            well, said = pickle.load(f)
        assert select.select([ended], [], [], _PATIENCE)[0], f"the child hangs at its end, {end!r}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ended)
    assert well, said
    return said
