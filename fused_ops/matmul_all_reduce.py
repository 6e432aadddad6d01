"""fused_matmul_all_reduce: products and all-reduces of row after row, side by side."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.all_reduce.configs import beside
from ..kernels.matmul_all_reduce import host
from ..kernels.matmul_all_reduce.configs import Config, choose, rows_of
from ..kernels.matmul_all_reduce.reference import matmul_all_reduce as unfused
from ..symm_mem import findings, is_checked
from ..symm_mem.registry import has_name
from . import again as short
from . import all_reduce
from .plan import Plan, heap_or_reason, last_plan, ran
from .workspaces import matmul_workspace


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding: such a call is one product and one all-reduce behind it."""

    group: ProcessGroup
    sizes: tuple[int, int]  # of the product
    empty: short.Empty


def again(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor | None:
    """As the op, if such a call was made before on CUDA, in one piece; else None, and nothing happened.

    Tensors and operation may be anything.
    """
    looked_at = short.look(host.OP, reduce_op, (A, B))
    if looked_at is None or short.stream_on(A.get_device()) is None:
        return None
    found: _Found | None = findings.kept.get((looked_at[0], group_name))
    if found is None or not has_name(found.group, group_name):
        return None
    sizes, flat = found.sizes, A.dim() == 2
    out = found.empty(sizes, (sizes[1], 1), A.dtype)
    torch.mm(A if flat else A.flatten(0, -2), B, out=out)
    if all_reduce.again(out, reduce_op, group_name, out) is None:
        torch.ops.weft.one_shot_all_reduce_(out, reduce_op, group_name)
    return out if flat else out.view(*A.shape[:-1], sizes[1])


def _remember(kept: dict[Hashable, Any], A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup) -> None:
    """Such a call was made, in one piece. ``kept``: what ``findings.kept`` was in front of it."""
    if not is_checked():
        found = _Found(group, (A.shape[:-1].numel(), B.shape[1]), short.empty_like_on(A.device))
        findings.keep(kept, (short.key_of(host.OP, reduce_op, (A, B)), group.group_name), found)


def run(A: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup, config: Config | None = None) -> Tensor:
    """As the op; the arguments are checked."""
    kept = findings.kept
    shape = (*A.shape[:-1], B.shape[1])
    found = heap_or_reason(A, group, empty=0 in shape)
    if isinstance(found, str):
        ran(Plan("unfused", found))
        return unfused(A, B, reduce_op, group)
    a = A.flatten(0, -2)
    if A.device.type == "cpu":
        needs = host.needs(a.shape[0], B.shape[1], A.element_size(), found.world_size)
        workspace = matmul_workspace(found, *needs)
        ran(Plan("host", workspace_bytes=workspace.layout.bytes))
        return host.matmul_all_reduce(workspace, a, B, reduce_op).view(shape)
    chosen = choose(a.shape[0], B.shape[1], a.shape[1], found.world_size)
    with torch.cuda.device(A.device):
        out = _on_cuda(a, B, reduce_op, group, config or chosen)
    if config is None and chosen.pieces == 1:
        _remember(kept, A, B, reduce_op, group)
    return out.view(shape)


@dataclass(frozen=True)
class _Side:
    """The stream beside one of the caller's, and the events that order the two."""

    stream: torch.cuda.Stream
    ready: torch.cuda.Event
    done: torch.cuda.Event


_sides: dict[tuple[str, int, int], _Side] = {}


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority that nobody else has: those of torch's pool are handed out more than once."""
    from cuda.bindings import driver

    from ..symm_mem.backends.vmm import check

    _, highest = check(driver.cuCtxGetStreamPriorityRange())
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    handle = int(check(driver.cuStreamCreateWithPriority(flags, highest)))
    return torch.cuda.ExternalStream(handle, device=device)


def _on_cuda(a: Tensor, B: Tensor, reduce_op: str, group: ProcessGroup, config: Config) -> Tensor:
    out = a.new_empty(a.shape[0], B.shape[1])
    pieces = rows_of(a.shape[0], config.pieces)
    if len(pieces) == 1:
        torch.mm(a, B, out=out)
        return all_reduce.in_place(out, reduce_op, group)
    current = torch.cuda.current_stream()
    key = (group.group_name, a.get_device(), current.cuda_stream)
    side = _sides.get(key)
    if side is None:
        side = _sides[key] = _Side(_own_stream(a.device), torch.cuda.Event(), torch.cuda.Event())
    for first, end in pieces:
        torch.mm(a[first:end], B, out=out[first:end])
        side.ready.record(current)
        side.stream.wait_event(side.ready)
        with torch.cuda.stream(side.stream):
            part = out[first:end]
            all_reduce.in_place(part, reduce_op, group, beside(part.nbytes, group.size()))
    side.done.record(side.stream)
    current.wait_event(side.done)
    ran(Plan("overlapped", workspace_bytes=last_plan().workspace_bytes))
    return out
