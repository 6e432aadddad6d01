"""Regions: all-reduces whose results meet, and all that is computed of these row by row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from ..graph.collectives import Collective
from ..graph.disjoint_sets import DisjointSets
from ..graph.effects import writes
from ..graph.nodes import LeftAlone, aten, calls, is_val, memory, val, what
from ..graph.row_wise import REDUCTIONS, RowLayout, is_pointwise, lead_of_step, sums_rows
from ..graph.sizes import known, nbytes, same_shape
from ..graph.split_cat import cut_of


@dataclass
class Region:
    """``leads`` has the nodes that are computed of a rank's own rows, in the order of the graph.

    What else uses them gets all rows of those in ``gathered``, which are gathered; but for ``chunks``, which are a
    rank's own rows in the graph, too, ``sums`` of all rows, and the ``sizes`` of an input of a collective, which serve
    the users in ``served``. ``unlike`` says where it ends as ranks may not have an operand alike; "" if nowhere.
    """

    layout: RowLayout
    collectives: list[Collective]
    leads: dict[fx.Node, int]
    chunks: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sizes: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    served: set[fx.Node] = field(default_factory=set)
    gathered: list[fx.Node] = field(default_factory=list)
    unlike: str = ""

    @property
    def norms(self) -> int:
        """How many reductions along rows it has."""
        return sum(calls(node, *REDUCTIONS) for node in self.leads)

    def why_not(self) -> str | None:
        """Why it should stay as it is, whatever that takes; None if it need not."""
        if not self.norms and not self.chunks:
            of_them = "and no chunk of them"
            if not self.layout.own_chunks:
                of_them = "and no chunk of them is taken where ranks do not compare their graphs"
            return f"no norm of its rows follows it, {of_them}{self.unlike}"
        places = {memory(node): node for node in self.leads if is_val(node)}
        first, *_ = self.leads
        for node in filter(writes, first.graph.nodes):
            for written in filter(is_val, node.all_input_nodes):
                if (place := places.get(memory(written))) is not None:
                    return f"{what(node)} writes to memory that may be that of {what(place)}"
        return None

    def all_rows(self, node: fx.Node) -> list[fx.Node]:
        """The users of a node that need all rows."""
        return [u for u in node.users if u not in self.leads and u not in self.served]

    def settle(self) -> None:
        """Finds out what uses the nodes, and gathers no more than is needed."""
        for node in self.leads:
            for user in node.users:
                if user in self.leads:
                    continue
                if (own := _own_chunk(user, node, self)) is not None:
                    self.chunks[own] = node
                elif sums_rows(user, self.leads):
                    self.sums[user] = node
                elif (size := self._size(user)) is not None:
                    self.sizes[user] = size
                else:
                    continue
                self.served.add(user)
        self._find_gathered()
        while leaves := self._needless():
            for node in leaves:
                del self.leads[node]
            self._find_gathered()

    def _find_gathered(self) -> None:
        self.gathered = [node for node in self.leads if self.all_rows(node)]

    def _needless(self) -> list[fx.Node]:
        """Nodes that are better computed of all rows, as these are gathered anyway or are fewer bytes."""
        kept = {*(c.wait for c in self.collectives), *self.chunks.values(), *self.sums.values()}
        there, left = set(self.gathered), dict(self.leads)
        for source in filter(is_val, reversed(self.leads)):
            leaves = [
                u
                for u in source.users
                if u in there and u not in kept and is_val(u)
                if not any(user in left for user in u.users)
                and all(n is source or n not in left or n in there for n in u.all_input_nodes)
            ]
            if leaves and (source in there or sum(map(_bytes, leaves)) > _bytes(source)):
                there.add(source)
                for leaf in leaves:
                    there.remove(leaf)
                    del left[leaf]
        return [node for node in self.leads if node not in left]

    def _size(self, user: fx.Node) -> tuple[fx.Node, int] | None:
        if not calls(user, aten.sym_size.int):
            return None
        size = user.meta.get("val")
        for c in self.collectives:
            for dim, other in enumerate(val(c.x).shape):
                if c.x < user and known(other == size):
                    return c.x, dim
        return None


def regions(
    graph: fx.Graph, candidates: list[tuple[Collective, RowLayout]], same: Collection[fx.Node]
) -> list[Region]:
    """The regions of these all-reduces, each of one layout."""
    leads: dict[fx.Node, int] = {}
    joined = DisjointSets[fx.Node]()
    layouts = {c.wait: layout for c, layout in candidates}
    unlike: dict[fx.Node, str] = {}
    of: dict[fx.Node, fx.Node] = {}  # a node's region, by one of its all-reduces
    for node in graph.nodes:
        if node in layouts:
            leads[node], of[node] = val(node).dim() - 1, node
            continue
        inside = [n for n in node.all_input_nodes if n in leads]
        if not inside:
            continue
        layout = layouts[of[inside[0]]]
        if any(layouts[of[n]] is not layout for n in inside):
            continue
        if (lead := lead_of_step(node, leads, layout, same)) is not None:
            leads[node] = lead
            for n in inside:
                joined.join(of[n], of[inside[0]])
            of[node] = of[inside[0]]
        elif is_pointwise(node) and (
            others := [n for n in filter(is_val, node.all_input_nodes) if n not in leads and n not in same]
        ):
            unlike[of[inside[0]]] = f"; ranks may not have {what(others[0])} alike, which {what(node)} takes"
    found: dict[fx.Node, Region] = {}
    for c, layout in candidates:
        found.setdefault(joined.root(c.wait), Region(layout, [], {})).collectives.append(c)
    for node, lead in leads.items():
        found[joined.root(of[node])].leads[node] = lead
    for node, text in unlike.items():
        found[joined.root(of[node])].unlike = text
    for region in found.values():
        region.settle()
    return [*found.values()]


def _own_chunk(user: fx.Node, node: fx.Node, region: Region) -> fx.Node | None:
    """The rank's own rows of a node, as the graph takes them by this user of it; None if it does not."""
    layout, lead = region.layout, region.leads[node]
    if not layout.own_chunks or not is_val(node):
        return None
    parts = [part for part in user.users if part.users] if calls(user, aten.split.Tensor) else [user]
    cut = cut_of(parts[0]) if len(parts) == 1 else None
    if cut is None or cut.source is not node or cut.dropped:
        return None
    shape, dim = val(node).shape, cut.dim
    flat = len(layout.lead) == 1
    if dim >= lead or not (
        all(known(size == 1) for size in shape[:dim])
        if flat
        else dim == layout.dim and same_shape(shape[:lead], layout.lead)
    ):
        return None
    size = shape[dim]
    if not isinstance(size, int) or size % layout.world:
        return None
    part = size // layout.world
    mine = known(cut.start == layout.rank * part) and known(cut.stop == (layout.rank + 1) * part)
    return parts[0] if mine else None


def _bytes(node: fx.Node) -> int:
    try:
        return nbytes(val(node))
    except LeftAlone:
        return 0
