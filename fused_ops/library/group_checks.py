"""What is refused of a group: another number of ranks than that of a graph, another rank than that of a layer."""

from __future__ import annotations

from ...symm_mem import resolve_group
from ..dispatch.callers import constant_in_graphs


def group_size(value: int | None, group_name: str) -> None:
    """``value`` is the group's number of ranks, if it is given: by a graph that was made for so many."""
    if value is not None and (size := resolve_group(group_name).size()) != value:
        raise ValueError(
            f"group_size: is {value}, must be {size}, the number of ranks of group {group_name!r}: "
            "a graph is for as many ranks as it was made for"
        )


@constant_in_graphs
def why_of_another_rank(group_name: str, rank: int, size: int) -> str | None:
    """Why this is not the rank whose part of a layer was made; None if it is. A graph is traced on one rank for one
    group, so Dynamo need not look into it."""
    try:
        group = resolve_group(group_name)
    except ValueError as e:
        return str(e)
    if group.size() != size:
        return f"group: the layer was made for {size} ranks, group {group_name!r} has {group.size()}"
    if group.rank() != rank:
        return (
            f"group: the layer was made for rank {rank}, this is rank {group.rank()} of group {group_name!r}"
        )
    return None


def own_rank(group_name: str, rank: int, size: int) -> None:
    """This is the rank of the group, which has ``size``, whose part of a layer was made. Modules are pickled whole, and
    kept over a restart.

    Raises:
        ValueError: it is another one, or there is no such group.
    """
    if (problem := why_of_another_rank(group_name, rank, size)) is not None:
        raise ValueError(problem)
