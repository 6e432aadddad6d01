"""Which form a collective and its neighbourhood have: what the pass asks for each collective of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import fx

from ..graph.collectives import Collective, LeftAlone, c10d
from ..order.costs import counted_flops
from ..scaled.all_gather import AllGatherScaledMatmulPattern
from ..scaled.reduce_scatter import ScaledMatmulReduceScatterPattern
from .all_gather_matmul import AllGatherMatmulPattern
from .all_reduce import AllReducePattern
from .alone import AlonePattern
from .asynchronous import AsyncPattern
from .candidate import why_not_profitable_of
from .matmul_reduce_scatter import MatmulReduceScatterPattern

Form: TypeAlias = (
    AllGatherMatmulPattern
    | AllGatherScaledMatmulPattern
    | MatmulReduceScatterPattern
    | ScaledMatmulReduceScatterPattern
    | AllReducePattern
    | AlonePattern
    | AsyncPattern
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

    def alone(why: str) -> Form:
        found = AlonePattern.from_collective(c)
        found.why, found.decided = why, any_size or always
        if (small := why_not_profitable_of(found)) is not None:
            raise LeftAlone(small)
        return found

    return _match_or(c, groups, always, alone)


def match_beside(c: Collective, groups: frozenset[str] | None = None, *, always: bool = False) -> Form:
    """The same; else, or where no product gains by it, what copy engines carry beside other products.

    Raises:
        LeftAlone: it is none that can be fused exactly, nor is it copy engines'.
    """

    def beside(why: str) -> Form:
        return AsyncPattern.from_collective(c, why)

    return _match_or(c, groups, always, beside, apart=_why_apart)


def _why_apart(form: Form) -> str | None:
    """Why copy engines are better than a product that takes the collective; None if they are not."""
    if getattr(form, "transposes", False):
        return "a product would take it as its right operand, and transpose what it reads and writes"
    if form.collective.node.target is c10d.reduce_scatter_tensor.default and _ends_late(form.collective.wait):
        return "nothing in the graph reads the result, and other products hide it"
    return None


def _ends_late(wait: fx.Node) -> bool:
    """Whether what is waited for is only returned, and a product stands behind it."""
    if any(user.op != "output" for user in wait.users):
        return False
    behind = wait.next
    while behind.op != "output":
        if counted_flops(behind):
            return True
        behind = behind.next
    return False


def _match_or(
    c: Collective,
    groups: frozenset[str] | None,
    always: bool,
    other: Callable[[str], Form],
    apart: Callable[[Form], str | None] = lambda form: None,
) -> Form:
    """What the collective can be fused into, if that is profitable; else ``other``, which is told why.

    Args:
        apart: why ``other`` is better than a form; None if it is not.
    """
    form = None
    try:
        form = match(c, groups, always=always)
        why = None if always else why_not_profitable_of(form)
        if why is None and not always:
            why = apart(form)
        if why is None:
            return form
    except LeftAlone as e:
        if c.node.target is c10d.all_reduce.default:
            raise
        why = str(e)
    try:
        return other(why)
    except LeftAlone as e:
        if form is not None:
            return form
        raise LeftAlone(f"{why}; alone: {e}") from e
