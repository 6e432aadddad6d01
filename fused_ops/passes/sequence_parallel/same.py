"""What the ranks of a group have alike."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph.collectives import group_of
from ..graph.nodes import FLAT, after_tangents, aten, c10d, calls, is_val, val
from ..graph.row_wise import REDUCTIONS, is_pointwise
from ..graph.split_cat import SLICES, SPLITS
from ..graph.views import CASTS, PERMUTES, steps_back
from ..patterns.matmuls import product

_DETERMINED = (
    *REDUCTIONS,
    *SLICES,
    *SPLITS,
    *CASTS,
    *PERMUTES,
    aten.expand.default,
    aten.cat.default,
    aten.embedding.default,
    aten.full.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
    aten.arange.start_step,
    torch.ops.prims.iota.default,
)
#: What a router does besides.
_ROUTES = (
    aten.topk.default,
    aten.sort.default,
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.select_scatter.default,
)


_COMPARISONS = (aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne)


def same_on_all_ranks(graph: fx.Graph, group: str) -> set[fx.Node]:
    """What all ranks of a group have alike, if they have the graph's inputs alike. Matrix products are not: of which a
    rank has a part, by its own weights; but for gradients of a router's input, see ``_whole_gradients``. In a graph of
    forward and backward comparisons of integers are not, either: ``_compares_integers``."""
    found: set[fx.Node] = set()
    uncut: set[fx.Node] = set()  # of these what has no part of a gradient, which may be each rank's own
    reduced: set[fx.Node] = set()  # gradients, and sums of such
    backward = after_tangents(graph)
    for node in graph.nodes:
        by_group = calls(node, c10d.all_reduce.default, c10d.all_gather_into_tensor.default)
        first = node.op in ("placeholder", "get_attr") or (by_group and group_of(node) == group)
        if backward and _compares_integers(node):
            continue
        if first or (_is_determined(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
            cut = node in backward and calls(node, *SLICES, *SPLITS)
            if first or (not cut and uncut.issuperset(node.all_input_nodes)):
                uncut.add(node)
        elif node in backward and _adds(node):
            whole = _whole_gradients(node, uncut, reduced)
            found |= whole
            uncut |= whole
        of_reduced = _adds(node) or calls(node, c10d.wait_tensor.default, *FLAT, *CASTS)
        if node in backward and (
            (of_reduced and not reduced.isdisjoint(node.all_input_nodes))
            or (first and calls(node, c10d.all_reduce.default) and node.args[1] == "sum")
        ):
            reduced.add(node)
    return found


def _is_determined(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if calls(node, operator.getitem, c10d.wait_tensor.default, *FLAT, *_DETERMINED) or is_pointwise(node):
        return True
    # Of sizes.
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _compares_integers(node: fx.Node) -> bool:
    """As a rank does to find which tokens are in its own part of a vocabulary. Which numbers the others compare with it
    does not know, and where forward and backward are one graph the vote comes too late."""
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload) or overload.overloadpacket not in _COMPARISONS:
        return False
    return not any(val(n).dtype.is_floating_point for n in filter(is_val, node.all_input_nodes))


def _adds(node: fx.Node) -> bool:
    return calls(node, aten.add.Tensor) and bool(node.kwargs.get("alpha", 1) == 1)


def _whole_gradients(total: fx.Node, same: set[fx.Node], reduced: set[fx.Node]) -> set[fx.Node]:
    """A sum of a reduced gradient and others, with these, if they are whole on each rank; nothing if they may not be.

    So it is with the gradient of a router's input: the program reduces what comes from the experts, whose weights are
    shards, and then adds what comes from the router. If the router's weight were a shard, that would be reduced, too. A
    gradient into which another weight or a part of a gradient has gone may be each rank's own.
    """
    sums, pending, has_reduced = {total}, [total], False
    while pending:
        for term in filter(is_val, pending.pop().all_input_nodes):
            if term in same:
                has_reduced |= term in reduced
                continue
            if _adds(term) or calls(term, *FLAT, *CASTS):
                pending.append(term)
            elif not _is_of_one_weight(term, same):
                return set()
            sums.add(term)
    return sums if has_reduced else set()


def _is_of_one_weight(term: fx.Node, same: set[fx.Node]) -> bool:
    """Whether ranks have it alike if they have one input alike with which products are made, and ``same``."""
    weights: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [term]
    while pending:
        node = pending.pop()
        if node in same or node in seen:
            continue
        seen.add(node)
        given = list(node.all_input_nodes)
        if (taken := product(node)) is not None:
            weight = taken.right
            for step in steps_back(weight):
                weight = step.source
            weights.add(weight)
            if weight.op != "placeholder" or len(weights) > 1:
                return False
            given.remove(taken.right)
        elif calls(node, *SLICES, *SPLITS) or not (_is_determined(node) or calls(node, *_ROUTES)):
            return False
        pending += given
    return bool(weights)
