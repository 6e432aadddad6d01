"""How many collectives a group's backend has begun: where a rank stands, in votes. A backend counts the collective of a
CUDA graph where it is captured, not where the graph is replayed; ranks need not capture alike. Here each replay counts.
"""

from __future__ import annotations

import functools
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup, get_backend
from torch.distributed.distributed_c10d import _world

_Counts = WeakKeyDictionary[ProcessGroup, int]

_replayed: _Counts = WeakKeyDictionary()  # what replays have begun, less what was only captured
_open: WeakKeyDictionary[Any, _Counts] = (
    WeakKeyDictionary()
)  # by CUDA graph that is being captured: counts before
_held: WeakKeyDictionary[Any, _Counts] = WeakKeyDictionary()  # by CUDA graph: what each replay begins
_lock = threading.Lock()


def begun(group: ProcessGroup) -> int:
    """Collectives that the backend has begun in the group, as votes have them. RuntimeError: the backend does not count
    them."""
    if _open and torch.cuda.is_current_stream_capturing():
        for before in list(
            _open.values()
        ):  # a vote knows what is captured by what it counts there: that stays
            before.pop(group, None)
    counted = _counted(group)
    return counted + _replayed.get(group, 0) if _replayed else counted


def _counted(group: ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def uncounting_backend(group: ProcessGroup) -> str | None:
    """The group's backend if it counts no collectives, so that its ranks cannot agree; the one without ranks is
    "fake". None if it counts."""
    try:
        _counted(group)
    except RuntimeError:
        return get_backend(group)
    return None


def count_replays(graphs: Any = torch.cuda.CUDAGraph) -> None:
    """From here on CUDA graphs count as they run. Those that were captured before count as the backend has them."""
    capture_begin, capture_end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay

    @functools.wraps(capture_begin)
    def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(graph, *args, **kwargs)
        _open[graph] = _counts()

    @functools.wraps(capture_end)
    def end(graph: Any) -> None:
        before: Any = _open.pop(graph, {})
        _held.pop(graph, None)
        try:
            capture_end(graph)
        finally:
            held: _Counts = WeakKeyDictionary()
            for group, count in _counts().items():
                if count != before.get(group, count):
                    held[group] = count - before[group]
            if held:
                _add(held, -1)
                _held[graph] = held

    @functools.wraps(replay)
    def replay_counted(graph: Any) -> None:
        replay(graph)
        if _held and (held := _held.get(graph)):
            _add(held, 1)

    graphs.capture_begin, graphs.capture_end, graphs.replay = begin, end, replay_counted


def _counts() -> _Counts:
    return WeakKeyDictionary(
        (group, _counted(group)) for group in _world.pg_map if uncounting_backend(group) is None
    )


def _add(held: _Counts, sign: int) -> None:
    with _lock:
        for group, count in held.items():
            _replayed[group] = _replayed.get(group, 0) + sign * count


count_replays()  # with the import, as a program may capture collectives before it has a graph of the pass
