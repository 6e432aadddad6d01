"""Plans of calls that are not made.

An op is called with fake tensors, in a thread that plans. It decides as always, and stops where it would note its plan:
nothing is launched, sent or allocated, and no other rank is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_NOT_LAUNCHED = "unfused", "host"


class Planned(Exception):  # no error
    """Ends a call that is planned. ``plan``: how it would run."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.plan = plan


class _Here(threading.local):
    plans = False
    makes = False
    plan: Any = None  # of the call that is planned, once it is known
    workspace = ""  # the kind that it has asked for


_here = _Here()


def is_planning() -> bool:
    """Whether this thread plans a call."""
    return _here.plans


@contextmanager
def planning(*, makes: bool = False) -> Iterator[None]:
    """A call inside the body is planned. With ``makes`` it ends only when its launcher is made, too."""
    _here.plans, _here.makes, _here.plan, _here.workspace = True, makes, None, ""
    try:
        yield
    finally:
        _here.plans = _here.makes = False


def stop(plan: Any, *, goes_on: bool = False) -> None:
    """Ends the call if it is planned.

    Args:
        goes_on: what follows may launch a kernel of ours, also where the plan has none.

    Raises:
        Planned: it is.
    """
    if not _here.plans:
        return
    if _here.plan is None:
        _here.plan = replace(plan, workspace=_here.workspace)
    if not _here.makes or (plan.algorithm in _NOT_LAUNCHED and not goes_on):
        raise Planned(_here.plan)


def address_of(x: Tensor) -> int:
    """Where its memory begins; 0 of what has none, as it is planned."""
    return 0 if _here.plans else x.data_ptr()


class _NoTuner:
    def find(self, *_: Any) -> tuple[None, str]:
        from ...kernels.device.tuning.tuner import FROM_MODEL

        return None, FROM_MODEL


@dataclass
class PlannedHeap:
    """What a planned call asks of a heap."""

    group: ProcessGroup
    device: torch.device
    tuner: Any = field(default_factory=_NoTuner)

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def group_name(self) -> str:
        return self.group.group_name

    def prepare(self, *_: Any) -> None:
        """Nothing is made."""


class PlannedWorkspace:
    """What a planned call, and a launcher that is made for it, ask of a workspace. It lies nowhere."""

    address = 0
    span = 1 << 40

    def __init__(self, heap: PlannedHeap, layout: Any, kind: str = "") -> None:
        _here.workspace = kind
        self.heap, self.layout = heap, layout
        self.rank, self.world_size = heap.rank, heap.world_size
        self.prepared: dict[Any, Any] = {}
        self.copy_streams: dict[Any, Any] = {}
        self.words = torch.empty(1, dtype=torch.int32, device=heap.device)
        self.fault = SimpleNamespace(address=0, record=0, words=self.words)
        self.lock = threading.RLock()

    def raise_if_broken(self, *_: Any, **__: Any) -> None:
        """Nothing has happened."""

    def buffer(self, rank: int, buffer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.heap.device)

    def keep(self, key: Any, made: Any) -> None:
        """Ends the call: what would be launched is made.

        Raises:
            Planned: always.
        """
        raise Planned(_here.plan)
