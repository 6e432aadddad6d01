"""A gathered tensor in its graph: what is made of it, who uses it, and what of it must stay."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import fx

from .collectives import Collective, communicates, group_of, waits
from .effects import first_write, is_random
from .index_map import Digits, Dims, by_rank, flat_dims, gathered_dims, part_of_rank, same_dims, same_size
from .nodes import LeftAlone, aten, between, c10d, calls, memory, val, what
from .rewrite import call, erase_unused, put_in_place
from .scaling import Change
from .sizes import is_contiguous, known
from .views import View, views

# Nodes that are computed before a gather instead of after it, for one operand: a weight that is cast and transposed.
_MOST_MOVED = 64


@dataclass(frozen=True)
class GatherLayout:
    """The shard that an op gathers along ``dim``: which dimensions it has, and how it is cast and multiplied."""

    shard: Dims
    dim: int
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, rows: Digits, columns: Digits, world: int, changes: tuple[Change, ...] = ()) -> GatherLayout:
        """LeftAlone: the op has none for that."""
        if (part := part_of_rank(rows, columns, world)) is None:
            raise LeftAlone("the gathered dimension is contracted, but is not the outermost one")
        return cls(*part, changes)

    @property
    def contracted(self) -> bool:
        return self.dim == len(self.shard) - 1

    def same(self, other: GatherLayout) -> bool:
        alike = (self.dim, self.changes) == (other.dim, other.changes)
        return alike and same_dims(self.shard, other.shard)

    def joined(self, world: int) -> Dims:
        """The dimensions of the gathered tensor as the op gives it."""
        return by_rank(self.shard, world, self.dim)


@dataclass
class Gathered:
    """``collectives`` gather the same; ``views`` hold what they gathered, whatever its order, dtype and factor."""

    collectives: list[Collective]
    views: dict[fx.Node, View]
    reasons: list[str]  # why what joins its parts is none of them
    cut: dict[fx.Node, fx.Node]  # parts of views that other views join, and what they are cut from

    @classmethod
    def by(cls, c: Collective) -> Gathered:
        """LeftAlone: the input is a number."""
        if val(c.x).dim() == 0:
            raise LeftAlone("its input is a number")
        result = cls([c, *_repeats(c)], {}, [], {})
        for each in result.collectives:
            found, reasons = views(each.wait, gathered_dims(val(c.x).shape, c.world))
            result.views |= found
            result.reasons += reasons
        for view in result.views.values():
            if view.step is not None:
                result.cut |= dict.fromkeys(view.step.between, view.step.source)
        return result

    def outside(self) -> list[fx.Node]:
        """The users, in the order of the graph, that are no views."""
        inside = self.views.keys() | self.cut.keys()
        found = {u for n in inside for u in n.users if u not in inside and not self.size_of_shard(u)}
        return sorted(found)

    def before_others(self) -> fx.Node:
        """Where the fused op can stand: before all users and the next collective of the group, whose order so stays."""
        c, own, first = self.collectives[0], self._gathers(), self.outside()[0]
        others = (n for n in between(c.node, first) if n not in own and communicates(n))
        return next((n for n in others if group_of(n) == c.group), first)

    def made_of(self, node: fx.Node) -> set[fx.Node]:
        """A view and all that it is made of, down to the gathered tensor; nothing for another node."""
        if node not in self.views:
            return set()
        steps = self.views[node].steps(self.views)
        return {node}.union(*((step.source, *step.between) for step in steps))

    def _gathers(self) -> set[fx.Node]:
        return {c.node for c in self.collectives}

    def needed_before(self, at: fx.Node, operand: fx.Node, *, begun: bool = False) -> set[fx.Node]:
        """The nodes that must be moved to before ``at`` for an operand to be there. LeftAlone: one of them cannot be.
        With ``begun`` what has begun before may be waited for there, such as the maximum of a weight that is cast."""
        own = self.views.keys() | self.cut.keys() | self._gathers()
        needed: set[fx.Node] = set()
        pending = [operand]
        while pending:
            node = pending.pop()
            if node in own:
                raise LeftAlone(f"{what(operand)}, the other operand, depends on the gathered tensor, too")
            if node < at or node in needed:
                continue
            early = begun and calls(node, c10d.wait_tensor.default) and node.args[0] < at  # type: ignore[operator]
            if communicates(node) or (waits(node) and not early) or is_random(node):
                raise LeftAlone(f"{what(operand)}, the other operand, needs {what(node)}, which comes later")
            if len(needed) == _MOST_MOVED:
                raise LeftAlone(f"{what(operand)}, the other operand, needs too much that comes later")
            needed.add(node)
            pending += node.all_input_nodes
        return needed

    def kept(
        self, products: Mapping[fx.Node, fx.Node | None], changes: tuple[Change, ...], joined: Dims
    ) -> dict[fx.Node, View]:
        """The views from which everything is made that others than the ``products`` use.

        Args:
            products: that use the gathered tensor as an operand, and what they add.
            changes, joined: of the gathered tensor that the op returns.

        Raises:
            LeftAlone: one cannot be made from what the op returns.
        """
        used: dict[fx.Node, fx.Node] = {}
        for node in (*self.views, *self.cut):
            for user in node.users:
                if user in self.views or user in self.cut or self.size_of_shard(user):
                    continue
                if user not in products or products[user] is node:
                    used.setdefault(self.cut.get(node, node), user)
        result = {}
        for node, user in used.items():
            view = self._ancestor(node, changes, joined)
            if view is None:
                write = first_write(self.collectives[0].node, max(node, self.collectives[0].wait))
                before = "before it is cast or multiplied"
                when = before if write is None else f"after {what(write)} wrote to memory"
                raise LeftAlone(f"{what(user)} uses the gathered tensor {when}")
            result[view.node] = view
        return result

    def _ancestor(self, node: fx.Node, changes: tuple[Change, ...], joined: Dims) -> View | None:
        """The view that is the easiest to make of those that a view is made of, itself included."""
        best: tuple[bool, View] | None = None
        view: View | None = self.views[node]
        while view is not None:
            if view.changes == changes and is_contiguous(val(view.node)) and self._unwritten(view):
                # In the order in which the op gives it, and there of several the first made, from which the others
                # follow. In another order each is a copy: what others hold in other memory would be one more.
                in_order = same_size(flat_dims(view.dims), flat_dims(joined))
                if best is None or in_order or (not best[0] and memory(view.node) == memory(best[1].node)):
                    best = in_order, view
            view = self.views[view.step.source] if view.step is not None else None
        return best and best[1]

    def _unwritten(self, view: View) -> bool:
        """Whether the view has what was gathered, or what has since been written to the gathered tensor itself: a copy
        that was made after something was written may have neither."""
        while view.step is not None and memory(view.step.source) == memory(view.node):
            view = self.views[view.step.source]
        return view.step is None or first_write(self.collectives[0].node, view.node) is None

    def size_of_shard(self, user: fx.Node) -> tuple[int, int] | None:
        """For a node that reads a size of a view: the dimension of the shard and the factor that give it, too."""
        if not calls(user, aten.sym_size.int):
            return None
        size = user.meta.get("val")
        for dim, own in enumerate(val(self.collectives[0].x).shape):
            if not (isinstance(own, torch.SymInt) and isinstance(size, torch.SymInt)):
                continue
            hints = own.node.has_hint() and size.node.has_hint() and own.node.hint
            factor = size.node.hint // own.node.hint if hints else 1
            if known(own * factor == size):
                return dim, factor
        return None

    def put_in_place(self, new: Mapping[fx.Node, fx.Node], after: fx.Node, uses: Iterable[fx.Node]) -> None:
        """Has what uses the old nodes use the new ones, and erases what is not used any more, with the ``uses``; what
        stays is moved after what it is made of now. Sizes are read from the input: they are no reason to return it."""
        x = self.collectives[0].x
        for user in dict.fromkeys(u for n in (*self.views, *self.cut) for u in n.users):
            if (found := self.size_of_shard(user)) is not None:
                size = call(user, aten.sym_size.int, x, found[0])
                if found[1] != 1:
                    size = call(user, operator.mul, found[1], size)
                user.replace_all_uses_with(size)
                user.graph.erase_node(user)
        put_in_place(new)
        for node in erase_unused([*self._gathers(), *self.views, *self.cut, *uses]):
            if node < after:
                after.append(node)
                after = node


def _repeats(c: Collective) -> list[Collective]:
    """The later gathers of the same tensor over the same group, which have the same result."""
    nodes = sorted(n for n in c.x.users if n.target is c.node.target and n.args == c.node.args and c.node < n)
    found = []
    before = c.node
    for node in nodes:
        if first_write(before, node) is not None:
            break
        before = node
        with suppress(LeftAlone):
            found.append(Collective.from_node(node))
    return found
