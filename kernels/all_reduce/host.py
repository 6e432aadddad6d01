"""CPU ranks: every rank sends its input to every rank, which all reduce in rank order."""

from __future__ import annotations

import torch

from ...symm_mem.workspace import Workspace
from ..device.collective.host_exchange import reduce_parts

OP = "one_shot_all_reduce"
IN_PLACE = f"{OP}_"


def host_all_reduce(
    workspace: Workspace, x: torch.Tensor, out: torch.Tensor, reduce_op: str, op: str = OP
) -> None:
    """``out`` = what all ranks' x make together; both 1-D and contiguous, of equal length. ``op``: whose call it is."""
    reduce_parts(workspace, [x] * workspace.world_size, out, reduce_op, op)
