"""Plans of calls that are not made.

An op is called with fake tensors, in a thread that plans. It decides as always, and stops where it would note its plan:
nothing is launched, sent or allocated, and no other rank is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Planned(Exception):  # no error
    """Ends a call that is planned. ``plan``: how it would run."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.plan = plan


class _Here(threading.local):
    plans = False


_here = _Here()


def is_planning() -> bool:
    """Whether this thread plans a call."""
    return _here.plans


@contextmanager
def planning() -> Iterator[None]:
    """Calls inside the body are planned."""
    _here.plans = True
    try:
        yield
    finally:
        _here.plans = False


def stop(plan: Any) -> None:
    """Ends the call if it is planned.

    Raises:
        Planned: it is.
    """
    if _here.plans:
        raise Planned(plan)


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

    def prepare(self, *_: Any) -> None:
        """Nothing is made."""


@dataclass
class PlannedWorkspace:
    """What a planned call asks of a workspace."""

    layout: Any
    prepared: dict[Any, Any] = field(default_factory=dict)

    def raise_if_broken(self, *_: Any, **__: Any) -> None:
        """Nothing has happened."""
