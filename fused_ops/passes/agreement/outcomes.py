"""What became of the graphs at run time, for the whole process: a graph that comes from a cache belongs to no pass."""

from __future__ import annotations

import logging
import threading

from ..report import Disagreement, VoteCounts

_log = logging.getLogger("weft.passes")


_seen: dict[tuple[str, str, int, str], int] = {}
_questions = VoteCounts()
_lock = threading.Lock()


def disagreements() -> tuple[Disagreement, ...]:
    """Those since the process started or ``reset_outcomes`` was called, in the order in which they first came up."""
    with _lock:
        return tuple(Disagreement(*key, runs=runs) for key, runs in _seen.items())


def questions() -> VoteCounts:
    """Since the process started or ``reset_outcomes`` was called."""
    return _questions


def reset_outcomes() -> None:
    """Empties ``disagreements`` and ``questions``."""
    global _questions
    with _lock:
        _seen.clear()
        _questions = VoteCounts()


def count_vote(fused: bool, seconds: float) -> None:
    global _questions
    with _lock:
        q = _questions
        _questions = VoteCounts(q.count + 1, q.fused + fused, q.seconds + seconds)


def note(graph: str, group: str, peer: int, reason: str) -> None:
    key = (graph, group, peer, reason)
    with _lock:
        first = key not in _seen
        _seen[key] = _seen.get(key, 0) + 1
    if first:
        _log.warning("%s", Disagreement(*key))
