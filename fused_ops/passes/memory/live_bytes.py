"""How many bytes a graph holds at each of its steps, for an order of its nodes and for changes of it.

A set of aliases is there from the first node that makes one of them to the last that reads or writes one, both
included. What the graph returns is there to the end. What it was given is the caller's, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import fx

from .alias_sets import AliasSet


class LiveBytes:
    """Bytes at each step of an order. A change of a part of the order costs what is in that part.

    Attributes:
        order: the graph's nodes but for its inputs and its output.
        at: the position of each node.
        live: bytes at each position.
    """

    def __init__(self, sets: Iterable[AliasSet], order: Sequence[fx.Node]) -> None:
        self.sets = [s for s in sets if s.counted]
        self.order = list(order)
        self.at = {node: i for i, node in enumerate(self.order)}
        self._counted: dict[fx.Node, list[AliasSet]] = {node: [] for node in self.order}
        changes = [0] * (len(self.order) + 1)
        for each in self.sets:
            for node in each.nodes:
                if node in self.at:
                    self._counted[node].append(each)
            if (lives := self.interval(each)) is not None:
                changes[lives[0]] += each.size
                changes[lives[1] + 1] -= each.size
        self.live = [*accumulate(changes[:-1])]

    @property
    def peak(self) -> int:
        return max(self.live, default=0)

    def interval(self, each: AliasSet) -> tuple[int, int] | None:
        """The first and the last step at which a set is there; None of one that no node makes."""
        places = [self.at[n] for n in each.nodes if n in self.at]
        if not places:
            return None
        return min(places), len(self.order) - 1 if each.escapes else max(places)

    def rearranged(self, first: int, nodes: Sequence[fx.Node]) -> list[int]:
        """Bytes at each step from ``first`` on if these nodes, which are there now, were there in this order."""
        stop = first + len(nodes)
        changes = [0] * (len(nodes) + 1)
        moved = {n: first + i for i, n in enumerate(nodes)}
        for each in dict.fromkeys(s for n in nodes for s in self._counted[n]):
            places = [self.at[n] for n in each.nodes if n in self.at]
            new = [moved.get(n, self.at[n]) for n in each.nodes if n in self.at]
            for now, size in ((places, -each.size), (new, each.size)):
                begin = max(min(now), first)
                end = stop if each.escapes else min(max(now) + 1, stop)
                if begin < end:
                    changes[begin - first] += size
                    changes[end - first] -= size
        return [a + b for a, b in zip(self.live[first:stop], accumulate(changes[:-1]), strict=True)]

    def rearrange(self, first: int, nodes: Sequence[fx.Node], live: Sequence[int] | None = None) -> None:
        """Takes that order. ``live``: what ``rearranged`` gave for it."""
        live = self.rearranged(first, nodes) if live is None else live
        self.live[first : first + len(nodes)] = live
        self.order[first : first + len(nodes)] = nodes
        for i, node in enumerate(nodes, first):
            self.at[node] = i


def body(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that have an order: all but the inputs, which come first, and the output."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def put_in_order(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Puts the nodes of ``body`` in this order, before the output. Attributes are read before all of them."""
    output = graph.output_node()
    for node in order:
        output.prepend(node)
