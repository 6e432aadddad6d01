"""all_gather, then scaled products of the gathered tensor: ``fused_all_gather_scaled_matmul``.

What is gathered is fp8 already, or it is quantised behind the gather. Where that is done row by row
(``row_by_row.py``), the same of the shard, gathered, is the same, and a byte a number is sent: quantise, gather,
product. Scales of the rows travel with them, whether they are computed of the gathered tensor or gathered by an
all-gather of their own. A scale of the whole is each rank's own, as in the graph.

What else uses the quantised tensor gets it from the op. Where something else uses what was gathered before it was
quantised, that must be gathered as it is, and nothing is fused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ....kernels.all_gather_matmul.configs import MOST_BS
from ....kernels.device.gemm.scaling import FP8, ScaledProducts, ScaleKind
from ...library import schema
from ..graph import rewrite
from ..graph.collectives import (
    Collective,
    LeftAlone,
    Size,
    aten,
    communicates,
    first_write,
    group_of,
    some,
    val,
    what,
)
from ..graph.gathered_tensor import Gathered
from ..graph.index_map import RANK, Digit, Digits, Dims, around_rank, numel, same_size
from ..graph.rewrite import call
from ..graph.views import View, view_step
from .row_by_row import RowByRow
from .scaled_mm import SCALED_MMS, ScaledMm


@dataclass(frozen=True)
class _Place:
    """Which dimensions the op's shard has, and along which of them it is gathered."""

    shard: Dims
    dim: int

    @classmethod
    def of(cls, dims: Dims, world: int) -> _Place:
        """
        Raises:
            LeftAlone: the op has none for that.
        """
        rows, columns = dims
        if (around := around_rank(rows, world)) is not None:
            before, after = around
            return cls((before, after, columns) if before else (after, columns), 1 if before else 0)
        before, after = around_rank(columns, world) or ((), ())
        if before:
            raise LeftAlone("it contracts the ranks, but not outermost")
        return cls((rows, after), 1)

    @property
    def contracted(self) -> bool:
        return self.dim == len(self.shard) - 1

    def lead(self, world: int) -> list[Size]:
        """The sizes of the gathered tensor's rows."""
        sizes = [numel(digits) for digits in self.shard[:-1]]
        if not self.contracted:
            sizes[self.dim] = world * sizes[self.dim]
        return sizes

    def joined(self, world: int) -> Dims:
        """The dimensions of the gathered tensor as the op gives it."""
        dims = list(self.shard)
        dims[self.dim] = (Digit(RANK, world), *dims[self.dim])
        return tuple(dims)


