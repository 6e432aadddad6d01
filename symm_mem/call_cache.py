"""The call cache: what calls have found out, until something it rests on changes.

A call goes from tensors to a launch through a group's heap, the stream's workspace, what is prepared there, the
deadline and the modes. The result is kept in ``cached_calls``. Whoever changes one of these calls ``invalidate_calls``,
which drops all of it; a ``CachedDict`` does so by itself, at each change of its contents.

    cache = call_cache.cached_calls  # first of all
    ...                              # what is looked at may change meanwhile
    keep(cache, key, found)          # then this is no longer the dictionary that anybody asks

What is not reported here, a caller asks at each call: whether torch still knows the group, the current device and
stream, whether a graph is being captured.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

_MOST = 4096  # entries before all are dropped

cached_calls: dict[Hashable, Any] = {}

K = TypeVar("K")
V = TypeVar("V")


def invalidate_calls() -> None:
    """Drop all entries. To be called after the change, not before it."""
    global cached_calls
    cached_calls = {}


def keep(where: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """``where``: what ``cached_calls`` was before anything was looked at."""
    if len(where) >= _MOST:
        where.clear()
    where[key] = found


class CachedDict(dict[K, V]):
    """A dictionary on which cached calls rest: each change of it drops them."""

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
