"""Which nodes of a graph share memory, and what each does to it.

Values share memory where their fake tensors share a storage, and where an operator's schema says so. A wait returns
what it waits for; until then a collective also reads its operands, so the wait counts as their reader.

A fake tensor's storage is as large as the real one's, so a set of aliases is as large as the largest of its storages.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..graph.collectives import communicates, fills_what_it_waits_for, is_placed, waits
from ..graph.disjoint_sets import DisjointSets
from ..graph.nodes import arguments_of, aten
from ..graph.sizes import hint_or_one

HEAP = "heap"  #: the pool of what copy engines have gathered, read where it came


@dataclass(eq=False)
class AliasSet:
    """Memory that values share.

    Attributes:
        size: bytes.
        pool: the device that it lies on, or the symmetric heap.
        external: it is there before the graph runs.
        escapes: the graph returns it.
        nodes: all that makes, reads or writes it, in the order of the graph.
    """

    size: int = 0
    pool: str = "cpu"
    external: bool = False
    escapes: bool = False
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def counted(self) -> bool:
        """Whether the graph makes it, in torch's memory."""
        return not self.external and self.pool != HEAP


class AliasSets:
    """The alias sets of a graph, in the order in which they are first met.

    Attributes:
        sets: all of them.
        made: for each node the set of each tensor that its value has, in their order.
        read: the sets that it reads, or that its operands are views of.
        written: those that it writes to.
    """

    def __init__(self, graph: fx.Graph) -> None:
        joined = DisjointSets[int]()
        for node in graph.nodes:
            for a, b in _same_memory(node):
                joined.join(_key(b), _key(a))
        found: dict[int, AliasSet] = {}
        self.made: dict[fx.Node, list[AliasSet]] = {}
        self.read: dict[fx.Node, list[AliasSet]] = {}
        self.written: dict[fx.Node, list[AliasSet]] = {}
        for node in graph.nodes:
            self.made[node] = []
            for tensor in tensors_of(node):
                pool = HEAP if is_placed(node) else tensor.device.type
                each = found.setdefault(joined.root(_key(tensor)), AliasSet(pool=pool))
                each.size = max(each.size, bytes_of(tensor))
                each.external |= node.op in ("placeholder", "get_attr")
                self.made[node].append(each)
            operands = [*node.all_input_nodes, *held_until(node)]
            self.read[node] = [*dict.fromkeys(s for a in operands for s in self.made.get(a, ()))]
            self.written[node] = [*dict.fromkeys(s for a in _written(node) for s in self.made.get(a, ()))]
            for each in self.touched(node):
                each.nodes.append(node)
                each.escapes |= node.op == "output"
        self.sets = [*found.values()]

    def touched(self, node: fx.Node) -> list[AliasSet]:
        """All that the node makes, reads or writes."""
        return [*dict.fromkeys((*self.made[node], *self.read[node]))]


def started_by(wait: fx.Node) -> Iterator[fx.Node]:
    """The collectives that a wait waits for."""
    # One of weft's waits takes what the collective reads, too: that may be another one's result.
    operands = wait.all_input_nodes if fills_what_it_waits_for(wait) else wait.all_input_nodes[:1]
    for operand in operands:
        node = operand
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]  # one tensor of several
        if communicates(node):
            yield node


def held_until(node: fx.Node) -> list[fx.Node]:
    if not waits(node):
        return []
    # One that returns several tensors keeps all of them, and all operands, until each is waited for.
    return [n for start in started_by(node) for n in (start, *start.all_input_nodes)]


def _written(node: fx.Node) -> Iterator[fx.Node]:
    if fills_what_it_waits_for(node):
        yield from node.all_input_nodes
        return
    for argument, given in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (a for a in tree_leaves(given) if isinstance(a, fx.Node))


def _same_memory(node: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of an operand and a result that the operator's schema calls aliases."""
    # The schema of an _unsafe_view does not say so, and its operand may be another one than its value was made of.
    if fills_what_it_waits_for(node) or node.target is aten._unsafe_view.default:
        yield from zip(
            (t for a in node.all_input_nodes for t in tensors_of(a)), tensors_of(node), strict=False
        )
        return
    results = node.meta.get("val")
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    values = results if isinstance(results, (list, tuple)) and len(returns) > 1 else [results]
    for returned, value in zip(returns, values, strict=False):
        if returned.alias_info is None:
            continue
        for argument, given in _arguments(node):
            if argument.alias_info is None:
                continue
            # Of what goes into a list, as by split, no schema says into which: "a -> *", and nothing of the list.
            shared = argument.alias_info.before_set & returned.alias_info.before_set
            if not shared and "*" not in argument.alias_info.after_set:
                continue
            operands = [t for a in tree_leaves(given) if isinstance(a, fx.Node) for t in tensors_of(a)]
            made = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            if len(operands) == len(made):
                yield from zip(operands, made, strict=True)
            else:
                yield from ((a, b) for a in operands for b in made)


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    if isinstance(node.target, torch._ops.OpOverload):
        given = arguments_of(node)
        yield from ((a, given[a.name]) for a in node.target._schema.arguments if a.name in given)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    if node.op == "output":
        return []
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def size_of(node: fx.Node) -> int:
    """Bytes of the memory that a node's value lies in."""
    return sum(map(bytes_of, tensors_of(node)))


def bytes_of(tensor: torch.Tensor) -> int:
    return hint_or_one(tensor.untyped_storage().nbytes())
