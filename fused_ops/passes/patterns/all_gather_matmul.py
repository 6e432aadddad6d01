"""all_gather, then matrix products of the gathered tensor.

Whatever reshapes, permutes, casts, multiplies by a number, or cuts it into parts and joins them stands between, a
product of the gathered tensor has either the rows of all shards, or it contracts the ranks, the columns of the shards
standing side by side. Both are ``fused_all_gather_matmul`` of the shard, reshaped, permuted, cast and multiplied as the
gathered tensor was. Where that is the right operand, the op computes the transposed product:
``x @ gathered == (gathered^T @ x^T)^T``.

What else uses the gathered tensor, such as the backward pass or the gradient of a weight, gets it from the fused op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ... import validation
from ...library import schema
from ..graph.collectives import COMPILE_BOTH, Collective
from ..graph.effects import first_write
from ..graph.gathered_tensor import Gathered, GatherLayout
from ..graph.index_map import numel, plain
from ..graph.nodes import LeftAlone, aten, calls, memory, some, val, walk, what
from ..graph.rewrite import call, fused, hoist, make_contiguous, permute, rearrange, reshape, undone_if_left
from ..graph.scaling import Scaling, changed, is_factor, scaled
from ..graph.sizes import is_contiguous
from ..graph.views import View
from .matmuls import Product, Use, matrix, one_matrix, product, use
from .one_product import together
from .pattern import Pattern
from .sum_of_matmuls import has_product

#: What an all-gather has in its ``meta`` if the backward repeats it (``regather.py``).
REGATHERED = "weft_regathered"


def match_all_gather_matmul(c: Collective) -> Pattern:
    """LeftAlone: no product of the gathered tensor is exactly what the op computes."""
    tensor = Gathered.by(c)
    candidates, reasons = _candidates(tensor)
    if not candidates:
        other = _fused_after(tensor) or dict.fromkeys(tensor.reasons)
        raise LeftAlone("; ".join([*reasons.values(), *other]) or _why_none(tensor))
    # Rows before contracted ranks: there the op can overlap. Of several layouts the one met first that will do.
    tried: list[GatherLayout] = []
    problems = []
    for _, layout in sorted(candidates, key=lambda candidate: candidate[1].contracted):
        if any(map(layout.same, tried)):
            continue
        tried.append(layout)
        try:
            uses = [u for u, x in candidates if x.same(layout)]
            return _Replacement.of(tensor, layout, uses, dict(reasons)).pattern()
        except LeftAlone as e:
            problems.append(e)
    raise problems[0]


@dataclass
class _Replacement:
    """``uses`` are the products that one op computes, in the order of the graph."""

    tensor: Gathered
    layout: GatherLayout
    uses: list[Use]
    at: fx.Node  # where the op will stand
    hoisted: set[fx.Node]  # computed before it, for the other operands
    kept: dict[fx.Node, View]  # what others use of the gathered tensor, to be made from what the op returns

    @property
    def collective(self) -> Collective:
        return self.tensor.collectives[0]

    @classmethod
    def of(
        cls, tensor: Gathered, layout: GatherLayout, uses: list[Use], reasons: dict[fx.Node, str]
    ) -> _Replacement:
        """``uses``: those of this layout; ``reasons``: why other products are none. LeftAlone: none of them can be
        moved to the op, or something else needs what the op does not return."""
        c, at = tensor.collectives[0], tensor.before_others()
        chosen, needed = [], []
        written = first_write(c.node, uses[-1].product.node)
        for u in uses:
            if written is not None and written < u.product.node:
                reasons[u.product.node] = f"{what(written)} writes to memory before {what(u.product.node)}"
                continue
            try:
                needed.append(tensor.needed_before(at, u.other))
                chosen.append(u)
            except LeftAlone as e:
                reasons[u.product.node] = str(e)
        if not chosen:
            raise LeftAlone("; ".join(reasons.values()))
        count = together(at, [u.product.node for u in chosen])
        chosen, hoisted = chosen[:count], set[fx.Node]().union(*needed[:count])
        kept = tensor.kept(
            {u.product.node: u.product.addend for u in chosen}, layout.changes, layout.joined(c.world)
        )
        return cls(tensor, layout, chosen, at, hoisted, kept)

    def pattern(self) -> Pattern:
        c, layout, uses, count = self.collective, self.layout, self.uses, len(self.uses)
        dtypes = [change for change in layout.changes if isinstance(change, torch.dtype)]
        scales = any(isinstance(change, Scaling) for change in layout.changes)
        changes = " → cast" * bool(dtypes) + " → factor" * scales
        transposes = all(u.transposed for u in uses)
        of_what, right = " of what is contracted" * layout.contracted, " as right operand" * transposes
        again = ", gathered again" * (layout.contracted and REGATHERED in c.node.meta)
        returned = ", A returned" * bool(self.kept)
        return Pattern(
            collective=c,
            op=schema.all_gather_matmul,
            form=f"all_gather{of_what}{changes} → {f'{count} products' if count > 1 else 'product'}{right}",
            detail=f"{count} product{'s' * (count > 1)}{again}{returned}",
            sizes=(numel(uses[0].rows), sum(use.width for use in uses), numel(uses[0].columns)),
            dtype=dtypes[-1] if dtypes else val(c.x).dtype,
            order=(layout.joined(c.world), tuple(val(c.x).shape)),
            replace=self.replace,
            others=tuple(each.node for each in self.tensor.collectives[1:]),
            dim=layout.dim,
            last_dim=layout.contracted,
            returns_A=bool(self.kept),
            transposes=transposes,
        )

    def replace(self) -> None:
        c, layout, at = self.collective, self.layout, self.at
        with undone_if_left():
            hoist(self.hoisted, at)
            shard = changed(c.x, layout.changes, at)
            shape = [numel(digits) for digits in layout.shard]
            shard = rearrange(shard, plain(val(c.x).shape), layout.shard, shape, at)
            Bs = [_other(u, at) for u in self.uses]
            made = fused(at, schema.all_gather_matmul, c, shard, Bs, layout.dim, return_A=bool(self.kept))
            outs = call(at, operator.getitem, made, 1)
            new = {}
            if self.kept:
                A = call(at, operator.getitem, made, 0)
                lent: list[int] = []
                new = {view.node: self._of(A, view, lent) for view in self.kept.values()}
            after = at.prev
            for i, u in enumerate(self.uses):
                out = call(u.product.node, operator.getitem, outs, i)
                new[u.product.node] = _product(out, u, [shard, Bs[i]])
        self.tensor.put_in_place(new, after, [u.product.node for u in self.uses])

    def _of(self, A: fx.Node, view: View, lent: list[int]) -> fx.Node:
        """A view of the gathered tensor, made of what the op returns. ``lent``: the memory for which that of A could
        stand; it does for the first. What is other memory in the graph stays other memory."""
        c, at = self.collective, self.at
        new = rearrange(A, self.layout.joined(c.world), view.dims, val(view.node).shape, at, [c.x])
        fits = is_contiguous(val(new))
        if fits and memory(new) == memory(A):
            lent.append(memory(view.node))
            fits = lent[0] == lent[-1]
        return new if fits else call(at, aten.clone.default, new, memory_format=torch.contiguous_format)


def _candidates(tensor: Gathered) -> tuple[list[tuple[Use, GatherLayout]], dict[fx.Node, str]]:
    """The products that the op can compute, in the order of the graph, and why others are none."""
    found: dict[fx.Node, tuple[Use, GatherLayout]] = {}
    reasons: dict[fx.Node, str] = {}
    for view in tensor.views.values():
        for node in view.node.users:
            if node in found or node in reasons or (taken := product(node)) is None:
                continue
            if view.node not in (taken.left, taken.right):
                continue
            try:
                found[node] = _candidate(tensor, taken, view)
            except LeftAlone as e:
                reasons[node] = f"{what(node)}: {e}"
    return [found[node] for node in sorted(found)], reasons


def _candidate(tensor: Gathered, taken: Product, view: View) -> tuple[Use, GatherLayout]:
    used = use(taken, view.dims, transposed=view.node is not taken.left)
    x, dtype = val(tensor.collectives[0].x), val(view.node).dtype
    if taken.left in tensor.views and taken.right in tensor.views:
        raise LeftAlone("the other operand depends on the gathered tensor, too")
    if not (is_factor(taken.alpha) and is_factor(taken.beta)):
        raise LeftAlone(f"it scales by {taken.alpha} and {taken.beta}")
    if not one_matrix(used.other):
        raise LeftAlone("it is a batch of products with different matrices")
    if dtype not in validation.DTYPES or val(taken.node).dtype != dtype or not is_contiguous(val(taken.node)):
        raise LeftAlone("it has another dtype or layout")
    if dtype.itemsize > x.dtype.itemsize:
        raise LeftAlone(f"cast to {dtype} before it is gathered, twice as many bytes would be sent")
    return used, GatherLayout.of(used.rows, used.columns, tensor.collectives[0].world, view.changes)


def contracting(tensor: Gathered, products: list[fx.Node]) -> list[Use]:
    """How these products use a gathered tensor, if one op can compute all of them by contracting the ranks. LeftAlone:
    it cannot."""
    found = {used.product.node: (used, layout) for used, layout in _candidates(tensor)[0]}
    if not all(node in found for node in products):
        raise LeftAlone("not all of them are products that the op computes")
    _, first = found[products[0]]
    if not all(found[node][1].contracted and found[node][1].same(first) for node in products):
        raise LeftAlone("not all of them contract the ranks in one way")
    return [found[node][0] for node in products]


def _fused_after(tensor: Gathered) -> list[str]:
    """That a product of the gathered tensor was fused with the reduction after it: reductions come first."""
    # The pass itself puts them before the op for a sum of products.
    before = (aten.cat.default, aten.reshape.default, aten.select.int)
    operands = walk([*tensor.views, *tensor.cut], lambda n: (u for u in n.users if calls(u, *before)))
    ops = (schema.matmul_reduce_scatter, schema.matmul_all_reduce)
    found = sorted({u for n in operands for u in n.users if calls(u, *ops) and n in u.args[:2]})
    return [f"its product is fused with the reduction after it, into {some(found)}"] if found else []


def _why_none(tensor: Gathered) -> str:
    users, x = tensor.outside(), tensor.collectives[0].x
    if has_product(x):
        taken = f"only {some(users)} take{'s' * (len(users) == 1)} it" if users else "nothing takes it"
        return f"it gathers a matrix product, and {taken}, no other product"
    if users and all(u.op == "output" for u in users):
        return (
            "the graph ends after the collective: no matrix product takes the gathered tensor, but the graph's "
            f"output; if one in another graph does, {COMPILE_BOTH}"
        )
    return f"no matrix product takes the gathered tensor, but {some(users) if users else 'nothing'}"


def _other(u: Use, at: fx.Node) -> fx.Node:
    other = matrix(u.other, at)
    return permute(other, (1, 0), at) if u.transposed else other


def _product(out: fx.Node, u: Use, near: list[fx.Node]) -> fx.Node:
    """What the op gives for a product, as the product was."""
    node = u.product.node
    shape = list(val(node).shape)
    if u.transposed:
        *batch, m, n = shape
        out = reshape(out, [*batch, n, m], node, near)
        order = [*range(len(batch)), len(batch) + 1, len(batch)]
        out = permute(out, order, node)
    out = make_contiguous(reshape(out, shape, node, near), node)
    out = scaled(out, u.product.alpha, node)
    if u.product.addend is not None:
        named = {} if u.product.beta == 1 else {"alpha": u.product.beta}
        out = call(node, aten.add.Tensor, out, u.product.addend, **named)
    return out
