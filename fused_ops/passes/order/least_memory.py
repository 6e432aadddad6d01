"""The order that needs the least memory: a collective whose results are larger than its operands is started just before
its first user, with what only it needs and what only cuts or casts its results, and one whose results are smaller is
waited for at once.

torch may have moved both: for inference it puts the gathers of all weights before everything else, and where their
results are split the waits, too; and the waits for scattered gradients after everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..graph.collectives import communicates, waits
from ..memory.hazards import Hazards
from .costs import counted_flops
from .grouped import grouped, is_copy
from .transports import Transfer


def is_light(node: fx.Node, hazards: Hazards) -> bool:
    """Whether a node moves along with the collective that needs it, or that it needs: a cast, a copy, a view."""
    return not (communicates(node) or waits(node) or counted_flops(node) or hazards.segment[node] % 2)


def order_of_least_memory(
    order: Sequence[fx.Node], hazards: Hazards, found: Sequence[Transfer]
) -> list[fx.Node]:
    """That order. Collectives keep theirs."""
    at = {n: i for i, n in enumerate(order)}
    users: dict[fx.Node, list[fx.Node]] = {n: [] for n in order}
    for node in order:
        for other in hazards.before[node]:
            users[other].append(node)
    place = dict(at)  # before which position a node is put
    for transfer in found:
        if transfer.given > transfer.made:
            _wait_at_once(transfer, hazards, at, place)
    growing = [t for t in found if t.waits and t.given < t.made]
    sinking = _with_results(order, hazards, growing)
    groups, next_collective = grouped(order), len(order)
    for node in reversed(order):
        after = users[node]
        needed = is_light(node, hazards) and sinking.issuperset(after) and not all(map(waits, after))
        if after and (node in sinking or needed):
            target = min(place[n] for n in after)
            if communicates(node):
                target = min(target, next_collective)
            while hazards.segment[order[target - 1]] != hazards.segment[node]:
                target -= 1
            if target > at[node] + 1:
                place[node] = target
            sinking.add(node)
        if communicates(node):
            # Nothing is put between it and its copy-in.
            stays = place[node] == at[node]
            next_collective = at[groups.get(node, [node])[0]] if stays else place[node]
    moved: dict[int, list[fx.Node]] = {}
    for node in order:
        if place[node] != at[node]:
            moved.setdefault(place[node], []).append(node)
    new: list[fx.Node] = []
    for i, node in enumerate(order):
        new += moved.get(i, ())
        if place[node] == i:
            new.append(node)
    return [*new, *moved.get(len(order), ())]


def _wait_at_once(
    transfer: Transfer, hazards: Hazards, at: dict[fx.Node, int], place: dict[fx.Node, int]
) -> None:
    after = at[transfer.start] + 1
    for wait in transfer.waits:
        free = all(at[n] < after for n in hazards.before[wait])
        if free and hazards.segment[wait] == hazards.segment[transfer.start] and at[wait] > after:
            place[wait] = after


def _with_results(order: Sequence[fx.Node], hazards: Hazards, growing: Sequence[Transfer]) -> set[fx.Node]:
    """The collectives, their waits, and what only cuts, copies or casts these."""
    found = {n for t in growing for n in (t.start, *t.waits)}
    for node in order:
        before = hazards.before[node]
        if before and found.issuperset(before) and is_light(node, hazards) and is_copy(node):
            found.add(node)
    return found
