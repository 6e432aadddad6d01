"""One rank on a GPU that stands for one of several: what is common to the ops that the suite alone times so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from registry import Row
from torch import Tensor
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

TIMEOUT_NS = 2_000_000_000

C = TypeVar("C")  # a configuration


class Alone:
    """A candidate on rank 0.

    Args:
        launch: of a buffer and a set of operands.
        operands: kept for as long: kernels know addresses.
    """

    def __init__(
        self,
        op: str,
        workspace: Workspace[Layout],
        launch: Callable[[int, int], None],
        operands: object,
    ) -> None:
        self.workspace, self.operands = workspace, operands
        self._op, self._launch = op, launch
        self._buffer, self._uses = 0, [0, 0]

    def prepare(self) -> None:
        """Of the next call: peers have left the buffer, what they send in this use is still to come."""
        layout, words = self.workspace.layout, self.workspace.words
        self._buffer ^= 1
        buffer, size = self._buffer, self.workspace.world_size
        self._uses[buffer] += 1
        use = self._uses[buffer]
        words[layout.done(buffer) : layout.done(buffer) + size].fill_(use - 1)
        self.begins(buffer, use)

    def begins(self, buffer: int, use: int) -> None:
        """More that must be so, or be under way, before a use begins."""

    def call(self, i: int) -> None:
        self._launch(self._buffer, i)

    def finish(self) -> None:
        """After the call."""

    def check(self) -> None:
        """Raises if a call went wrong, whatever its results."""
        self.workspace.raise_if_broken(self._op)


@dataclass(frozen=True)
class Trial:
    """What rank 0 runs of a row: cuBLAS's product of a set of operands, and candidates on them.

    ``outs``: of candidates, with set 0. ``expected``: what these should be, in float64.
    """

    product: Callable[[int], None]
    candidates: list[Alone]
    outs: list[Tensor]
    expected: Callable[[], list[Tensor]]
    sets: int


class RankProblem(ABC, Generic[C]):
    """A row of the benchmark between ``world`` ranks."""

    free: ClassVar[int]  # SMs that the op does not get

    def __init__(self, row: Row, world: int, device: torch.device) -> None:
        self.row, self.world, self.device = row, world, device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count - self.free

    @property
    @abstractmethod
    def received(self) -> int:
        """Bytes that come to a rank."""

    @abstractmethod
    def ranked(self) -> list[tuple[float, C]]:
        """Candidates with the microseconds that they are thought to take, the fastest first."""

    @abstractmethod
    def layout(self, config: C) -> Layout: ...

    @abstractmethod
    def trial(self, rooms: list[Workspace[Layout]], configs: list[C]) -> Trial:
        """On rank 0; a workspace for each configuration."""

    @abstractmethod
    def text(self, config: C) -> str: ...
