"""Which nodes of a graph must keep their order: what reads or writes memory that another one writes, and effects."""

from __future__ import annotations

import torch
from torch import fx

from ..graph.collectives import communicates, waits
from ..graph.effects import is_custom, is_random
from .alias_sets import AliasSet, AliasSets

# Operators of higher order that only compute: a user's operator that writes to its arguments, made functional.
_FUNCTIONAL = ("auto_functionalized", "auto_functionalized_v2")


class Hazards:
    """What each node must stay after.

    Attributes:
        before: for each node those that must come before it: operands, and in memory that is written to, the last write
            before a read, and all reads since the last write before a write.
        segment: nodes of different numbers keep their order: between them is one whose effects are not known.
    """

    def __init__(self, sets: AliasSets, order: list[fx.Node]) -> None:
        places = set(order)
        self.before = {n: {a for a in n.all_input_nodes if a in places} for n in order}
        self.segment: dict[fx.Node, int] = {}
        wrote: dict[AliasSet, fx.Node] = {}
        read: dict[AliasSet, list[fx.Node]] = {}
        written = {s for n in order for s in sets.written[n]}
        drawn: fx.Node | None = None
        segment = 0
        for node in order:
            before = self.before[node]
            # Making memory is its first write.
            writes = {*sets.written[node]}
            writes |= {s for s in sets.made[node] if not s.external} - wrote.keys()
            for each in sets.touched(node):
                if each not in written:
                    continue
                if each in wrote:
                    before.add(wrote[each])
                if each in writes:
                    before.update(read.pop(each, ()))
                    wrote[each] = node
                else:
                    read.setdefault(each, []).append(node)
            before.discard(node)
            if is_opaque(node):
                segment += 2
                self.segment[node] = segment - 1
                continue
            self.segment[node] = segment
            if is_random(node):
                if drawn is not None and self.segment[drawn] == segment:
                    before.add(drawn)
                drawn = node

    def why_invalid(self, order: list[fx.Node]) -> str | None:
        """The first pair of nodes that stand in the wrong order; None if all stand as they must."""
        seen: set[fx.Node] = set()
        segment = 0
        for node in order:
            if self.segment[node] < segment:
                return f"{node.name} has left its place among effects"
            segment = self.segment[node]
            for other in self.before[node]:
                if other not in seen:
                    return f"{node.name} stands before {other.name}"
            seen.add(node)
        return None if len(seen) == len(self.before) == len(order) else "nodes are missing"


def is_opaque(node: fx.Node) -> bool:
    """Whether a node may do what its arguments do not say, communicate for one, so that nothing moves across it."""
    target = node.target
    if node.op != "call_function" or (is_custom(node) and not communicates(node)):
        return True
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in _FUNCTIONAL
    if not isinstance(target, torch._ops.OpOverload):
        return False  # getitem, arithmetic of sizes
    known = communicates(node) or waits(node) or is_random(node) or target._schema.is_mutable
    return node.is_impure() and not known
