"""What a reduction sums up, if that is a sum of matrix products: the products, and where their elements end up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from ...library import validation
from ..graph import rewrite
from ..graph.collectives import (
    COMPILE_BOTH,
    LeftAlone,
    Size,
    argument,
    aten,
    calls,
    is_val,
    known,
    same_shape,
    some,
    val,
    what,
)
from ..graph.index_map import Digits, Dims, numel, same_size
from ..graph.rewrite import call
from ..graph.views import view_step
from .matmuls import Product, matrix, one_matrix, product


@dataclass
class SumOfMatmuls:
    """A node that is a sum of products: one product of what stands side by side, ``[A1 A2] @ [B1; B2]``.

    ``vectors`` are added to each of its rows. ``rows`` and ``columns`` of the product are digits of the node's
    dimensions. ``dtype`` is that of the products; ``nodes`` are all that compute the sum.
    """

    products: list[Product] = field(default_factory=list)
    vectors: list[fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    rows: Digits = ()
    columns: Digits = ()

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
    def detail(self) -> str:
        count, vectors = len(self.products), len(self.vectors)
        text = f"{count} product{'s, summed as one' if count > 1 else ''}"
        return text + (f", {vectors} added vector{'s' if vectors > 1 else ''}" if vectors else "")

    @property
    def form(self) -> str:
        count = len(self.products)
        text = f"sum of {count} products" if count > 1 else "product"
        return text + (" + bias" if self.vectors else "")

    def first(self) -> fx.Node:
        """The first of the products in the graph."""
        return min(p.node for p in self.products)

    def join(self, other: SumOfMatmuls) -> None:
        """Adds what another reduction sums up.

        Raises:
            LeftAlone: its products have another shape or dtype.
        """
        alike = same_size(self.rows, other.rows) and same_size(self.columns, other.columns)
        if not alike or self.dtype != other.dtype:
            raise LeftAlone("the products that are summed have different shapes or dtypes")
        self.products += other.products
        self.vectors += other.vectors
        self.nodes += other.nodes

    def factors(self, at: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """``A`` [m, k] and ``B`` [k, n] of each product, before the given node."""
        As = [rewrite.reshape(p.left, [self.m, val(p.left).shape[-1]], at, [p.left]) for p in self.products]
        return list(zip(As, [matrix(p.right, at) for p in self.products], strict=True))

    def operands(self, at: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Those of one product of what stands side by side."""
        As, Bs = zip(*self.factors(at), strict=True)
        if len(As) == 1:
            return As[0], Bs[0]
        return call(at, aten.cat.default, As, 1), call(at, aten.cat.default, Bs, 0)


def sum_of(node: fx.Node, dims: Dims, user: fx.Node) -> SumOfMatmuls:
    """What a node of these dimensions sums up for its only user.

    Raises:
        LeftAlone: it is no sum of products, or others use a part of it.
    """
    total = SumOfMatmuls()
    terms: list[tuple[Digits, Digits]] = []
    rows_of_vectors: list[Digits] = []
    wanted = val(node).dtype
    pending: list[tuple[fx.Node, Dims, tuple[fx.Node, ...]]] = [(node, dims, (user,))]
    adder: dict[fx.Node, fx.Node] = {}  # what adds a node, as it is or in another order
    dtypes: dict[torch.dtype, fx.Node] = {}
    while pending:
        node, dims, users = pending.pop()
        _check_users(node, users)
        total.nodes.append(node)
        dtypes.setdefault(val(node).dtype, node)
        if (taken := product(node)) is not None:
            _check_dtype(val(node).dtype, wanted)
            if taken.scaled:
                raise LeftAlone(f"{what(node)} scales what it adds")
            if val(taken.left).dtype != val(node).dtype:
                raise LeftAlone(
                    f"{what(node)} has another dtype than its operands, to which the op would round"
                )
            if not one_matrix(taken.right):
                raise LeftAlone(f"{what(node)} is a batch of products with different matrices")
            *lead, rows, columns = dims
            terms.append((tuple(d for digits in (*lead, rows) for d in digits), columns))
            total.products.append(taken)
            addends: tuple[object, ...] = () if taken.addend is None else (taken.addend,)
        elif (taken_step := view_step(node)) is not None:
            for part in taken_step.between:
                _check_users(part, taken_step.nodes)
            total.nodes += taken_step.between
            pending.append((taken_step.source, taken_step.backward(dims), taken_step.nodes))
            if node in adder:
                adder[taken_step.source] = adder[node]
            continue
        elif calls(node, aten.add.Tensor):
            if argument(node, 9, "alpha", 1) != 1:
                raise LeftAlone(f"{what(node)} scales what it adds")
            addends = node.args[:2]
        else:
            if node not in adder:
                raise LeftAlone(why_no_product(node))
            raise LeftAlone(f"{what(adder[node])} adds {what(node)}, not a matrix product")
        for term in addends:
            if _is_vector(term, node):
                total.vectors.append(term)  # type: ignore[arg-type]
                rows_of_vectors.append(dims[-1])
            else:
                pending.append((term, dims, (node,)))  # type: ignore[arg-type]
                adder[term] = node  # type: ignore[index]
    if not terms:
        raise LeftAlone(f"{some(total.vectors)}, which it sums, are no matrix products")
    (total.rows, total.columns), *others = terms
    if not all(same_size(rows, total.rows) and same_size(columns, total.columns) for rows, columns in others):
        orders = all(
            known(numel(r) == total.m) and known(numel(c) == numel(total.columns)) for r, c in others
        )
        how = "their rows or columns in different orders" if orders else "different shapes"
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
    return total


def why_no_product(node: fx.Node) -> str:
    """That what is reduced is no product, and whether one may stand in another graph."""
    text = f"its input is {what(node)}, not a matrix product"
    source: fx.Node | None = node
    while source is not None and source.op != "placeholder":
        try:
            source = step.source if (step := view_step(source)) is not None else None
        except LeftAlone:
            source = None
    if source is None:
        return text
    return f"the graph begins in front of the collective: {text}; if one in another graph makes it, {COMPILE_BOTH}"


def has_product(node: fx.Node) -> bool:
    """Whether a sum, through casts and whatever only orders elements, has a matrix product among what it sums."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if product(node) is not None:
            return True
        try:
            taken = view_step(node)
        except LeftAlone:
            continue
        sources = node.args[:2] if calls(node, aten.add.Tensor) else () if taken is None else (taken.source,)
        for source in sources:
            if is_val(source) and source not in seen:
                seen.add(source)
                pending.append(source)
    return False


def _check_users(node: fx.Node, users: Iterable[fx.Node]) -> None:
    others = [u for u in node.users if u not in users]
    if others:
        raise LeftAlone(f"{what(node)} is also used by {some(others)}")


def _check_dtype(have: torch.dtype, want: torch.dtype) -> None:
    if have not in validation.DTYPES:
        raise LeftAlone(f"the product is {have}, not float32, bfloat16 or float16")
    if have.itemsize > want.itemsize:
        raise LeftAlone(f"reduced before it is cast to {want}, twice as many bytes would be sent")
    if have != want and want != torch.float32:
        raise LeftAlone(f"the product is cast from {have} to {want}, and the op gives {have} or float32")


def _is_vector(term: object, node: fx.Node) -> bool:
    """Whether a term is added to each row of the node, rather than element by element.

    Raises:
        LeftAlone: neither.
    """
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
