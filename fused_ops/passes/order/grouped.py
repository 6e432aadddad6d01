"""A collective with its copy-in and a wait with its copy-out: nodes that stay together, as torch's grouped nodes do.

The copy-in are the casts, copies and cats that only the collective needs. The copy-out is what only cuts, copies or
casts what was waited for. In an order of a graph's nodes those belong to it that nothing stands between. Inductor's
scheduler gets them as grouped nodes, so that it puts nothing between and fuses nothing from outside into them: the
collective would wait for that, too, and the memory of what was gathered would be held for longer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from ..graph.collectives import communicates, starts, waits
from ..graph.nodes import aten
from ..memory.alias_sets import tensors_of
from ..memory.live_bytes import body

MARK = "weft grouped"  #: in the meta of what ``mark_grouped`` has found
_COPIES = {
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.split_with_sizes_copy.default,
    torch.ops.prims.convert_element_type.default,
}


def is_copy(node: fx.Node) -> bool:
    """Whether the node only copies, casts, joins or cuts: a view, too."""
    return is_view(node) or node.target in _COPIES


def is_view(node: fx.Node) -> bool:
    """Whether its value lies in the memory of what it is made of."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if target is aten._unsafe_view.default:  # its schema does not say so
        return True
    aliases = any(returned.alias_info is not None for returned in target._schema.returns)
    return aliases and not (target._schema.is_mutable or waits(node) or communicates(node))


def grouped(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Of each start and each wait what stays with it in this order, itself included. A node is in one group."""
    found: dict[fx.Node, list[fx.Node]] = {}
    taken: set[fx.Node] = set()
    for i, node in enumerate(order):
        if starts(node):
            before = (order[j] for j in range(i - 1, -1, -1))
            found[node] = _run(node, before, taken, _readers)[::-1]
        elif waits(node):
            after = (order[j] for j in range(i + 1, len(order)))
            found[node] = _run(node, after, taken, _made_of)
    return found


def _run(
    node: fx.Node, others: Iterable[fx.Node], taken: set[fx.Node], met: Callable[[fx.Node], list[fx.Node]]
) -> list[fx.Node]:
    """The node, with those of the others that are copies, as far as each only meets what is there already."""
    run, own = [node], {node}
    for other in others:
        near = met(other)
        if near and is_copy(other) and other not in taken and own.issuperset(near):
            run.append(other)
            own.add(other)
        elif tensors_of(other) and not is_view(other):
            break
    taken |= own
    return run


def _made_of(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op not in ("placeholder", "get_attr")]


def _readers(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.users if not only_holds(n)]


def only_holds(node: fx.Node) -> bool:
    """Whether the node is given an operand of one of weft's collectives only to keep it."""
    return getattr(node.target, "namespace", "") == "weft" and not communicates(node)


def mark_grouped(graph: fx.Graph) -> None:
    """Notes what stays together, for Inductor's scheduler. The order of the graph is final."""
    for node, nodes in grouped(body(graph)).items():
        for each in nodes:
            each.meta[MARK] = (waits(node), node.name)
