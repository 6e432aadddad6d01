"""Calls of the ops as the checked mode compares them across ranks (``symm_mem.set_checked``).

Twice a call: its arguments before anything else, and its plan before anything is launched. Strides are compared by what
they lead to: ranks may lay out their own operands as they like, unless one of them then runs another algorithm.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from ...symm_mem import HeapUnavailable, forks
from ...symm_mem.failure.call_check import CallCheck, call_check_of
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.registry import get_heap


class _Current(threading.local):
    call: tuple[CallCheck, str] | None = None  #: whose plan is still to come


_current = _Current()


def compare_call(op: str, group: ProcessGroup, device: torch.device, **arguments: object) -> None:
    """Every rank must be about to make this call.

    Groups without a heap are not checked: their calls are collectives of the group's own backend.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank makes no call.
        ForkedProcess: this process was forked from the one that joined the group.
        WeftError: the group is broken on this rank.
    """
    _current.call = None
    if group.size() == 1:
        return
    forks.refuse_child(group, op)
    try:
        where = get_heap(group, device)
    except HeapUnavailable:
        return
    refuse_if_broken(where)
    board = call_check_of(where)
    said = ", ".join(f"{name}={_text(value)}" for name, value in arguments.items())
    board.compare(op, f"{op}({said})")
    _current.call = board, op


def compare_plan(plan: str, reason: str) -> None:
    """Every rank must run this call in the same way. ``reason``: why it is unfused, which may differ.

    Raises:
        RankMismatch: on every rank, naming the first one that differs.
        PeerTimeout: a rank does not come so far.
    """
    if _current.call is not None:
        (board, op), _current.call = _current.call, None
        board.compare(op, f"{op} by {plan}", f" because {reason}" if reason else "", begins=False)


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
