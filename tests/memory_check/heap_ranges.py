"""What copy engines gather where it is read, while a graph runs: no two at once in one place of the heap.

A place is a gather's from its start, when peers may begin to write there, to the last reader of what has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Range:
    """Addresses, and when the last reader was done; None until then."""

    begin: int
    end: int
    left: int | None = None


class HeapRanges:
    """By name what has come."""

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}
        self._started: dict[str, int] = {}
        self._now = 0

    def start(self, token: str) -> None:
        """A gather was started."""
        self._now += 1
        self._started[token] = self._now

    def come(self, name: str, tensor: Tensor, token: str) -> str | None:
        """What a gather has brought is there.

        Returns:
            the name of what was in a part of the same place after its start; None where nothing was.
        """
        begin, end, since = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, self._started[token]
        met = [
            other
            for other, r in self._ranges.items()
            if r.begin < end and begin < r.end and (r.left is None or r.left > since)
        ]
        self._ranges[name] = _Range(begin, end)
        return met[0] if met else None

    def leave(self, name: str) -> None:
        """What has this name is read no more."""
        self._now += 1
        self._ranges[name].left = self._now
