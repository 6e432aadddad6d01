"""The order that needs the least memory: a collective whose results are larger than its operands is started just before
it is waited for, with what only it needs, and one whose results are smaller is waited for at once.

torch may have moved both: for inference it puts the gathers of all weights before everything else, and the waits
for scattered gradients after everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..graph.collectives import communicates, waits
from ..memory.hazards import Hazards
from .costs import counted_flops
from .transports import Transfer


def is_light(node: fx.Node, hazards: Hazards) -> bool:
    """Whether a node moves along with the collective that needs it, or that it needs: a cast, a copy, a view."""
    return not (communicates(node) or waits(node) or counted_flops(node) or hazards.segment[node] % 2)


def order_of_least_memory(
    order: Sequence[fx.Node], hazards: Hazards, found: Sequence[Transfer]
) -> list[fx.Node]:
    """That order. Collectives keep theirs."""
    at = {n: i for i, n in enumerate(order)}
    behind: dict[fx.Node, list[fx.Node]] = {n: [] for n in order}
    for node in order:
        for other in hazards.before[node]:
            behind[other].append(node)
    place = dict(at)  # before which position a node is put
    of_start = {t.start: t for t in found}
    groups: dict[int, list[list[fx.Node]]] = {}
    for transfer in found:
        if transfer.given <= transfer.made:
            continue
        behind_it = at[transfer.start] + 1
        for wait in transfer.waits:
            free = all(at[n] < behind_it for n in hazards.before[wait])
            if free and hazards.segment[wait] == hazards.segment[transfer.start] and at[wait] > behind_it:
                place[wait] = behind_it
                groups.setdefault(behind_it, []).append([wait])
    next_collective = len(order)
    for node in reversed(order):
        if not communicates(node):
            continue
        transfer_of = of_start.get(node)
        if transfer_of is not None and transfer_of.waits and transfer_of.given < transfer_of.made:
            own = _private(node, hazards, behind, place, at)
            ends = [place[n] for each in own for n in behind[each] if n not in own]
            target = min([next_collective, *ends])
            while hazards.segment[order[target - 1]] != hazards.segment[node]:
                target -= 1
            if target > at[node]:
                for each in own:
                    place[each] = target
                groups.setdefault(target, []).append(sorted(own, key=at.__getitem__))
        next_collective = place[node]
    new: list[fx.Node] = []
    for i, node in enumerate(order):
        for own_nodes in reversed(groups.get(i, [])):
            new += own_nodes
        if place[node] == i:
            new.append(node)
    for own_nodes in reversed(groups.get(len(order), [])):
        new += own_nodes
    return new


def _private(
    start: fx.Node,
    hazards: Hazards,
    behind: dict[fx.Node, list[fx.Node]],
    place: dict[fx.Node, int],
    at: dict[fx.Node, int],
) -> set[fx.Node]:
    """The start and the light nodes before it that nothing else needs."""
    own, pending = {start}, [start]
    while pending:
        for other in hazards.before[pending.pop()]:
            unmoved = place[other] == at[other] and hazards.segment[other] == hazards.segment[start]
            if other not in own and unmoved and is_light(other, hazards) and own.issuperset(behind[other]):
                own.add(other)
                pending.append(other)
    return own
