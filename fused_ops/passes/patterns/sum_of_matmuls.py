"""What a reduction sums up, if that is a sum of matrix products: the products, and where their elements end up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ... import validation
from ...library import schema
from ..graph.collectives import COMPILE_BOTH, Collective
from ..graph.index_map import Digits, Dims, numel, same_size
from ..graph.nodes import LeftAlone, aten, calls, check_users, is_val, some, val, walk, what
from ..graph.rewrite import call, cast, fused, reshape
from ..graph.scaling import Scaling, check_factor, is_factor, scaled
from ..graph.sizes import Size, hint_or_one, known, same_shape
from ..graph.views import steps_back, view_step
from .matmuls import Product, matrix, one_matrix, product


@dataclass
class SumOfMatmuls:
    """A node that is a sum of products: one product of what stands side by side, ``[A1 A2] @ [B1; B2]``.

    ``vectors`` are added to each of its rows. Each of both has a factor, in the same order. ``rows`` and ``columns`` of
    the product are digits of the node's dimensions. ``dtype`` is that of the products; ``nodes`` are all that compute
    the sum.
    """

    products: list[Product] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    vectors: list[fx.Node] = field(default_factory=list)
    factors_of_vectors: list[float] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    rows: Digits = ()
    columns: Digits = ()
    total_dtype: torch.dtype = torch.float32  # to which the ranks' sum is rounded

    @property
    def dtype(self) -> torch.dtype:
        return val(self.products[0].node).dtype

    @property
    def m(self) -> Size:
        return numel(self.rows)

    @property
    def n(self) -> Size:
        return val(self.products[0].right).shape[-1]

    @property
    def k(self) -> Size:
        return sum(val(p.left).shape[-1] for p in self.products)

    @property
    def factor(self) -> float:
        """By which what the op gives is multiplied: the one that all have. Factors that differ go into the operands."""
        first, *others = (*self.factors, *self.factors_of_vectors)
        return first if all(other == first for other in others) else 1.0

    @property
    def detail(self) -> str:
        count, vectors = len(self.products), len(self.vectors)
        text = f"{count} product{'s, summed as one' if count > 1 else ''}"
        if self.factor != 1:
            text += f", multiplied by {self.factor:g}"
        elif self._is_scaled:
            text += f", multiplied by {', '.join(f'{f:g}' for f in sorted({*self.factors}, reverse=True))}"
        return text + (f", {vectors} added vector{'s' if vectors > 1 else ''}" if vectors else "")

    @property
    def form(self) -> str:
        count = len(self.products)
        kind = "scaled product" if self._is_scaled else "product"
        text = f"sum of {count} {kind}s" if count > 1 else kind
        return text + (" + bias" if self.vectors else "")

    @property
    def _is_scaled(self) -> bool:
        return any(factor != 1 for factor in self.factors)

    def first(self) -> fx.Node:
        """The first of the products in the graph."""
        return min(p.node for p in self.products)

    def check_factors(self) -> None:
        """LeftAlone: what the op sends, or an operand, may be out of its dtype's range."""
        if self.factor != 1:
            # The ranks' sum without its factor may be too large where that with it is not.
            if self.total_dtype == torch.float16 and abs(self.factor) < 1:
                raise LeftAlone(
                    f"{what(self.products[0].node)} is multiplied by {self.factor:g} before it is reduced: without "
                    "that the sum may be too large for torch.float16"
                )
            return
        for product_, factor in zip(self.products, self.factors, strict=True):
            check_factor(factor, self.dtype, what(product_.node))

    def pairs(self, at: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """``A`` [m, k] and ``B`` [k, n] of each product, before the given node; of ``self.factor`` times their sum."""
        found = []
        for product_, factor in zip(self.products, self.factors, strict=True):
            left, right = product_.left, matrix(product_.right, at)
            if self.factor == 1 and factor != 1:
                # Whichever has fewer elements.
                if hint_or_one(self.m) < hint_or_one(val(right).shape[-1]):
                    left = scaled(left, factor, at)
                else:
                    right = scaled(right, factor, at)
            found.append((reshape(left, [self.m, val(left).shape[-1]], at, [left]), right))
        return found

    def operands(self, at: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Those of one product of what stands side by side."""
        As, Bs = zip(*self.pairs(at), strict=True)
        if len(As) == 1:
            return As[0], Bs[0]
        return call(at, aten.cat.default, As, 1), call(at, aten.cat.default, Bs, 0)

    def finished(self, out: fx.Node, c: Collective, at: fx.Node) -> fx.Node:
        """What the op gives of the products, with the vectors, which are reduced by themselves, and the factor."""
        for vector, factor in zip(self.vectors, self.factors_of_vectors, strict=True):
            row = reshape(vector, [val(vector).shape[-1]], at)
            row = cast(row, val(out).dtype, at)
            total = fused(at, schema.all_reduce, c, row, c.reduce_op)
            out = call(at, aten.add.Tensor, out, scaled(total, factor / self.factor, at))
        return scaled(out, self.factor, at)


def sum_of(node: fx.Node, dims: Dims, user: fx.Node) -> SumOfMatmuls:
    """What a node of these dimensions sums up for its only user. LeftAlone: it is no sum of products, or others use a
    part of it."""
    total = SumOfMatmuls(total_dtype=val(node).dtype)
    terms: list[tuple[Digits, Digits]] = []
    rows_of_vectors: list[Digits] = []
    wanted = val(node).dtype
    pending: list[tuple[fx.Node, Dims, tuple[fx.Node, ...], float]] = [(node, dims, (user,), 1.0)]
    adder: dict[fx.Node, fx.Node] = {}  # what adds a node, as it is or in another order
    dtypes: dict[torch.dtype, fx.Node] = {}
    while pending:
        node, dims, users, factor = pending.pop()
        check_users(node, users)
        total.nodes.append(node)
        dtypes.setdefault(val(node).dtype, node)
        if (taken := product(node)) is not None:
            _check_dtype(val(node).dtype, wanted)
            if val(taken.left).dtype != val(node).dtype:
                raise LeftAlone(
                    f"{what(node)} has another dtype than its operands, to which the op would round"
                )
            if not one_matrix(taken.right):
                raise LeftAlone(f"{what(node)} is a batch of products with different matrices")
            *lead, rows, columns = dims
            terms.append((tuple(d for digits in (*lead, rows) for d in digits), columns))
            total.products.append(taken)
            total.factors.append(_times(factor, taken.alpha, node))
            addends = [] if taken.addend is None else [(taken.addend, taken.beta)]
        elif (taken_step := view_step(node)) is not None:
            for part in taken_step.between:
                check_users(part, taken_step.nodes)
            total.nodes += taken_step.between
            if isinstance(taken_step.change, Scaling):
                factor = _times(factor, taken_step.change.factor, node)
            pending.append((taken_step.source, taken_step.backward(dims), taken_step.nodes, factor))
            if node in adder:
                adder[taken_step.source] = adder[node]
            continue
        elif calls(node, *_SUMS):
            addends = _added(node)
        else:
            if node not in adder:
                raise LeftAlone(why_no_product(node))
            raise LeftAlone(f"{what(adder[node])} adds {what(node)}, not a matrix product")
        for term, number in addends:
            if _is_vector(term, node):
                total.vectors.append(term)
                total.factors_of_vectors.append(_times(factor, number, node))
                rows_of_vectors.append(dims[-1])
            else:
                pending.append((term, dims, (node,), _times(factor, number, node)))
                adder[term] = node
    if not terms:
        raise LeftAlone(f"{some(total.vectors)}, which it sums, are no matrix products")
    (total.rows, total.columns), *others = terms
    if not all(same_size(rows, total.rows) and same_size(columns, total.columns) for rows, columns in others):
        alike = all(known(numel(r) == total.m) and known(numel(c) == numel(total.columns)) for r, c in others)
        how = "their rows or columns in different orders" if alike else "different shapes"
        raise LeftAlone(f"the products that it sums have {how}")
    if len({val(p.node).dtype for p in total.products}) > 1:
        raise LeftAlone("the products that it sums have different dtypes")
    for dtype, node in dtypes.items():
        # Not another one on the way, either: what an integer or a shorter float cuts off would stay.
        if dtype not in (total.dtype, torch.float32):
            raise LeftAlone(f"{what(node)} is {dtype}, to which the op would not round")
    if total.dtype == torch.float16 != wanted and len(total.products) > 1:
        raise LeftAlone("the sum may be too large for torch.float16, to which it would be rounded")
    for vector, columns in zip(total.vectors, rows_of_vectors, strict=True):
        if not same_size(columns, total.columns) or val(vector).dtype != total.dtype:
            raise LeftAlone(f"{what(vector)} is not added to the rows of the product")
    total.check_factors()
    return total


_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def _added(node: fx.Node) -> list[tuple[Any, Any]]:
    """What a sum or a difference adds, and the factor of each."""
    a, b = node.args[:2]
    alpha: Any = node.kwargs.get("alpha", 1)
    return [(a, 1), (b, -alpha if calls(node, aten.sub.Tensor) and is_factor(alpha) else alpha)]


def _times(factor: float, number: object, node: fx.Node) -> float:
    """LeftAlone: the node multiplies by what is no factor."""
    if not isinstance(number, int | float) or not is_factor(number) or not is_factor(factor * number):
        raise LeftAlone(f"{what(node)} multiplies what it adds by {number}")
    return factor * number


def why_no_product(node: fx.Node) -> str:
    """That what is reduced is no product, and whether one may stand in another graph."""
    text = f"its input is {what(node)}, not a matrix product"
    for step in steps_back(node):
        node = step.source
    if node.op != "placeholder":
        return text
    return f"the graph begins before the collective: {text}; if one in another graph makes it, {COMPILE_BOTH}"


def has_product(node: fx.Node) -> bool:
    """Whether a sum has a matrix product among what it sums, through casts, factors and whatever orders elements."""

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        step = next(steps_back(node), None)
        given = node.args[:2] if calls(node, *_SUMS) else () if step is None else (step.source,)
        return filter(is_val, given)

    return any(product(n) is not None for n in walk([node], sources))


def _check_dtype(have: torch.dtype, want: torch.dtype) -> None:
    if have not in validation.DTYPES:
        raise LeftAlone(f"the product is {have}, not float32, bfloat16 or float16")
    if have.itemsize > want.itemsize:
        raise LeftAlone(f"reduced before it is cast to {want}, twice as many bytes would be sent")
    if have != want and want != torch.float32:
        raise LeftAlone(f"the product is cast from {have} to {want}, and the op gives {have} or float32")


def _is_vector(term: object, node: fx.Node) -> bool:
    """Whether a term is added to each row of the node, rather than element by element. LeftAlone: neither."""
    if not is_val(term):
        raise LeftAlone(f"{what(node)} adds {term}")
    have, want = val(term), val(node)
    if have.dtype != want.dtype:
        raise LeftAlone(f"{what(node)} adds {what(term)} of another dtype")
    if same_shape(have.shape, want.shape):
        return False
    if (
        have.dim() > 0
        and known(have.shape[-1] == want.shape[-1])
        and all(known(s == 1) for s in have.shape[:-1])
    ):
        return True
    raise LeftAlone(f"{what(node)} adds {what(term)} of another shape")
