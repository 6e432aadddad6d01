"""all_gather, then scaled products of the gathered tensor: ``fused_all_gather_scaled_matmul``.

What is gathered is fp8 already, or it is quantised after the gather. Where that is done row by row
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
from ....kernels.device.gemm.scaling import FP8, ScaleKind
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import first_write
from ..graph.gathered_tensor import Gathered, GatherLayout
from ..graph.index_map import RANK, numel, same_size
from ..graph.nodes import LeftAlone, aten, some, val, what
from ..graph.rewrite import call, hoist, make_contiguous, rearrange, reshape, undone_if_left
from ..graph.views import View, steps_back
from ..patterns.pattern import Pattern
from .row_by_row import RowByRow
from .scaled_mm import SCALED_MMS, ScaledMm


def match_all_gather_scaled_matmul(c: Collective, *, again: bool = False) -> Pattern | None:
    """None where no scaled product depends on what is gathered. For a gather of scales that of what they scale.
    LeftAlone: those that do are not exactly what the op computes."""
    graph = c.node.graph
    if not any(graph.find_nodes(op="call_function", target=target) for target in SCALED_MMS):
        return None
    if val(c.x).dim() == 0 or not (rows := RowByRow(c)).products:
        return None
    found: list[tuple[ScaledMm, GatherLayout]] = []
    reasons: dict[fx.Node, str] = {}
    for taken in rows.products:
        try:
            found.append((taken, _layout(taken, rows, c)))
        except LeftAlone as e:
            reasons[taken.node] = f"{what(taken.node)}: {e}"
    if not found:
        numbers = [each for taken in rows.products for each in _gathers(taken.left, rows) if each is not c]
        if numbers and not again:
            whole = match_all_gather_scaled_matmul(numbers[0], again=True)
            if whole is not None and c.node in whole.others:
                return whole
        raise LeftAlone("; ".join(dict.fromkeys(reasons.values())))
    first, layout = found[0]
    uses = [t for t, _ in found if t.left is first.left and t.left_scale is first.left_scale]
    if len(uses) > MOST_BS:
        raise LeftAlone(f"{len(uses)} scaled products take it, of which the op computes {MOST_BS} at once")
    return _Replacement.of(c, rows, layout, uses).pattern()


@dataclass
class _Replacement:
    """``uses`` are the products of one quantised tensor that one op computes, in the order of the graph."""

    collective: Collective
    rows: RowByRow
    tensor: Gathered  # all that is computed of what is gathered, and maybe of scales, up to the products
    layout: GatherLayout
    uses: list[ScaledMm]
    whole: fx.Node | None  # the view of the quantised tensor of which all is made that others use
    at: fx.Node  # where the op will stand
    hoisted: set[fx.Node]  # computed before it, for the other operands

    @classmethod
    def of(cls, c: Collective, rows: RowByRow, layout: GatherLayout, uses: list[ScaledMm]) -> _Replacement:
        """LeftAlone: something else needs what the op does not return, or comes between."""
        first = uses[0]
        inside = rows.nodes([first.left, first.left_scale])
        views = _quantised(first.left, c.wait)
        others = [each for wait, each in rows.bases.items() if each is not c and wait in inside]
        if len(others) > 1:
            raise LeftAlone(f"its scales are gathered by {some([each.node for each in others])}")
        collectives = sorted((c, *others), key=lambda each: each.node)
        tensor = Gathered(collectives, {n: View(n, (), (), None) for n in inside}, [], {})
        kept = _used_by_others(tensor, uses, views)
        begins, last = collectives[0].node, uses[-1].node
        if (written := first_write(begins, last)) is not None:
            raise LeftAlone(f"{what(written)} writes to memory before {what(last)}")
        at = tensor.before_others()
        needed = [*(n for use in uses for n in use.given), *rows.given([first.left, first.left_scale])]
        needed += [each.x for each in collectives]
        needed += [first.left_scale] if rows.dims(first.left_scale) is None else []
        hoisted = set[fx.Node]().union(*(tensor.needed_before(at, n, begun=True) for n in needed))
        # Of several views the one of which the others are made.
        whole = max(kept, key=views.index, default=None)
        return cls(c, rows, tensor, layout, uses, whole, at, hoisted)

    def pattern(self) -> Pattern:
        c, first, layout, count = self.collective, self.uses[0], self.layout, len(self.uses)
        quantises, returned = val(c.x).dtype not in FP8, self.whole is not None
        of_what, quantised = " of what is contracted" * layout.contracted, " → quantise" * quantises
        products = f"{count} scaled products" if count > 1 else "scaled product"
        words = [f"{count} product{'s' * (count > 1)}", f"{first.kind.value} scales"]
        words += ["quantised before it is sent"] * quantises + ["A returned"] * returned
        left = val(first.left)
        return Pattern(
            collective=c,
            op=schema.all_gather_scaled_matmul,
            form=f"all_gather{of_what}{quantised} → {products}",
            detail=", ".join(words),
            sizes=(left.shape[0], sum(use.width for use in self.uses), left.shape[1]),
            dtype=left.dtype,
            order=(layout.joined(c.world), tuple(val(c.x).shape)),
            replace=self.replace,
            others=tuple(each.node for each in self.tensor.collectives if each is not c),
            dim=layout.dim,
            last_dim=layout.contracted,
            decided=quantises,  # run unfused, too, the op sends fewer bytes
            returns_A=returned,
            scaled=first.products(first.out_dtype, travels=self.rows.dims(first.left_scale) is not None),
        )

    def replace(self) -> None:
        c, at, layout, first = self.collective, self.at, self.layout, self.uses[0]
        with undone_if_left():
            hoist(self.hoisted, at)
            shard = self.rows.shard(first.left, at)
            shard = reshape(shard, [numel(digits) for digits in layout.shard], at, [c.x])
            of_each = {
                "biases": [use.bias for use in self.uses],
                "result_scales": [None] * len(self.uses),
                "out_dtypes": [use.out_dtype for use in self.uses],
                "use_fast_accum": [use.fast for use in self.uses],
            }
            Bs, scales = [use.right for use in self.uses], [use.right_scale for use in self.uses]
            fused = call(
                at,
                schema.all_gather_scaled_matmul,
                *(shard, Bs, self._scale(), scales, layout.dim, c.group, *of_each.values()),
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
                out = reshape(out, val(use.node).shape, use.node, [shard])
                new[use.node] = make_contiguous(out, use.node)
        self.tensor.put_in_place(new, after, [use.node for use in self.uses])

    def _scale(self) -> fx.Node:
        """A_scale, as the op takes it."""
        c, at, first, layout = self.collective, self.at, self.uses[0], self.layout
        scale = self.rows.shard(first.left_scale, at)
        travels = self.rows.dims(first.left_scale) is not None
        if first.kind is ScaleKind.TENSOR and not travels:  # of no dimension: none could be taken for a row's
            return reshape(scale, [], at)
        lead = [numel(digits) for digits in (layout.shard if travels else layout.joined(c.world))[:-1]]
        return reshape(scale, [*lead, val(scale).shape[-1] if travels else 1], at, [c.x])

    def _made_of(self, A: fx.Node, view: fx.Node) -> fx.Node:
        """A view of the quantised tensor, made of what the op returns."""
        c, dims = self.collective, self.rows.dims(view)
        assert dims is not None
        shape = val(view).shape
        new = rearrange(A, self.layout.joined(c.world), dims, shape, self.at, [c.x])
        if val(new).stride() == val(view).stride():
            return new
        return call(self.at, aten.clone.default, new, memory_format=torch.contiguous_format)


def _layout(taken: ScaledMm, rows: RowByRow, c: Collective) -> GatherLayout:
    taken.check()
    dims = rows.dims(taken.left)
    if dims is None:
        raise LeftAlone("what is gathered is no left operand of it")
    if any(rows.dims(n) is not None for n in taken.given):
        raise LeftAlone("its other operand depends on the gathered tensor, too")
    if _gathers(taken.left, rows) != [c]:
        raise LeftAlone("its left operand is not what this collective alone gathers")
    rows_, columns = dims
    layout = GatherLayout.of(rows_, columns, c.world)
    of_scales = rows.dims(taken.left_scale)
    if of_scales is None:
        if taken.kind is not ScaleKind.TENSOR and (taken.kind is ScaleKind.BLOCKS or layout.contracted):
            raise LeftAlone(f"its {taken.kind.value} scales are not gathered with it")
    elif (
        len(of_scales) != 2
        or layout.contracted
        or not same_size(of_scales[0], dims[0])
        or any(digit.axis == RANK for digit in of_scales[1])
    ):
        raise LeftAlone(f"{what(taken.left_scale)}, its scales, are those of other rows")
    return layout


def _gathers(node: fx.Node, rows: RowByRow) -> list[Collective]:
    """Those of which a node is made, as far as that was asked for."""
    nodes = rows.nodes([node])
    return [each for wait, each in rows.bases.items() if wait in nodes]


def _quantised(left: fx.Node, wait: fx.Node) -> list[fx.Node]:
    """The operand, and what it is a view of, up to where it is quantised or gathered."""
    found = [left]
    for step in steps_back(left):
        if found[-1] is wait or val(step.source).dtype != val(left).dtype:
            break
        found.append(step.source)
    return found


def _used_by_others(tensor: Gathered, uses: list[ScaledMm], views: list[fx.Node]) -> list[fx.Node]:
    """The views of the quantised tensor that something else uses, which the op then returns. LeftAlone: something uses
    what it is made of, or its scales."""
    taken, found = tensor.views.keys() | {use.node for use in uses}, []
    for node in sorted(tensor.views):
        if users := [u for u in node.users if u not in taken and tensor.size_of_shard(u) is None]:
            if node not in views:
                raise LeftAlone(
                    f"{what(node)}, of which its operand or its scales are made, is also used by {some(users)}"
                )
            found.append(node)
    return found
