"""Gathered activations that the backward gathers again, instead of the forward keeping them.

The gradient of a weight is a product that contracts the rows of all ranks, of which the forward has gathered one
operand. Kept for that, it takes as much memory as all shards. Here the all-gather is marked, before AOTAutograd's
partitioner runs, as to be computed again: the forward keeps its own shard, and the backward graph has an all-gather of
its own, which the pass fuses with the products of the gradient.

Which are marked is a function of the graph, the group's size and the settings. A rank whose graph differs is found by
the vote, as always.
"""

from __future__ import annotations

from contextlib import suppress

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..dispatch import profitability
from .graph.collectives import Collective
from .graph.gathered_tensor import Gathered
from .graph.index_map import numel
from .graph.nodes import LeftAlone, after_tangents, c10d, val
from .graph.sizes import hint
from .patterns.all_gather_matmul import REGATHERED, contracting
from .settings import PassSettings

_gather = c10d.all_gather_into_tensor.default


def mark_gathered_again(graph: fx.Graph, settings: PassSettings) -> None:
    """Marks the all-gathers of a joint graph that the backward shall repeat."""
    backward = after_tangents(graph)
    if not backward:
        return
    for node in graph.find_nodes(op="call_function", target=_gather):
        if node in backward or node.meta.get("recompute") is not None:
            continue
        with suppress(LeftAlone):
            for each in _gathered_again(node, backward, settings):
                each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta[REGATHERED] = True


def _gathered_again(node: fx.Node, backward: set[fx.Node], settings: PassSettings) -> set[fx.Node]:
    """What is computed again: an all-gather and the views of it that the backward multiplies. LeftAlone: something else
    than such products uses it there, or it is kept anyway, or that is not profitable."""
    c = Collective.from_node(node, settings.groups)
    tensor = Gathered.by(c)
    users = tensor.outside()
    if any(user.op == "output" for user in users):
        raise LeftAlone("the graph returns it")
    products = [user for user in users if user in backward]
    if len(tensor.collectives) > 1 or not products or len(products) == len(users):
        raise LeftAlone("it is no all-gather of the forward that the backward uses")
    uses = contracting(tensor, products)
    first = uses[0]
    columns = sum(use.width for use in uses)
    m, k, n = (hint(size) for size in (numel(first.rows), numel(first.columns), columns))
    candidate = profitability.FusionCandidate(
        *("all_gather_matmul", m, n, k, c.world, val(first.product.node).dtype, val(c.x).device.type),
        last_dim=True,
    )
    if settings.fuse == "auto" and (reason := profitability.why_not_profitable(candidate)) is not None:
        raise LeftAlone(reason)
    operands = (operand for product in products for operand in product.all_input_nodes)
    return {c.node, c.wait}.union(*map(tensor.made_of, operands))