@dataclass
class AllGatherScaledMatmulPattern:
    """``uses`` are the products of one quantised tensor that one op computes, in the order of the graph."""

    collective: Collective
    rows: RowByRow
    tensor: Gathered  # all that is computed of what is gathered, up to the products
    place: _Place
    uses: list[ScaledMm]
    whole: fx.Node | None  # the view of the quantised tensor of which all is made that others use
    scales_of: Collective | None  # which gathers the scales
    at: fx.Node  # where the op will stand
    hoisted: set[fx.Node]  # computed before it, for the other operands

    op = schema.all_gather_scaled_matmul
    adds = ()

    @property
    def others(self) -> tuple[fx.Node, ...]:
        return () if self.scales_of is None else (self.scales_of.node,)

    @property
    def dim(self) -> int:
        return self.place.dim

    @property
    def last_dim(self) -> bool:
        return self.place.contracted

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        return () if self.whole is None else (self.whole,)

    @property
    def order(self) -> tuple[Dims, tuple[Size, ...]]:
        return self.place.joined(self.collective.world), tuple(val(self.collective.x).shape)

    @property
    def _quantises(self) -> bool:
        return val(self.collective.x).dtype not in FP8

    @property
    def decided(self) -> bool:
        """Whether it need not be weighed: run unfused, too, the op sends fewer bytes."""
        return self._quantises

    @property
    def form(self) -> str:
        count = len(self.uses)
        what_of = " of what is contracted" if self.last_dim else ""
        quantised = " → quantise" if self._quantises else ""
        return f"all_gather{what_of}{quantised} → {f'{count} scaled products' if count > 1 else 'scaled product'}"

    @property
    def detail(self) -> str:
        count = len(self.uses)
        parts = [f"{count} product{'s' if count > 1 else ''}", f"{self.uses[0].kind.value} scales"]
        parts += ["quantised before it is sent"] if self._quantises else []
        return ", ".join([*parts, "A returned"] if self.kept else parts)

    @property
    def scaled(self) -> ScaledProducts:
        """What ``profitability`` is told of the products."""
        first = self.uses[0]
        return first.products(first.out_dtype, travels=self.rows.dims(first.left_scale) is not None)

    @property
    def dtype(self) -> torch.dtype:
        return val(self.uses[0].left).dtype

    @property
    def m(self) -> Size:
        return val(self.uses[0].left).shape[0]

    @property
    def n(self) -> Size:
        return sum(use.width for use in self.uses)

    @property
    def k(self) -> Size:
        return val(self.uses[0].left).shape[1]

    @classmethod
    def from_collective(
        cls, c: Collective, groups: frozenset[str] | None, *, again: bool = False
    ) -> AllGatherScaledMatmulPattern | None:
        """None where no scaled product depends on what is gathered. For a gather of scales that of what they scale.

        Raises:
            LeftAlone: those that do are not exactly what the op computes.
        """
        graph = c.node.graph
        if not any(graph.find_nodes(op="call_function", target=target) for target in SCALED_MMS):
            return None
        if val(c.x).dim() == 0 or not (rows := RowByRow(c, groups)).products:
            return None
        found: list[tuple[ScaledMm, _Place]] = []
        reasons: dict[fx.Node, str] = {}
        for taken in rows.products:
            try:
                found.append((taken, _place(taken, rows, c)))
            except LeftAlone as e:
                reasons[taken.node] = f"{what(taken.node)}: {e}"
        if not found:
            numbers = [
                each for taken in rows.products for each in _gathers(taken.left, rows) if each is not c
            ]
            if numbers and not again:
                whole = cls.from_collective(numbers[0], groups, again=True)
                if whole is not None and c.node in whole.others:
                    return whole
            raise LeftAlone("; ".join(dict.fromkeys(reasons.values())))
        first, place = found[0]
        uses = [t for t, _ in found if t.left is first.left and t.left_scale is first.left_scale]
        if len(uses) > MOST_BS:
            raise LeftAlone(
                f"{len(uses)} scaled products take it, of which the op computes {MOST_BS} at once"
            )
        return cls._of_uses(c, rows, place, uses)

    @classmethod
    def _of_uses(
        cls, c: Collective, rows: RowByRow, place: _Place, uses: list[ScaledMm]
    ) -> AllGatherScaledMatmulPattern:
        first = uses[0]
        inside = rows.nodes([first.left, first.left_scale])
        views = _quantised(first.left, c.wait)
        others = [each for wait, each in rows.bases.items() if each is not c and wait in inside]
        if len(others) > 1:
            raise LeftAlone(f"its scales are gathered by {some([each.node for each in others])}")
        collectives = sorted((c, *others), key=lambda each: each.node)
        tensor = Gathered(collectives, {n: View(n, (), (), None) for n in inside}, [], {})
        kept = _other_users(tensor, uses, views)
        begins, last = collectives[0].node, uses[-1].node
        if (written := first_write(begins, last)) is not None:
            raise LeftAlone(f"{what(written)} writes to memory before {what(last)}")
        at = _before_others(collectives, min([first.node, *(u for users in kept.values() for u in users)]))
        needed = [*(n for use in uses for n in use.given), *rows.given([first.left, first.left_scale])]
        needed += [each.x for each in collectives]
        needed += [first.left_scale] if rows.dims(first.left_scale) is None else []
        hoisted = set[fx.Node]().union(*(tensor.needed_before(at, n, begun=True) for n in needed))
        scales_of = others[0] if others else None
        # Of several views the one of which the others are made.
        whole = max(kept, key=views.index, default=None)
        return cls(c, rows, tensor, place, uses, whole, scales_of, at, hoisted)

    def replace(self) -> None:
        """
        Raises:
            LeftAlone: a size is not there where it is needed, or the op takes no such operand. The graph is as it was.
        """
        c, at, place, first = self.collective, self.at, self.place, self.uses[0]
        inside = self.tensor.views
        with rewrite.undone_if_left():
            rewrite.hoist(self.hoisted, at)
            shard = self.rows.shard(first.left, at)
            shard = rewrite.reshape(shard, [numel(digits) for digits in place.shard], at, [c.x])
            of_each = {
                "biases": [use.bias for use in self.uses],
                "result_scales": [None] * len(self.uses),
                "out_dtypes": [use.out_dtype for use in self.uses],
                "use_fast_accum": [use.fast for use in self.uses],
            }
            Bs, scales = [use.right for use in self.uses], [use.right_scale for use in self.uses]
            fused = call(
                at,
                self.op,
                *(shard, Bs, self._scale(), scales, place.dim, c.group, *of_each.values()),
                return_A=self.whole is not None,
                group_size=c.world,
            )
            outs = call(at, operator.getitem, fused, 1)
            new = {}
            after = outs
            if self.whole is not None:
                A = call(at, operator.getitem, fused, 0)
                after = new[self.whole] = self._made_of(A, self.whole)
            for i, use in enumerate(self.uses):
                out = call(use.node, operator.getitem, outs, i)
                out = rewrite.reshape(out, val(use.node).shape, use.node, [shard])
                new[use.node] = rewrite.make_contiguous(out, use.node)
        self.tensor.read_sizes_from_shard()
        for old, node in new.items():
            old.replace_all_uses_with(node)
        collectives = [each.node for each in (c, self.scales_of) if each is not None]
        # What stays is moved behind the node that it is made of now.
        for node in rewrite.erase_unused([*(use.node for use in self.uses), *inside, *collectives]):
            if node < after:
                after.append(node)
                after = node

    def _scale(self) -> fx.Node:
        """A_scale, as the op takes it."""
        at, first, lead = self.at, self.uses[0], [numel(digits) for digits in self.place.shard[:-1]]
        scale = self.rows.shard(first.left_scale, at)
        if self.rows.dims(first.left_scale) is not None:
            return rewrite.reshape(scale, [*lead, val(scale).shape[-1]], at, [self.collective.x])
        if first.kind is ScaleKind.TENSOR:  # of no dimension: none could be taken for a row's
            return rewrite.reshape(scale, [], at)
        lead = self.place.lead(self.collective.world)
        return rewrite.reshape(scale, [*lead, 1], at, [self.collective.x])

    def _made_of(self, A: fx.Node, view: fx.Node) -> fx.Node:
        """A view of the quantised tensor, made of what the op returns."""
        c, dims = self.collective, self.rows.dims(view)
        assert dims is not None
        shape = val(view).shape
        new = rewrite.rearrange(A, self.place.joined(c.world), dims, shape, self.at, [c.x])
        if val(new).stride() == val(view).stride():
            return new
        return call(self.at, aten.clone.default, new, memory_format=torch.contiguous_format)


