"""The call cache: whatever changes drops all cached calls, and what was looked up before the change is not kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from weft import symm_mem
from weft.symm_mem import call_cache, timeouts
from weft.symm_mem.call_cache import CachedDict, keep


def _update(d: CachedDict[Any, Any]) -> None:
    d |= {1: 3}


CHANGES: dict[str, Callable[[CachedDict[Any, Any]], Any]] = {
    "set": lambda d: d.__setitem__(1, 3),
    "add": lambda d: d.__setitem__(7, 3),
    "delete": lambda d: d.__delitem__(1),
    "clear": lambda d: d.clear(),
    "pop": lambda d: d.pop(1),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault(7, 3),
    "update": lambda d: d.update({1: 3}),
    "or": _update,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_drops_all_cached_calls(change: str) -> None:
    noted: CachedDict[int, int] = CachedDict({1: 2})
    before = call_cache.cached_calls
    keep(before, "this", "that")
    assert noted.get(1) == 2 and 1 in noted and call_cache.cached_calls["this"] == "that"
    CHANGES[change](noted)
    assert call_cache.cached_calls is not before and not call_cache.cached_calls
    assert dict(noted) != {1: 2}
    keep(before, "this", "late")  # it was looked up before the change
    assert not call_cache.cached_calls


def test_every_way_to_change_a_dictionary_is_noted() -> None:
    """A method of dict that a later Python adds would be missing above."""
    reads = {"copy", "fromkeys", "get", "items", "keys", "values"}
    ways = {name for name in vars(dict) if not name.startswith("__")} - reads
    assert ways | {"__setitem__", "__delitem__", "__ior__"} <= vars(CachedDict).keys()


def test_modes_and_deadlines_drop_all_cached_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "_per_group", CachedDict())
    for change in (lambda: symm_mem.set_timeout(3, "a group"), lambda: symm_mem.set_checked(False)):
        keep(call_cache.cached_calls, "this", "that")
        change()
        assert not call_cache.cached_calls


def test_threads_never_keep_what_has_changed() -> None:
    """Each cached call says what the dictionary held; whoever asks after a change must not find the old one."""
    noted: CachedDict[str, int] = CachedDict({"n": 0})
    over, wrong = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            kept = call_cache.cached_calls
            keep(kept, "found", noted["n"])

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 2000):
        noted["n"] = n
        if (found := call_cache.cached_calls.get("found", n)) != n:
            wrong.append((n, found))
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
