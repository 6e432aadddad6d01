"""CPU ranks: every rank sends each rank its part, which that reduces in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import reduce_parts

OP = "one_shot_reduce_scatter"
INTO = f"{OP}_out"


def host_reduce_scatter(
    workspace: Workspace, parts: Sequence[torch.Tensor], reduce_op: str, op: str = OP
) -> torch.Tensor:
    """This rank's part of what all ranks' ``parts`` make together; [n] for each rank, of lengths that are the same on
    every rank. ``op``: whose call it is."""
    out = torch.empty_like(parts[workspace.rank])
    reduce_parts(workspace, parts, out, reduce_op, op)
    return out
