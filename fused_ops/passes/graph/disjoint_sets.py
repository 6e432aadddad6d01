"""Sets of which any two can become one."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class DisjointSets(Generic[T]):
    def __init__(self) -> None:
        self._above: dict[T, T] = {}

    def root(self, item: T) -> T:
        """The member that stands for the item's set."""
        while (above := self._above.get(item, item)) != item:
            self._above[item] = self._above.get(above, above)
            item = above
        return item

    def join(self, a: T, b: T) -> None:
        """That of ``b`` stands for both sets from now on."""
        a, b = self.root(a), self.root(b)
        if a != b:
            self._above[a] = b
