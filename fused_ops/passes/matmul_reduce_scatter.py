"""Matrix products, summed, then reduce_scatter.

    reduce_scatter(y)                            scattered along dimension 0
    reduce_scatter(cat(parts of y along d, 0))   scattered along d
    reduce_scatter(permute(y, p))                scattered along p[0], and the result permuted

where y is, through any reshapes, an mm; or a sum of several, which is one product of what stands side by side,
``A1 @ B1 + A2 @ B2 == [A1 A2] @ [B1; B2]``; or such a sum plus a vector for each rank's rows, which is summed by an
all-reduce of its own: it is the same for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .. import ops
from .insert import call, erase_unused, reshape
from .match import (
    Collective,
    LeftAlone,
    Size,
    argument,
    aten,
    calls,
    check_no_mutation,
    flat,
    known,
    same_shape,
    some,
    val,
    what,
)
from .parts import Parts


@dataclass
class _Sum:
    """y: its terms, and every node that computes it, y's first."""

    products: list[fx.Node] = field(default_factory=list)  # mm and addmm
    vectors: list[fx.Node] = field(default_factory=list)  # added to each row
    nodes: list[fx.Node] = field(default_factory=list)

    def add(self, node: fx.Node, user: fx.Node, ahead: tuple[fx.Node, ...] = ()) -> None:
        """
        Raises:
            LeftAlone: the node is no sum of products, or is used by others than ``user`` and ``ahead``.
        """
        others = [u for u in node.users if u is not user and u not in ahead]
        if others:
            raise LeftAlone(f"{what(node)} is also used by {some(others)}")
        self.nodes.append(node)
        if flat(node):
            self.add(node.args[0], node)  # type: ignore[arg-type]
        elif calls(node, aten.mm.default):
            self.products.append(node)
        elif calls(node, aten.addmm.default):
            self._check_unscaled(node)
            self.products.append(node)
            self._addend(node.args[0], node)
        elif calls(node, aten.add.Tensor):
            self._check_unscaled(node)
            a, b = node.args[:2]
            for term in (a, b):
                self._addend(term, node)
        else:
            raise LeftAlone(f"its input is {what(node)}, not a matrix product")

    @staticmethod
    def _check_unscaled(node: fx.Node) -> None:
        if any(argument(node, 9, name, 1) != 1 for name in ("alpha", "beta")):
            raise LeftAlone(f"{what(node)} scales what it adds")

    def _addend(self, term: object, node: fx.Node) -> None:
        if not isinstance(term, fx.Node):
            raise LeftAlone(f"{what(node)} adds {term}")
        have, want = val(term), val(node)
        if have.dtype != want.dtype:
            raise LeftAlone(f"{what(node)} adds {what(term)} of another dtype")
        if same_shape(have.shape, want.shape):
            if not (flat(term) or calls(term, aten.mm.default, aten.addmm.default, aten.add.Tensor)):
                raise LeftAlone(f"{what(node)} adds {what(term)}, which is no matrix product")
            self.add(term, node)
        elif have.dim() == 1:
            self.vectors.append(term)
        else:
            raise LeftAlone(f"{what(node)} adds {what(term)} of another shape")

    def matrix(self) -> tuple[Size, Size]:
        """The rows and columns of every product.

        Raises:
            LeftAlone: they differ, or there are none.
        """
        shapes = [val(p).shape for p in self.products]
        if not shapes:
            raise LeftAlone(f"{some(self.vectors)}, which it sums, are no matrix products")
        for shape in shapes[1:]:
            if not same_shape(shape, shapes[0]):
                raise LeftAlone("the products that it sums have different shapes")
        rows, columns = shapes[0]
        for vector in self.vectors:
            if not known(val(vector).shape[0] == columns):
                raise LeftAlone(f"{what(vector)} is not added to the rows of the product")
        return rows, columns


