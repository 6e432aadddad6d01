"""What weft adds to a process group: which calls it takes, and who took them."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _world

from ...symm_mem import CallAbandoned, flight_recorder, forks
from ...symm_mem.call_cache import invalidate_calls
from ...symm_mem.heap.registry import has_name, heaps_of
from ...symm_mem.timeouts import call_timeout, chosen_timeout
from ..drop_in.calls_taken import CallCounts, CallsTaken
from .calls import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, GroupCall, index_of, why_left
from .cuda_calls import DeviceLines
from .host_calls import HostLine, prepare_on_host
from .kept_work import kept_work
from .options import set_group_timeout
from .work import DoneWork

NAME = "weft"
_log = logging.getLogger("weft.process_group")


class WeftProcessGroup:
    """What weft adds to one of torch's process groups.

    >>> import torch, torch.distributed as dist
    >>> import weft
    >>> group = dist.new_group(backend="weft")  # or init_process_group("weft")
    >>> x = torch.ones(3)
    >>> dist.all_reduce(x, group=group)
    >>> bool((x == dist.get_world_size()).all())
    True
    >>> weft.process_group(group).taken_on
    ('cpu',...)

    Attributes:
        group_name: torch's name of the group.
        taken_on: the types of devices whose calls weft takes.
    """

    def __init__(self, group: ProcessGroup, taken_on: tuple[str, ...]) -> None:
        self._group = weakref.ref(group)
        self.group_name, self.taken_on = group.group_name, taken_on
        self._size = group.size()
        self._names = {kind.type: group._get_backend(kind).name() for kind in group._device_types}
        self._counts = CallCounts()
        self._told: set[tuple[str, str]] = set()
        self._launched = dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER), 0)  # as ones before
        self._host = HostLine(self.group_name)
        self._device = DeviceLines(group, self.group_name)
        self._left: Work | None = None
        self.coalesces = False  #: whether the group's own backend gathers calls

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
        for name, count in list(self._launched.items()):
            self._launched[name] -= count
            if count:
                self._counts.add(name, NAME, count=count)
        taken = self._counts.taken()
        if clear:
            self._counts.clear()
        return taken

    def again(self, name: str, x: Any, out: Any, reduction: str | None) -> bool:
        """Whether such a call was made before on CUDA: then it is launched, with as little ado as there can be. It
        waits, as its caller says, on the current stream, and has no deadline of its own."""
        if type(x) is not Tensor or type(out) is not Tensor or index_of(x) < 0 or reduction is None:
            return False
        if self.coalesces or x.layout is not torch.strided or out.layout is not torch.strided:
            return False
        if profiler._is_profiler_enabled or not self._device.launch_again(name, x, out, reduction):
            return False
        self._launched[name] += 1
        return True

    def take(self, name: str, calls: list[GroupCall] | str, asynchronous: bool, seconds: float | None) -> Any:
        """The calls' work for the dispatcher, if weft takes them."""
        if self.coalesces:
            return None
        why: str | None
        if isinstance(calls, str):
            why, kind = calls, ""
        elif not calls or (kind := calls[0].x.device.type) not in self.taken_on:
            why, kind = "", ""
        else:
            why = next((why for call in calls if (why := why_left(self._size, call)) is not None), None)
        if why is None:
            assert isinstance(calls, list)
            with (
                record_function(f"weft:{name}") if profiler._is_profiler_enabled else nullcontext(),
                nullcontext() if seconds is None else call_timeout(seconds),
            ):
                done = self._run(calls, asynchronous, seconds)
            if not isinstance(done, str):
                self._counts.add(name, NAME)
                return kept_work(done).boxed() if asynchronous else ENDED
            why = done
            flight_recorder.runs_unfused()
        self.note(name, why, kind)
        return None

    def _run(self, calls: list[GroupCall], asynchronous: bool, seconds: float | None) -> DoneWork | str:
        group = self._group()
        if group is None or not has_name(group, self.group_name):
            return "torch does not know the group by its name"  # destroyed
        if calls[0].x.is_cuda:
            done = self._device.run(calls, asynchronous=asynchronous, seconds=seconds)
            self._left = None
            return done
        exchanges = []
        for call in calls:
            exchange = prepare_on_host(group, call, seconds)
            if isinstance(exchange, str):
                return exchange
            exchanges.append(exchange)
        return self._host.run(exchanges, asynchronous=asynchronous)

    def note(self, name: str, why: str, kind: str) -> None:
        """A call that weft leaves to the group's own backend."""
        by = self._names.get(kind) or next(iter(self._names.values()))
        self._counts.add(name, by, why)
        if why and (name, why) not in self._told:
            self._told.add((name, why))
            _log.info("%s of group %r is left to %s: %s", name, self.group_name, by, why)

    def before_others(self, device: torch.device) -> None:
        """What the group's own backend runs now comes after the group's calls."""
        self._device.behind(device)

    def after_others(self, work: Work) -> None:
        """weft's next call comes after what the group's own backend runs."""
        self._left = work
        self._device.follows(work)

    # What programs ask of a group beside its calls.

    def aborts(self) -> None:
        # No call follows on this rank. CPU ranks that wait for it in weft are told.
        if (group := self._group()) is None:
            return
        why = CallAbandoned("abort", self.group_name, group.rank(), "the process group was aborted", None)
        for heap in heaps_of(group):
            if heap.fault is not None:
                heap.fault.breaks(why)
        self.ends()

    def ends(self) -> None:
        invalidate_calls()
        self._host.end()


def _ended() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


#: Of each call that has ended when it returns, or on CUDA in the order of the current stream.
ENDED = _ended()
# By id, as a lookup by weak reference would cost each call more.
_known: dict[int, WeftProcessGroup | None] = {}


def known_group(group: ProcessGroup) -> WeftProcessGroup | None:
    """What weft adds to the group; None if it is of other backends alone."""
    try:
        return _known[id(group)]
    except KeyError:
        return _look_at(group)


def _look_at(group: ProcessGroup) -> WeftProcessGroup | None:
    config = _world.pg_backend_config.get(group)
    if config is None:
        return None  # torch does not know it, or not yet
    kinds = [pair.partition(":")[0] for pair in config.split(",") if pair.endswith(f":{NAME}")]
    there = {kind.type for kind in group._device_types}
    made = WeftProcessGroup(group, tuple(kind for kind in kinds if kind in there)) if kinds else None
    if made is not None and "WEFT_TIMEOUT" not in os.environ and chosen_timeout(group.group_name) is None:
        for kind in made.taken_on:  # of a group that was split from another
            set_group_timeout(group._get_backend(torch.device(kind)).options._timeout, group.group_name)
    forks.finalize(group, _forget, id(group))
    return _known.setdefault(id(group), made)


def _forget(key: int) -> None:
    if (known := _known.pop(key, None)) is not None:
        known.ends()
