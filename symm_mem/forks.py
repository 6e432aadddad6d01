"""A process that was forked from a rank is no rank.

It has all of the rank's memory and its connection to the store: what it wrote there would be taken for the rank's. So
whatever belongs to a group that was there at the fork refuses the child before it writes or sends anything; tensors
that lie on a heap are memory like any other and do not notice. The rank goes on undisturbed. A group that the child
joins by itself is its own.

A call asks the system nothing for that. Python runs ``_in_child`` in each child, which changes the number that owners
compare, and breaks what looks for an error anyway (fault.py). Children that C code forks past Python are not heard of.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from . import call_cache
from .call_site import call_site, text
from .errors import ForkedProcess
from .groups import without_processes

pid = os.getpid()  #: of this process, without a call of the system
inherited = False  #: there were groups when this process was forked
# Of those groups, and keeps them: a group of gloo waits at its end for threads that the child lacks.
_owners: dict[ProcessGroup, int] = {}
_told: weakref.WeakSet[Any] = weakref.WeakSet()


class Owner:
    """The rank, as a process, to which something belongs that has to do with a group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank = group.group_name, group.rank()
        found = _owners.get(group, pid) if inherited else pid
        self._pid = pid if found != pid and without_processes(group) is not None else found

    def refuse_child(self, op: str) -> None:
        """To be asked before anything is locked, written or sent for ``op``.

        Raises:
            ForkedProcess: this process was forked from the owner.
        """
        if self._pid != pid:
            raise self.refusal(op)

    def refusal(self, op: str) -> ForkedProcess:
        """The error that the child gets."""
        return ForkedProcess(op, self._group, self._rank, self._pid, pid, text(call_site()))


def refuse_child(group: ProcessGroup, op: str) -> None:
    """As ``Owner.refuse_child``, of the group itself."""
    if inherited:
        Owner(group).refuse_child(op)


def tell(thing: Any) -> None:
    """Each child calls ``thing.forked()``, if the thing is still there. It must take no lock: who had it is gone."""
    _told.add(thing)


def finalize(thing: object, end: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """As ``weakref.finalize``, but in this process only, and not when it exits."""
    made = weakref.finalize(thing, _end_here, pid, end, *args)
    made.atexit = False
    return made


def _end_here(where: int, end: Callable[..., object], *args: Any) -> None:
    if pid == where:
        end(*args)


def _in_child() -> None:
    global pid, inherited
    parent, pid = pid, os.getpid()
    for group in list(distributed_c10d._world.pg_map):
        inherited = True
        _owners.setdefault(group, parent)
    call_cache.invalidate_calls()
    for thing in list(_told):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)
