"""A tensor that is gathered several times, once for each product of it, is gathered once."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .match import FLAT, Collective, LeftAlone, aten, calls, check_no_mutation, closure

# What may stand between a gather and its products.
_BETWEEN = {
    *FLAT,
    operator.getitem,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.permute.default,
}


def repeats(gather: fx.Node) -> list[fx.Node]:
    """The later gathers of the same tensor over the same group, which have the same result."""
    x = gather.args[0]
    if not isinstance(x, fx.Node):
        return []
    found = [n for n in x.users if n.target is gather.target and n.args == gather.args and gather < n]
    return [n for n in found if _same_until(gather, n)]


def _same_until(gather: fx.Node, other: fx.Node) -> bool:
    try:
        check_no_mutation(gather, other)
    except LeftAlone:
        return False
    return True


def merge(into: Collective, others: list[Collective]) -> None:
    """Users of the others use ``into``; the others, and what they joined their shards with, are erased."""
    for other in others:
        other.wait.replace_all_uses_with(into.wait)
        other.node.replace_all_uses_with(into.node)
        for node in (other.wait, other.node):
            node.graph.erase_node(node)
    _merge_users(into.wait)


def _merge_users(wait: fx.Node) -> None:
    """Joins the shards once, where each of several gathers had its own nodes for it."""
    after = closure(wait, lambda n: (u for u in n.users if calls(u, *_BETWEEN)))
    seen: dict[Any, fx.Node] = {}
    for node in [n for n in wait.graph.nodes if n in after]:
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            node.graph.erase_node(node)
        else:
            seen[key] = node


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(value[k])) for k in sorted(value))
    # 1, 1.0 and True are equal.
    return type(value), value
