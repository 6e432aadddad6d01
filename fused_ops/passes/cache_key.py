"""What Inductor's key of a graph covers: all that decides what the pass makes of it."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import torch.distributed as dist
import weft

from .settings import PassSettings

_ROOT = Path(__file__).parents[2]
# How weft waits and what it writes, not what it puts into a graph.
_NOT_IN_THE_GRAPH = {"WEFT_TIMEOUT", "WEFT_REPORT"}


def pass_key(settings: PassSettings) -> str:
    groups = _groups()
    sizes = [(name, pg.size(), dist.get_backend(pg)) for name, pg in groups]
    # A graph that takes this rank's rows or columns of a tensor is this rank's own.
    own = settings.sequence_parallel or settings.loss_parallel
    ranks = [(name, pg.rank()) for name, pg in groups] if own else None
    return (
        f"weft {weft.__version__} {_sources()} {settings!r} "
        f"ranks={ranks} sizes={sizes} environment={_environment()}"
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


def _groups() -> list[tuple[str, dist.ProcessGroup]]:
    """A graph of an all-reduce does not say for how many ranks it is, but what it is fused into depends on it."""
    if not dist.is_initialized():
        return []
    known = dist.distributed_c10d._world.pg_names
    found = [(name, pg) for pg, name in known.items() if isinstance(pg, dist.ProcessGroup)]
    return sorted(found, key=lambda group: group[0])


def _environment() -> dict[str, str]:
    names = (n for n in sorted(os.environ) if n.startswith("WEFT_") and n not in _NOT_IN_THE_GRAPH)
    return {n: os.environ[n] for n in names}
