"""What copy engines carry: no more collectives at once than they have buffers, and gathers that stay in theirs.

They have ``NUM_BUFFERS`` for each kind of collective. A gather whose result the graph reads for a while only is left
in its buffer: that is the gather's from its start to the last reader, where a release is put in. The gathers of a graph
take the buffers in its order, and one that finds none is copied out of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ....symm_mem.layout import NUM_BUFFERS
from ...dispatch import profitability
from ...library import schema
from ..graph.effects import is_custom
from ..graph.nodes import c10d, val
from ..memory.alias_sets import AliasSet, AliasSets, size_of
from ..memory.hazards import Hazards
from ..memory.live_bytes import body, put_in_order
from .least_memory import order_of_least_memory
from .transports import NETWORK, Transfer, transfers, transport_of

_KINDS = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)


def start_when_needed(graph: fx.Graph) -> bool:
    """Puts each start just before its wait, where copy engines could otherwise not carry all that is large enough.
    Gives whether the order has changed. Collectives keep theirs."""
    order = body(graph)
    found = transfers(order)
    if not any(_too_many(order, [t for t in found if t.start.target is kind]) for kind in _KINDS):
        return False
    put_in_order(graph, order_of_least_memory(order, Hazards(AliasSets(graph), order), found))
    return True


def _too_many(order: Sequence[fx.Node], found: Sequence[Transfer]) -> bool:
    at = {node: i for i, node in enumerate(order)}
    lives = [(at[t.start], at[t.waits[0]]) for t in found if len(t.waits) == 1 and is_large(t.start)]
    return any(sum(begin <= start < end for begin, end in lives) > NUM_BUFFERS for start, _ in lives)


def is_large(start: fx.Node) -> bool:
    """Whether copy engines would carry a gather or scatter."""
    (given,) = start.all_input_nodes
    x = val(given)
    if transport_of(start) == NETWORK or not isinstance(x.numel(), int):
        return False
    return profitability.why_not_async(min(size_of(given), size_of(start)), x.device.type) is None


def gathers_in_buffers(order: Sequence[fx.Node], sets: AliasSets) -> dict[fx.Node, AliasSet]:
    """The start of each gather that can stay where it comes to, in this order of the nodes, and what it gathers."""
    at = {node: i for i, node in enumerate(order)}
    ends: list[int] = []  # the last readers of those that stay
    found: dict[fx.Node, AliasSet] = {}
    for start in order:
        if start.target is not schema.all_gather_start:
            continue
        (wait,) = start.users
        (made,) = sets.made[wait]
        ends = [end for end in ends if end > at[start]]
        read_only = all(_only_reads(n, wait, sets) for n in made.nodes)
        if len(ends) == NUM_BUFFERS or made.escapes or not read_only:
            continue
        ends.append(max(at[n] for n in made.nodes))
        found[start] = made
    return found


def mark_placed(starts: Iterable[fx.Node]) -> None:
    """What these gather stays where it comes to."""
    for start in starts:
        for node in (start, *start.users):
            node.kwargs = {**node.kwargs, "placed": True}


def place_gathers(graph: fx.Graph) -> int:
    """The order of the graph is final: releases what is marked, or as many as can stay if nothing is; gives how
    many."""
    sets = AliasSets(graph)
    at = {node: i for i, node in enumerate(graph.nodes)}
    starts = [n for n in graph.nodes if n.target is schema.all_gather_start and n.kwargs.get("placed")]
    if not starts:
        starts = [*gathers_in_buffers(body(graph), sets)]
        mark_placed(starts)
    for start in starts:
        (wait,) = start.users
        (made,) = sets.made[wait]
        with graph.inserting_after(max(made.nodes, key=at.__getitem__)):
            given, named = (start, wait, start.args[1]), {"group_size": start.kwargs["group_size"]}
            graph.call_function(schema.all_gather_release, given, named).meta["val"] = None
    return len(starts)


def _only_reads(node: fx.Node, wait: fx.Node, sets: AliasSets) -> bool:
    """Whether the node is done with the memory of what ``wait`` returns when it has run."""
    if node is wait or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or is_custom(node):
        return False
    return set(sets.made[wait]).isdisjoint(sets.written[node])