@dataclass
class MatmulReduceScatter:
    collective: Collective
    terms: _Sum
    dim: int  # of A @ B, where the op scatters it
    lead: tuple[Size, ...]  # the shape of A but for the last dimension
    permutation: tuple[int, ...] | None  # of the result
    above: tuple[fx.Node, ...] = field(default=(), repr=False)  # from y to the collective

    op = ops.matmul_reduce_scatter

    @property
    def detail(self) -> str:
        count, vectors = len(self.terms.products), len(self.terms.vectors)
        text = f"{count} product{'s, summed as one' if count > 1 else ''}"
        return text + (f", {vectors} added vector{'s' if vectors > 1 else ''}" if vectors else "")

    @classmethod
    def from_collective(cls, c: Collective) -> MatmulReduceScatter:
        """
        Raises:
            LeftAlone: what is reduced is not exactly a product that the op computes.
        """
        y, user, permutation, parts, above = _unjoined(c)
        terms = _Sum()
        terms.add(y, user, parts.nodes if parts is not None else ())
        rows, columns = terms.matrix()
        dim, lead = 0, tuple[Size, ...]((rows,))
        if parts is not None:
            dim = parts.cut_dim
        elif permutation is not None:
            dim = permutation[0]
        shape = val(y).shape
        ones = all(known(s == 1) for s in shape[:dim]) and dim != len(shape) - 1
        if dim != 0 and not (permutation is None and ones and known(rows % c.world == 0)):
            if not known(shape[-1] == columns):
                raise LeftAlone(f"{what(y)} has rows of {shape[-1]}, the product has rows of {columns}")
            lead = tuple(shape[:-1])
        else:
            dim = 0
            if not known(rows % c.world == 0):
                raise LeftAlone(f"the {rows} rows of the product are not known to make {c.world} equal parts")
        if terms.vectors and dim == len(lead):
            raise LeftAlone(f"{some(terms.vectors)} is added, and each rank gets other columns of it")
        order = {n: i for i, n in enumerate(c.node.graph.nodes)}
        check_no_mutation(min(terms.products, key=order.__getitem__), c.node)
        return cls(c, terms, dim, lead, permutation, above)

    def replace(self) -> None:
        c, at = self.collective, self.collective.node
        pairs = [p.args[-2:] for p in self.terms.products]
        A, B = pairs[0]
        if len(pairs) > 1:
            A = call(at, aten.cat.default, [a for a, _ in pairs], 1)
            B = call(at, aten.cat.default, [b for _, b in pairs], 0)
        assert isinstance(A, fx.Node)
        near = [n for n, _ in pairs if isinstance(n, fx.Node)]
        A = reshape(A, [*self.lead, val(A).shape[1]], at, near)
        out = call(at, self.op, A, B, c.reduce_op, self.dim, c.group)
        for vector in self.terms.vectors:
            out = call(at, aten.add.Tensor, out, call(at, ops.all_reduce, vector, c.reduce_op, c.group))
        if self.permutation is not None:
            out = call(at, aten.permute.default, out, list(self.permutation))
        out = reshape(out, val(c.wait).shape, at, near)
        c.wait.replace_all_uses_with(out)
        for user in list(c.node.users):
            # The sizes of what is pending are those of the result.
            if user is not c.wait:
                user.replace_input_with(c.node, out)
        erase_unused([*self.terms.nodes[::-1], *self.above, c.node, c.wait])


def _unjoined(
    c: Collective,
) -> tuple[fx.Node, fx.Node, tuple[int, ...] | None, Parts | None, tuple[fx.Node, ...]]:
    """y, its user, how y was permuted, into which parts it was cut, and all nodes from y to the collective."""
    node, user = c.x, c.node
    above: list[fx.Node] = []

    def sole_user(node: fx.Node, user: fx.Node) -> None:
        others = [u for u in node.users if u is not user]
        if others:
            raise LeftAlone(f"{what(node)} is also used by {some(others)}")

    while flat(node):
        sole_user(node, user)
        above.append(node)
        node, user = node.args[0], node  # type: ignore[assignment]
    if calls(node, aten.cat.default):
        sole_user(node, user)
        parts = Parts.from_cat(node, c.world)
        if parts.join_dim != 0:
            raise LeftAlone(f"{what(node)} joins the parts along dimension {parts.join_dim}, not 0")
        return parts.source, node, None, parts, (*parts.nodes, node, *above[::-1])
    if calls(node, aten.permute.default):
        source = node.args[0]
        permutation = tuple(int(p) % val(node).dim() for p in node.args[1])  # type: ignore[arg-type, union-attr]
        # Only then do the ranks' parts end where a row of the permuted tensor ends.
        if permutation[0] != 0 and known(val(node).shape[0] % c.world == 0):
            sole_user(node, user)
            return source, node, permutation, None, (node, *above[::-1])  # type: ignore[return-value]
    return node, user, None, None, tuple(above[::-1])
