"""Who took the calls of a process group with weft."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ..drop_in.calls_taken import CallCounts, CallsTaken
from .calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

_log = logging.getLogger("weft.process_group")


class GroupCalls:
    """Who took the calls of a process group: what ``weft.process_group`` returns.

    >>> import torch.distributed as dist
    >>> import weft
    >>> weft.process_group(dist.new_group(backend="weft")).taken_on[0]
    'cpu'

    Attributes:
        taken_on: the types of devices whose calls weft takes.
        cached: cached launches since the last ``calls()``, by collective.
    """

    def __init__(self, group_name: str, taken_on: tuple[str, ...], backends: Mapping[str, str]) -> None:
        self._group_name, self.taken_on = group_name, taken_on
        self._backends = backends  # their names, by type of device
        self._counts = CallCounts()
        self._told: set[tuple[str, str]] = set()
        self._taken = 0  # by weft, without those of ``cached``
        self.cached = dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL), 0)

    @torch._disable_dynamo
    def calls(self, *, clear: bool = False) -> tuple[CallsTaken, ...]:
        """Who took this rank's calls: "weft", "gloo" or "nccl", and why not weft.

        >>> import torch, torch.distributed as dist
        >>> import weft
        >>> group = dist.new_group(backend="weft")
        >>> dist.all_reduce(torch.ones(4), group=group)
        >>> dist.all_reduce(torch.ones(4, dtype=torch.int64), group=group)
        >>> for taken in weft.process_group(group).calls():
        ...     print(taken)
        all_reduce: 1 call by weft
        all_reduce: 1 call by gloo (int64)

        Args:
            clear: counts from 0 again.

        Returns:
            one entry for each collective, taker and reason. A captured graph that is replayed counts once.
        """
        for name, count in list(self.cached.items()):
            self.cached[name] -= count
            self._taken += count
            if count:
                self._counts.add(name, "weft", count=count)
        taken = self._counts.taken()
        if clear:
            self._counts.clear()
        return taken

    def count_taken(self, name: str) -> None:
        """Counts a call that weft takes.

        >>> from weft.fused_ops import GroupCalls
        >>> calls = GroupCalls("0", ("cpu",), {"cpu": "gloo"})
        >>> calls.count_taken("all_reduce")
        >>> print(*calls.calls())
        all_reduce: 1 call by weft
        """
        self._counts.add(name, "weft")
        self._taken += 1

    def count_left(self, name: str, why: str, kind: str) -> None:
        """Counts a call that the group's own backend on devices of this ``kind`` takes.

        >>> from weft.fused_ops import GroupCalls
        >>> calls = GroupCalls("0", ("cpu",), {"cpu": "gloo"})
        >>> calls.count_left("broadcast", "", "cpu")
        >>> print(*calls.calls())
        broadcast: 1 call by gloo
        """
        by = self._backends.get(kind) or next(iter(self._backends.values()))
        self._counts.add(name, by, why)
        if why and (name, why) not in self._told:
            self._told.add((name, why))
            _log.info("%s of group %r is left to %s: %s", name, self._group_name, by, why)

    def total_taken(self) -> int:
        """The number of calls that weft has taken.

        >>> from weft.fused_ops import GroupCalls
        >>> GroupCalls("0", ("cpu",), {"cpu": "gloo"}).total_taken()
        0
        """
        return self._taken + sum(self.cached.values())
