"""A call of a collective that is waited for later, as a record."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
