"""Leaves what copy engines gather in the buffers that it comes to, where the graph reads it for a while only.

A buffer is a gather's from its start to the last reader of what it has gathered, where a release is put in. There are
``NUM_BUFFERS``: the gathers of a graph take them in its order, and one that finds none is copied out of its own.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ....symm_mem.layout import NUM_BUFFERS
from ...library import schema
from ..graph.collectives import is_custom
from ..memory.alias_sets import AliasSets


def place_gathers(graph: fx.Graph) -> int:
    """The order of the graph is final.

    Returns:
        how many are placed.
    """
    sets = AliasSets(graph)
    at = {node: i for i, node in enumerate(graph.nodes)}
    ends: list[int] = []  # the last readers of those that are placed
    count = 0
    for start in list(graph.nodes):
        if start.target is not schema.all_gather_start:
            continue
        (wait,) = start.users
        (made,) = sets.made[wait]
        ends = [end for end in ends if end > at[start]]
        last = max(made.nodes, key=at.__getitem__)
        if (
            len(ends) == NUM_BUFFERS
            or made.escapes
            or not all(_only_reads(n, wait, sets) for n in made.nodes)
        ):
            continue
        for node in (start, wait):
            node.kwargs = {**node.kwargs, "placed": True}
        with graph.inserting_after(last):
            named = {"group_size": start.kwargs["group_size"]}
            graph.call_function(schema.all_gather_release, (start, wait, start.args[1]), named).meta[
                "val"
            ] = None
        ends.append(at[last])
        count += 1
    return count


def _only_reads(node: fx.Node, wait: fx.Node, sets: AliasSets) -> bool:
    """Whether the node is done with the memory of what ``wait`` returns when it has run."""
    if node is wait or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or is_custom(node):
        return False
    return not set(map(id, sets.made[wait])) & set(map(id, sets.written[node]))
