"""What Inductor's key of a graph covers: all that decides what the pass makes of it."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import torch.distributed as dist
import weft

from .order.costs import tables_key
from .settings import PassSettings

_ROOT = Path(__file__).parents[2]
# How weft waits and what it writes, not what it puts into a graph.
_NOT_IN_THE_GRAPH = {"WEFT_TIMEOUT", "WEFT_REPORT"}


def pass_key(settings: PassSettings) -> str:
    names = "all" if settings.groups is None else sorted(settings.groups)
    return (
        f"weft {weft.__version__} {_sources()} groups={names} "
        f"strict={settings.strict} fuse={settings.fuse} agree={settings.agree} regather={settings.regather} "
        f"collectives={settings.collectives} sequence_parallel={settings.sequence_parallel} "
        f"reorder={settings.reorder} gathers={settings.gathers} buckets={settings.buckets} "
        f"costs={tables_key()} "
        f"ranks={_own_ranks() if settings.sequence_parallel else None} "
        f"sizes={_group_sizes()} environment={_environment()}"
    )


@cache
def _sources() -> str:
    """Of all that decides which nodes are put in, what they are said to return, and what a cached graph calls."""
    digest = hashlib.sha256()
    for top in ("fused_ops", "kernels", "symm_mem"):
        for path in sorted((_ROOT / top).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _group_sizes() -> list[tuple[str, int, str]]:
    """A graph of an all-reduce does not say for how many ranks it is, but what it is fused into depends on it."""
    if not dist.is_initialized():
        return []
    known = dist.distributed_c10d._world.pg_names
    return sorted(
        (name, pg.size(), dist.get_backend(pg))
        for pg, name in known.items()
        if isinstance(pg, dist.ProcessGroup)
    )


def _own_ranks() -> list[tuple[str, int]]:
    """A graph that takes this rank's rows of a tensor is this rank's own."""
    if not dist.is_initialized():
        return []
    known = dist.distributed_c10d._world.pg_names
    return sorted((name, pg.rank()) for pg, name in known.items() if isinstance(pg, dist.ProcessGroup))


def _environment() -> dict[str, str]:
    names = (n for n in sorted(os.environ) if n.startswith("WEFT_") and n not in _NOT_IN_THE_GRAPH)
    return {n: os.environ[n] for n in names}
