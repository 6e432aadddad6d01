"""Who took the calls of a process group with weft."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import torch

from ..drop_in.calls_taken import CallsTaken
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
        taken: calls that weft has taken, by collective.
    """

    def __init__(self, group_name: str, taken_on: tuple[str, ...], backends: Mapping[str, str]) -> None:
        self._group_name, self.taken_on = group_name, taken_on
        self._backends = backends  # their names, by type of device
        self._left: Counter[tuple[str, str, str]] = Counter()
        self._told: set[tuple[str, str]] = set()
        self.taken = dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL), 0)
        self._cleared = {**self.taken}  # of those

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
        now = {**self.taken}
        new = {name: count - self._cleared[name] for name, count in now.items()}
        of_weft = [CallsTaken(name, "weft", "", count) for name, count in new.items() if count]
        others = [CallsTaken(*key, count) for key, count in self._left.items()]
        if clear:
            self._left.clear()
            self._cleared = now
        return (*of_weft, *others)

    def count_left(self, name: str, why: str, kind: str) -> None:
        """Counts a call that the group's own backend on devices of this ``kind`` takes.

        >>> from weft.fused_ops import GroupCalls
        >>> calls = GroupCalls("0", ("cpu",), {"cpu": "gloo"})
        >>> calls.count_left("broadcast", "", "cpu")
        >>> print(*calls.calls())
        broadcast: 1 call by gloo
        """
        by = self._backends.get(kind) or next(iter(self._backends.values()))
        self._left[name, by, why] += 1
        if why and (name, why) not in self._told:
            self._told.add((name, why))
            _log.info("%s of group %r is left to %s: %s", name, self._group_name, by, why)
