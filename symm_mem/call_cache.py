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

from collections.abc import Callable, Hashable
from functools import wraps
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


def _then_invalidates(change: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(change)
    def changes(*args: Any, **named: Any) -> Any:
        value = change(*args, **named)
        invalidate_calls()
        return value

    return changes


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(CachedDict, _name, _then_invalidates(getattr(dict, _name)))
