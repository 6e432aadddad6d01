"""Matrix products in a graph: mm, addmm, and bmm where one operand is the same matrix for the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.index_map import Digits, Dims
from ..graph.nodes import aten, calls, is_val, memory, val
from ..graph.rewrite import call
from ..graph.sizes import Size, known

# And how many operands each has.
PRODUCTS = {
    getattr(getattr(aten, op), overload): operands
    for op, operands in (("mm", 2), ("bmm", 2), ("addmm", 3), ("baddbmm", 3))
    for overload in ("default", "dtype")
}


@dataclass(frozen=True)
class Product:
    """``alpha * left @ right`` [+ ``beta * addend``]: matrices, or a batch of them with one matrix repeated on the
    other side."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    addend: fx.Node | None

    @property
    def alpha(self) -> Any:
        return self.node.kwargs.get("alpha", 1)

    @property
    def beta(self) -> Any:
        return self.node.kwargs.get("beta", 1)


def product(node: fx.Node) -> Product | None:
    """The node as a product, None if it is none."""
    if not calls(node, *PRODUCTS) or not is_val(node):
        return None
    *addend, left, right = node.args[: PRODUCTS[node.target]]  # type: ignore[index]
    if not (is_val(left) and is_val(right) and all(is_val(a) for a in addend)):
        return None
    return Product(node, left, right, addend[0] if addend else None)  # type: ignore[arg-type]


def one_matrix(node: fx.Node) -> bool:
    """Whether an operand is known to be a single matrix, once or repeated for a batch."""
    tensor = val(node)
    if tensor.dim() == 2 or known(tensor.shape[0] == 1):
        return True
    # What was expanded lies at one place, however it is reshaped or transposed since.
    if not known(tensor.stride(0) == 0):
        return False
    while not calls(node, aten.expand.default):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not is_val(source) or memory(source) != memory(node):
            return False
        node = source
    return True


def matrix(node: fx.Node, before: fx.Node) -> fx.Node:
    """That single matrix."""
    return node if val(node).dim() == 2 else call(before, aten.select.int, node, 0, 0)


@dataclass(frozen=True)
class Use:
    """A product of which one operand, the left one or the ``transposed`` right one, is a view of the gathered tensor.

    Its rows and columns are those of the matrix on the left: for a right operand of the transposed product.
    """

    product: Product
    transposed: bool
    rows: Digits
    columns: Digits

    @property
    def other(self) -> fx.Node:
        return self.product.left if self.transposed else self.product.right

    @property
    def width(self) -> Size:
        """The columns of the product: of the transposed one for a right operand."""
        return val(self.other).shape[-2 if self.transposed else -1]


def use(product: Product, dims: Dims, transposed: bool) -> Use:
    *lead, first, last = dims
    rows, columns = (last, first) if transposed else (first, last)
    batch = tuple(digit for digits in lead for digit in digits)
    return Use(product, transposed, (*batch, *rows), columns)
