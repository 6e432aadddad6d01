"""No more at once than copy engines carry.

torch starts the gathers of all weights of an inference graph before anything else. Copy engines have
``NUM_BUFFERS`` for each kind, and the memory of all weights at once is what a program gathers them one by one for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ....symm_mem.layout import NUM_BUFFERS
from ...dispatch import profitability
from ..graph.collectives import c10d, val
from ..memory.alias_sets import AliasSets
from ..memory.hazards import Hazards
from ..memory.live_bytes import body, put_in_order
from .least_memory import order_of_least_memory
from .transports import NETWORK, Transfer, transfers

_KINDS = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)


def start_when_needed(graph: fx.Graph) -> bool:
    """Puts each start just before its wait, where copy engines could otherwise not carry all that is large enough.

    Returns:
        whether the order has changed. Collectives keep theirs.
    """
    order = body(graph)
    found = transfers(order)
    if not any(_too_many(order, [t for t in found if t.start.target is kind]) for kind in _KINDS):
        return False
    put_in_order(graph, order_of_least_memory(order, Hazards(AliasSets(graph), order), found))
    return True


def _too_many(order: Sequence[fx.Node], found: Sequence[Transfer]) -> bool:
    at = {node: i for i, node in enumerate(order)}
    lives = [(at[t.start], at[t.waits[0]]) for t in found if len(t.waits) == 1 and _is_large(t)]
    return any(sum(begin <= start < end for begin, end in lives) > NUM_BUFFERS for start, _ in lives)


def _is_large(transfer: Transfer) -> bool:
    """Whether copy engines would carry it."""
    (given,) = transfer.start.all_input_nodes
    x = val(given)
    if transfer.transport == NETWORK or not isinstance(x.numel(), int):
        return False
    part = min(transfer.given, transfer.made)
    return profitability.why_not_async(part, x.device.type) is None
