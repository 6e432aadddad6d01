"""Gathered activations that the backward gathers again, instead of the forward keeping them.

The gradient of a weight is a product that contracts the rows of all ranks, of which the forward has gathered one
operand. Kept for that, it takes as much memory as all shards. Here the all-gather is marked, before AOTAutograd's
partitioner runs, as to be computed again: the forward keeps its own shard, and the backward graph has an all-gather of
its own, which the pass fuses with the products of the gradient.

Which are marked is a function of the graph, the group's size and the settings. A rank whose graph differs is found by
the vote, as always.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from ..dispatch import profitability
from .agreement.fallback.run import is_fallback_graph
from .cache_key import pass_key
from .graph.collectives import Collective
from .graph.gathered_tensor import Gathered
from .graph.index_map import numel
from .graph.nodes import LeftAlone, after_tangents, c10d, hint, val
from .loss_parallel.joint import JointLosses
from .pass_sequence import in_sequence, passes_of
from .patterns.all_gather_matmul import REGATHERED, contracting
from .sequence_parallel.joint import JointRows
from .settings import PassSettings

#: The option of Inductor for passes on the graph of forward and backward.
JOINT_SLOT = "joint_custom_post_pass"
_gather = c10d.all_gather_into_tensor.default


class Regather(PassSettings, CustomGraphPass):
    """Marks the all-gathers of a joint graph that the backward shall repeat. Made by ``FusionPass(regather=True)``."""

    def uuid(self) -> Any:
        return f"{pass_key(self)} joint"

    def __call__(self, graph: fx.Graph) -> None:
        if is_fallback_graph():
            return
        backward = after_tangents(graph)
        if not backward:
            return
        for node in graph.find_nodes(op="call_function", target=_gather):
            if node in backward or node.meta.get("recompute") is not None:
                continue
            try:
                again = self._again(node, backward)
            except LeftAlone:
                continue
            for each in again:
                each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta[REGATHERED] = True

    def _again(self, node: fx.Node, backward: set[fx.Node]) -> set[fx.Node]:
        """What is computed again: an all-gather and the views of it that the backward multiplies.

        Raises:
            LeftAlone: something else than such products uses it there, or it is kept anyway, or that is not profitable.
        """
        c = Collective.from_node(node, self.groups)
        tensor = Gathered.by(c, self.groups)
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
        if self.fuse == "auto" and (reason := profitability.why_not_profitable(candidate)) is not None:
            raise LeftAlone(reason)
        again = {c.node, c.wait}
        for product in products:
            for operand in product.all_input_nodes:
                again |= tensor.made_of(operand)
        return again


def joint_options(settings: PassSettings, others: Any = None) -> dict[str, Any]:
    """Inductor's option for what ``regather``, ``sequence_parallel`` and ``loss_parallel`` ask for, after ``others``,
    to which it is set; empty without these."""
    passes: list[Any] = [JointLosses(**settings)] if settings.loss_parallel else []
    passes += [JointRows(**settings)] if settings.sequence_parallel else []
    passes += [Regather(**settings)] if settings.regather else []
    return {JOINT_SLOT: in_sequence([*passes_of(others), *passes])} if passes else {}
