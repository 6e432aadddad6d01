"""Kernel choices, kept by kind of call, and what all ranks make together once for each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from .comm.ll_exchange import ExchangeLayout
from .jit.program import Program

_MOST_CHOICES = 4096  # kept before all are dropped

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class KernelChoice(Generic[C]):
    """How calls of one kind are run.

    ``layout``: of its workspace. ``profitable``: it is predicted to be faster than the collective and the matmul one
    after the other. ``predicted_us``: of the configuration, if there is a model of it.
    """

    algorithm: str
    config: C
    layout: Layout | ExchangeLayout
    profitable: bool
    predicted_us: float | None = None


class KernelSteps(NamedTuple):
    """How calls with kernels of several kinds are made: the functions of an ``on_cuda.py``.

    ``make``: what launches such calls; it is kept under ``key``, and made under ``same``, which is so on all ranks.
    """

    choose: Callable[..., KernelChoice[Any] | str]
    programs: Callable[..., Sequence[Program]]
    make: Callable[..., Any]
    key: Callable[..., Hashable]
    same: Callable[..., tuple[Any, ...]]
    operands: Callable[..., list[torch.Tensor]]
    results: Callable[..., list[torch.Tensor]]


class KernelChoices(Generic[C]):
    """How to run a call, or why no kernel can. The same on all ranks whose tensors have the same sizes, strides and
    dtypes.

    ``choose``: says it the first time, of a call and its problem; ``kind``: what else of a call makes a difference.
    """

    def __init__(
        self, choose: Callable[[Any, Any], KernelChoice[C] | str], kind: Callable[[Any], tuple[Hashable, ...]]
    ) -> None:
        self._choose, self._kind = choose, kind
        self._known: dict[Hashable, KernelChoice[C] | str] = {}

    def __call__(self, call: Any, world_size: int) -> KernelChoice[C] | str:
        problem = call.problem(world_size)
        key = problem, *self._kind(call)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_CHOICES:
                self._known.clear()
            found = self._known[key] = self._choose(call, problem)
        return found

    def clear(self) -> None:
        self._known.clear()


def make_together(
    workspace: Workspace[Any], op: str, key: Hashable, same: Hashable, make: Callable[[], T]
) -> T:
    """What ``workspace.prepared`` lacks under ``key``: all ranks make theirs first, and go on together.

    So no wait for a peer counts what it still compiles.

    Args:
        same: what is made, in words that are the same on all ranks. It leaves out what each may have its own way, such
            as strides: who comes again with others makes its own alone.
    """

    made: list[T] = []
    if workspace.meets:
        workspace.heap.prepare(op, same, lambda: made.append(make()))
    # Kept once all ranks have theirs: after a failure in between, every rank comes here again.
    kept: T = made[0] if made else make()
    workspace.keep(key, kept)
    return kept