def _place(taken: ScaledMm, rows: RowByRow, c: Collective) -> _Place:
    taken.check()
    dims = rows.dims(taken.left)
    if dims is None:
        raise LeftAlone("what is gathered is no left operand of it")
    if any(rows.dims(n) is not None for n in taken.given):
        raise LeftAlone("its other operand depends on the gathered tensor, too")
    if _gathers(taken.left, rows) != [c]:
        raise LeftAlone("it gathers no numbers of its left operand, or not all of them")
    place = _Place.of(dims, c.world)
    of_scales = rows.dims(taken.left_scale)
    if of_scales is None:
        if taken.kind is not ScaleKind.TENSOR and (taken.kind is ScaleKind.BLOCKS or place.contracted):
            raise LeftAlone(f"its {taken.kind.value} scales are not gathered with it")
    elif (
        len(of_scales) != 2
        or place.contracted
        or not same_size(of_scales[0], dims[0])
        or _has_rank(of_scales[1])
    ):
        raise LeftAlone(f"{what(taken.left_scale)}, its scales, are those of other rows")
    return place


def _gathers(node: fx.Node, rows: RowByRow) -> list[Collective]:
    """Those of which a node is made, as far as that was asked for."""
    nodes = rows.nodes([node])
    return [each for wait, each in rows.bases.items() if wait in nodes]


def _has_rank(digits: Digits) -> bool:
    return any(digit.axis == RANK for digit in digits)


def _quantised(left: fx.Node, wait: fx.Node) -> list[fx.Node]:
    """The operand, and what it is a view of, up to where it is quantised or gathered."""
    found = [left]
    while found[-1] is not wait and (step := view_step(found[-1])) is not None:
        if val(step.source).dtype != val(left).dtype:
            break
        found.append(step.source)
    return found


def _other_users(
    tensor: Gathered, uses: list[ScaledMm], views: list[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """What else uses views of the quantised tensor, which the op then returns.

    Raises:
        LeftAlone: something uses what it is made of, or its scales.
    """
    taken = tensor.views.keys() | {use.node for use in uses}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in sorted(tensor.views):
        users = [u for u in node.users if u not in taken and tensor.size_of_shard(u) is None]
        if not users:
            continue
        if node not in views:
            raise LeftAlone(
                f"{what(node)}, of which its operand or its scales are made, is also used by {some(users)}"
            )
        found[node] = users
    for c in tensor.collectives:
        if pending := [u for u in c.node.users if u is not c.wait]:
            raise LeftAlone(f"what {what(c.node)} has pending is also used by {some(pending)}")
    return found


def _before_others(collectives: list[Collective], first: fx.Node) -> fx.Node:
    """Where the op can stand: before ``first`` and the next collective of the group, whose order so stays."""
    own, group = {c.node for c in collectives}, collectives[0].group
    node = collectives[0].node.next
    while node is not first and (node in own or not communicates(node) or group_of(node) != group):
        node = node.next
    return node
