"""A collective that is waited for later: its call as a record, and what it is between its start and its wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...symm_mem import flight_recorder
from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace

#: Of workspaces.
KINDS = ("async all_gather", "async all_gather placed", "async reduce_scatter")


class AsyncCall(NamedTuple):
    """Of a collective along dimension 0 that is waited for later. ``kind``: "all_gather" or "reduce_scatter"."""

    kind: str
    x: Tensor
    reduce_op: str
    group_name: str
    placed: bool = False
    group_size: int | None = None

    @property
    def gathers(self) -> bool:
        return self.kind == "all_gather"

    @property
    def start(self) -> str:
        return f"{self.kind}_start"

    @property
    def wait(self) -> str:
        return f"{self.kind}_wait"

    @property
    def workspace(self) -> str:
        """The kind of its workspace: buffers have other calls' data when such calls begin."""
        return f"async {self.kind}{' placed' * self.placed}"

    def part_bytes(self, world_size: int) -> int:
        """Of what each rank sends to each."""
        return self.x.nbytes if self.gathers else self.x.nbytes // world_size

    def result_shape(self, world_size: int) -> list[int]:
        rows = self.x.shape[0]
        return [rows * world_size if self.gathers else rows // world_size, *self.x.shape[1:]]


class Started:
    """A collective that is on its way; its token holds it.

    Attributes:
        of: the call, until it is waited for. Until then its operand is held, and not to be overwritten.
        kind: its kind.
    """

    def __init__(
        self, of: AsyncCall, finish: Callable[[], Tensor], release: Callable[[Tensor], None] | None = None
    ) -> None:
        self.of: AsyncCall | None = of
        self.kind = of.kind
        self._finish: Callable[[], Tensor] | None = finish
        self._release = release
        self._workspace: Workspace[Layout] | None = None
        self._among: Any = None
        self._buffer = 0
        self._recorded = flight_recorder.take_recorded()

    def holds(self, workspace: Workspace[Layout], buffer: int) -> None:
        """It has begun an epoch of a buffer, which its wait ends, or its release."""
        self._workspace, self._among, self._buffer = workspace, workspace.started, buffer
        self._among[buffer] = self

    @property
    def _was_reset(self) -> bool:
        w = self._workspace
        return w is not None and w.started is not self._among

    def wait(self, call: AsyncCall) -> Tensor:
        """The result.

        Raises:
            ValueError: ``call`` is of another kind or operand; or it was waited for, or its group reset.
        """
        of, finish = self.of, self._finish
        if of is None or finish is None:
            raise ValueError("started: was waited for already, must be waited for once")
        x = of.x
        if call.kind != self.kind or call.x.data_ptr() != x.data_ptr() or call.x.shape != x.shape:
            raise ValueError(f"x: is another tensor than that with which {self.kind}_start was called")
        if self._was_reset:
            raise ValueError("started: its group was reset since, it must be started again")
        self.of = self._finish = None
        result = finish()
        flight_recorder.end(self._recorded)
        if self._release is None:
            self._ends()
        return result

    def release(self, gathered: Tensor) -> None:
        """What was placed, ``gathered``, is not read any more."""
        if self._was_reset:
            raise ValueError("started: its group was reset since, it must be started again")
        if (release := self._release) is not None:
            self._release = None
            release(gathered)
            self._ends()

    def _ends(self) -> None:
        if self._workspace is not None:
            self._among.pop(self._buffer, None)
            self._workspace = None

    def __del__(self) -> None:
        # Nobody will end the epoch that peers wait for.
        if self._workspace is not None and not self._was_reset:
            self._workspace.abandon(RuntimeError(f"{self.kind}_start was not waited for"))


def hold_started(token: Tensor, started: Started) -> None:
    """A token holds what is on its way."""
    token._weft_started = started  # type: ignore[attr-defined]


def free_buffer(taken: Any, op: str) -> int:
    """A buffer that no call has: the same on all ranks."""
    for buffer in range(NUM_BUFFERS):
        if buffer not in taken:
            return buffer
    raise RuntimeError(f"{op}: {NUM_BUFFERS} are on their way already, one must be waited for first")
