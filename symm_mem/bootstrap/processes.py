"""Whether the process of a peer is still there: a rank that has ended is not waited for until the deadline."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def identity() -> dict[str, Any]:
    """This process, as its peers on the same machine can find it again (JSON)."""
    return {"pid": os.getpid(), "started": _stat(os.getpid())[1], "namespace": _namespace()}


def has_ended(process: dict[str, Any] | None) -> bool:
    """Whether that process is certain to be gone. False where it cannot be seen from here."""
    try:
        if process is None or process["namespace"] != _namespace():
            return False
    except OSError:  # nothing can be seen from here
        return False
    try:
        state, started = _stat(process["pid"])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # A number may be given to a new process; a zombie's memory is gone already.
    return started != process["started"] or state in "ZX"


def _stat(pid: int) -> tuple[str, int]:
    with open(f"/proc/{pid}/stat", "rb") as f:
        # The name in front may hold anything. The kernel cuts it off at 15 bytes, which may be within a character.
        fields = f.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


@cache
def _namespace() -> str:
    """Where a process number means something: this boot of this machine, and the namespace in it."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()} {os.readlink('/proc/self/ns/pid')}"
