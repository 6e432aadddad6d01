"""What calls have found out and need not find out again, until something it rests on changes.

A call's way from tensors to a launch goes through a group's heap, the stream's workspace, what is prepared there, the
deadline and the modes. What it finds at the end is kept in ``kept``, and whoever changes one of these calls
``changed``, which lets go of all of it: a ``Noted`` dictionary does so by itself, at each change of what it holds.

    kept = findings.kept  # first of all
    ...                   # what is looked at may change meanwhile
    kept[key] = found     # then this is no longer the dictionary that anybody asks

What nobody here is told of, a caller asks at each call: whether torch still knows the group, the current device and
stream, whether a graph is being captured.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

_MOST = 4096  # findings before all are forgotten

cached_calls: dict[Hashable, Any] = {}

K = TypeVar("K")
V = TypeVar("V")


def invalidate_calls() -> None:
    """Nothing that was found before holds. To be called behind the change, not in front of it."""
    global cached_calls
    cached_calls = {}


def keep(where: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """``where``: what ``kept`` was before anything was looked at."""
    if len(where) >= _MOST:
        where.clear()
    where[key] = found


class CachedDict(dict[K, V]):
    """A dictionary on which findings rest."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        invalidate_calls()

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        invalidate_calls()

    def __ior__(self, other: Any) -> CachedDict[K, V]:  # type: ignore[override, misc]
        self.update(other)
        return self

    def clear(self) -> None:
        super().clear()
        invalidate_calls()

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        invalidate_calls()
        return value

    def popitem(self) -> tuple[K, V]:
        item = super().popitem()
        invalidate_calls()
        return item

    def setdefault(self, *args: Any) -> Any:
        value = super().setdefault(*args)
        invalidate_calls()
        return value

    def update(self, *args: Any, **named: Any) -> None:
        super().update(*args, **named)
        invalidate_calls()
