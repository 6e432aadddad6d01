"""Sequence parallelism of a training step, on the graph of forward and backward: what is kept for the backward is on a
rank's own rows, too.

AOTAutograd's partitioner has not run yet. Which collectives take the place of an all-reduce is a function of the graph,
the group's size and the settings, but not of the rank: a slice is none of "each rank's own rows" here. A rank whose
graph differs is found by the vote, as always, but what ranks then run has these collectives already, as with
``regather``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..agreement.fallback.run import is_fallback_graph
from ..cache_key import pass_key
from ..canonicalize import by_position, name_groups
from ..graph.collectives import collectives
from ..graph.nodes import c10d, tangents
from ..settings import PassSettings
from .find import SEEN, put_sequences_on_rows


class JointRows(PassSettings, CustomGraphPass):
    """Made by ``FusionPass(sequence_parallel=True)``."""

    def uuid(self) -> Any:
        return f"{pass_key(self)} rows"

    def __call__(self, graph: fx.Graph) -> None:
        if is_fallback_graph() or not tangents(graph):
            return
        by_position(graph)
        name_groups(graph)
        notes = put_sequences_on_rows(graph, self.sequence_parallel, self.groups)
        for target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
            for node in graph.find_nodes(op="call_function", target=target):
                node.meta[SEEN] = notes.get(node, "")


def rewritten(
    graph: fx.Graph, settings: PassSettings, why_not: Callable[[str], str | None]
) -> dict[fx.Node, str]:
    """Does the same to a graph that Inductor's last passes get, unless the joint graph had it.

    Args:
        why_not: why nothing of a group should be changed.

    Returns:
        what became of all-reduces, as ``put_sequences_on_rows``.
    """
    if not settings.sequence_parallel:
        return {}
    seen = {node: str(node.meta[SEEN]) for node in collectives(graph) if node.meta.get(SEEN)}
    # What a forward graph has kept for a backward one, the ranks need not have alike.
    if tangents(graph):
        return seen
    own_chunks = bool(settings.agree)
    return seen | put_sequences_on_rows(
        graph, settings.sequence_parallel, settings.groups, why_not, own_chunks=own_chunks
    )
