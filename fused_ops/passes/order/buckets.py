"""Puts small collectives of one class into buckets: one call that starts them, and the waits together.

A class is an operator, a group, a dtype and a reduction. torch's own buckets copy operands into one tensor, and what is
gathered out of it. These are coalesced collectives: each tensor lies where it would without, and nothing is copied.

The later collective is started earlier, with the light kernels that it needs, or where that cannot be, the earlier one
later, with the light kernels that use it. Either only within the peak memory that is allowed, and only of groups whose
ranks compare the order before each run.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import fx

from ....symm_mem import resolve_group
from ..graph.collectives import communicates, group_of, kind_of
from ..graph.nodes import c10d, is_val, val
from ..graph.rewrite import call
from ..memory.alias_sets import AliasSets, tensors_of
from ..memory.hazards import Hazards
from ..memory.live_bytes import LiveBytes, body, put_in_order
from .change import Bucket
from .least_memory import is_light
from .transports import Transfer, transfers

_COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}
_BACKENDS = ("nccl", "gloo", "weft", "fake")  # that take several tensors in one call
_TAKEN_ALONG = 64  # nodes, at most, that move with a start or a wait
_FAR = 500  # nodes, at most, past which they move: what is looked at grows with it


@dataclass
class _Open:
    """A bucket that may take more."""

    kind: tuple[Any, ...]
    size: int
    members: list[Transfer] = field(default_factory=list)

    @property
    def starts(self) -> list[fx.Node]:
        return [m.start for m in self.members]

    @property
    def waits(self) -> list[fx.Node]:
        return [m.waits[0] for m in self.members]


class _Packing:
    """The order as buckets are filled: what is in one stands next to each other, and so do its waits."""

    def __init__(self, graph: fx.Graph, size: int, memory: float, voted: Collection[str] | None) -> None:
        self.size, self.voted = size, voted
        self.given = body(graph)
        sets = AliasSets(graph)
        self.live = LiveBytes(sets.sets, self.given)
        self.hazards = Hazards(sets, self.given)
        self.bound = int(self.live.peak * (1 + memory))
        self.buckets: list[_Open] = []
        self.crossed: set[str] = set()

    def pack(self) -> None:
        last: dict[tuple[Any, ...], _Open] = {}
        for transfer in transfers(self.given):
            kind = _class_of(transfer, self.voted)
            size = max(transfer.given, transfer.made)
            if kind is None or not 0 < size < self.size:
                continue
            there = last.get(kind)
            if there is not None and there.size + size <= self.size and self._join(there, transfer):
                there.size += size
                there.members.append(transfer)
                continue
            last[kind] = _Open(kind, size, [transfer])
            self.buckets.append(last[kind])

    def why_invalid(self) -> str | None:
        """What is wrong with the order as it is now; None if it is right."""
        if (why := self.hazards.why_invalid(self.live.order)) is not None:
            return why
        for bucket in self.buckets:
            if max(map(self.live.at.__getitem__, bucket.starts)) > min(
                map(self.live.at.__getitem__, bucket.waits)
            ):
                return f"{bucket.starts[-1].name} is started after a wait of its bucket"
        peak = LiveBytes(self.live.sets, self.live.order).peak
        return None if peak <= self.bound else f"the peak would be {peak} bytes, {self.bound} are allowed"

    def _join(self, bucket: _Open, new: Transfer) -> bool:
        if self.live.at[new.start] - self.live.at[bucket.starts[-1]] > _FAR:
            return False
        return self._take(self._raised(bucket, new)) or self._take(self._sunk(bucket, new))

    def _raised(self, bucket: _Open, new: Transfer) -> tuple[int, list[fx.Node]] | None:
        """The order with ``new`` started right after the bucket, and waited for where that is."""
        at, order = self.live.at, self.live.order
        pending = [*bucket.waits, new.waits[0]]
        first = at[bucket.starts[-1]] + 1
        window = order[first : max(at[n] for n in (new.start, *pending)) + 1]
        needed = self._closure(reversed(window), [new.start], self._needs)
        if needed is None:
            return None
        own = set(needed)
        rest: list[fx.Node] = []
        begun = False
        for node in window:
            if node in pending and not begun:
                rest += pending
                begun = True
            elif node not in own and node not in pending:
                rest.append(node)
        return first, [*(n for n in window if n in own), *rest]

    def _sunk(self, bucket: _Open, new: Transfer) -> tuple[int, list[fx.Node]] | None:
        """The order with the bucket started right before ``new``, and waited for where that is."""
        at, order = self.live.at, self.live.order
        pending = [*bucket.waits, new.waits[0]]
        first = at[bucket.starts[0]]
        window = order[first : max(at[n] for n in pending) + 1]
        users = self._closure(window, bucket.starts, self._is_needed, also=bucket.waits)
        if users is None or new.start in users or new.waits[0] in users:
            return None
        moved = {*users, *pending}
        result: list[fx.Node] = []
        for node in window:
            if node is new.start:
                result += [*bucket.starts, node]
            elif node is new.waits[0]:
                result += [
                    *pending,
                    *(n for n in window if n in moved and n not in pending and n not in bucket.starts),
                ]
            elif node not in moved:
                result.append(node)
        return first, result

    def _closure(
        self, window: Iterable[fx.Node], nodes: list[fx.Node], meets: Any, *, also: Collection[fx.Node] = ()
    ) -> list[fx.Node] | None:
        """The nodes with all in the window that must move with them; None if that is more than light kernels."""
        found = [*nodes]
        for node in window:
            if node in found or not meets(node, found):
                continue
            if (not is_light(node, self.hazards) and node not in also) or len(found) >= _TAKEN_ALONG:
                return None
            found.append(node)
        return found

    def _needs(self, node: fx.Node, nodes: list[fx.Node]) -> bool:
        return any(node in self.hazards.before[n] for n in nodes)

    def _is_needed(self, node: fx.Node, nodes: list[fx.Node]) -> bool:
        return not self.hazards.before[node].isdisjoint(nodes)

    def _take(self, proposed: tuple[int, list[fx.Node]] | None) -> bool:
        """Takes an order of a part, if it is right and needs no more memory than is allowed."""
        if proposed is None:
            return False
        first, new = proposed
        old = self.live.order[first : first + len(new)]
        if (passed := self._passed(old, new)) is None:
            return False
        if max(after := self.live.rearranged(first, new), default=0) > self.bound:
            return False
        self.live.rearrange(first, new, after)
        self.crossed |= passed
        return True

    def _passed(self, old: Sequence[fx.Node], new: Sequence[fx.Node]) -> set[str] | None:
        """The groups whose collectives have passed each other; None where they must not, or other nodes must not."""
        there, seen = set(new), set()
        segments = [self.hazards.segment[n] for n in new]
        if len(old) != len(new) or there != set(old) or segments != sorted(segments):
            return None
        for node in new:
            if any(other in there and other not in seen for other in self.hazards.before[node]):
                return None
            seen.add(node)
        now = [n for n in new if communicates(n)]
        before = [n for n in old if communicates(n)]
        groups = {group_of(n) for i, (n, m) in enumerate(zip(before, now, strict=True)) if n is not m}
        if any(g is None or (self.voted is not None and g not in self.voted) for g in groups):
            return None
        return {g for g in groups if g is not None}


def fill_buckets(
    graph: fx.Graph, size: int, memory: float, voted: Collection[str] | None
) -> tuple[tuple[Bucket, ...], frozenset[str]]:
    """Puts the graph's small collectives into buckets.

    Args:
        size: bytes of a bucket. A collective that moves as much by itself stays alone.
        memory: how much the peak may grow, as a part of it.
        voted: groups whose ranks compare their graphs before each run; None for all. Others' collectives stay.

    Returns:
        the buckets, and the groups whose collectives are others than in the graph given, or in another order.
    """
    packing = _Packing(graph, size, memory, voted)
    packing.pack()
    full = [b for b in packing.buckets if len(b.members) > 1]
    if not full or packing.why_invalid() is not None:
        return (), frozenset()
    put_in_order(graph, packing.live.order)
    groups = {b.kind[1] for b in full} | packing.crossed
    return tuple(_merge(bucket) for bucket in full), frozenset(groups)


def _class_of(transfer: Transfer, voted: Collection[str] | None) -> tuple[Any, ...] | None:
    """What collectives of a bucket have in common; None of one that goes into none."""
    start = transfer.start
    if start.target not in _COALESCED or start.kwargs:
        return None
    if len(transfer.waits) != 1 or [*start.users] != transfer.waits:
        return None
    operand = start.args[0]
    if not is_val(operand) or (voted is not None and transfer.group not in voted):
        return None
    if transfer.group is None or not _coalesces(transfer.group):
        return None
    if len({t.device for t in (*tensors_of(operand), *tensors_of(start))}) != 1:
        return None
    return start.target, transfer.group, val(operand).dtype, val(operand).device, *start.args[1:-1]


def _coalesces(group: str) -> bool:
    try:
        backends = dist.get_backend_config(resolve_group(group))
    except ValueError:
        return False
    return all(pair.split(":")[-1] in _BACKENDS for pair in str(backends).split(","))


def _merge(bucket: _Open) -> Bucket:
    """One call in place of the starts, which stand next to each other."""
    last = bucket.starts[-1]
    operands = [n.args[0] for n in bucket.starts]
    one = call(last, _COALESCED[last.target], operands, *last.args[1:])  # type: ignore[index]
    gathers = "all_gather" in kind_of(last)
    for i, (start, wait) in enumerate(zip(bucket.starts, bucket.waits, strict=True)):
        # Next to the waits where these are early, and else to the start: either may then move by itself.
        part = call(bucket.waits[0] if gathers else last, operator.getitem, one, i)
        wait.replace_input_with(start, part)
    names = tuple(n.name for n in bucket.starts)
    for start in bucket.starts:
        start.graph.erase_node(start)
    return Bucket(one.name, names, bucket.size)
