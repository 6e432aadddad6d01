"""Which form a collective and its neighbourhood have: what the pass asks for each collective of a graph."""

from __future__ import annotations

from typing import TypeAlias

from ..graph.collectives import Collective, LeftAlone, c10d
from ..scaled.all_gather import AllGatherScaledMatmulPattern
from ..scaled.reduce_scatter import ScaledMatmulReduceScatterPattern
from .all_gather_matmul import AllGatherMatmulPattern
from .all_reduce import AllReducePattern
from .alone import AlonePattern
from .candidate import why_not_profitable_of
from .matmul_reduce_scatter import MatmulReduceScatterPattern

Form: TypeAlias = (
    AllGatherMatmulPattern
    | AllGatherScaledMatmulPattern
    | MatmulReduceScatterPattern
    | ScaledMatmulReduceScatterPattern
    | AllReducePattern
    | AlonePattern
)


def match(c: Collective, groups: frozenset[str] | None = None, *, always: bool = False) -> Form:
    """What the collective can be fused into; the graph is not changed.

    Args:
        groups: the other collectives that it takes along are of these groups only. None for all.
        always: where several ops could take it, the one that takes most, whether that is profitable or not.

    Raises:
        LeftAlone: it is none that can be fused exactly.
    """
    if c.node.target is c10d.all_gather_into_tensor.default:
        return _of_gather(c, groups)
    if c.node.target is c10d.reduce_scatter_tensor.default:
        scaled = ScaledMatmulReduceScatterPattern.from_collective(c)
        return MatmulReduceScatterPattern.from_collective(c) if scaled is None else scaled
    return AllReducePattern.from_collective(c, groups, always=always)


def _of_gather(c: Collective, groups: frozenset[str] | None) -> Form:
    why: LeftAlone | None = None
    try:
        if (scaled := AllGatherScaledMatmulPattern.from_collective(c, groups)) is not None:
            return scaled
    except LeftAlone as e:
        why = e
    try:
        return AllGatherMatmulPattern.from_collective(c, groups)
    except LeftAlone as e:
        raise (why or e) from e


def match_alone_too(
    c: Collective, groups: frozenset[str] | None = None, *, always: bool = False, any_size: bool = False
) -> Form:
    """The same; where it can be fused with no product, or that is not profitable, the collective alone.

    Args:
        any_size: alone whatever its size is.

    Raises:
        LeftAlone: it is none that can be fused exactly, nor alone.
    """
    form = None
    try:
        form = match(c, groups, always=always)
        why = None if always else why_not_profitable_of(form)
        if why is None:
            return form
    except LeftAlone as e:
        if c.node.target is c10d.all_reduce.default:
            raise
        why = str(e)
    try:
        alone = AlonePattern.from_collective(c)
        alone.why, alone.decided = why, any_size or always
        if (small := why_not_profitable_of(alone)) is not None:
            raise LeftAlone(small)
        return alone
    except LeftAlone as e:
        if form is not None:
            return form
        raise LeftAlone(f"{why}; alone: {e}") from e
