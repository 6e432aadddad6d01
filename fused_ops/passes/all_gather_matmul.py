"""all_gather, then matrix products of the gathered tensor.

    wait(all_gather(x))                        gathered along dimension 0
    cat(parts of wait(all_gather(x)), d)       gathered along d
    permute(wait(all_gather(x)), p)            permute(x, p), gathered along the dimension where 0 went

and then, through any reshapes, as the left operand of mm or addmm. What else uses the gathered tensor, such as the
backward pass or the gradient of a weight, gets it from the fused op.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
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
    closure,
    contiguous,
    flat,
    known,
    some,
    val,
    what,
)
from .parts import Parts

_PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass
class AllGatherMatmul:
    """``products`` are mm and addmm nodes whose left operand holds the rows of ``gathered`` in row-major order."""

    collective: Collective
    gathered: fx.Node
    dim: int  # of the shard that the op gets
    permutation: tuple[int, ...] | None  # of x, before it is the shard
    shard_shape: tuple[Size, ...]
    products: list[fx.Node]
    between: tuple[fx.Node, ...] = field(default=(), repr=False)  # from wait to gathered
    return_A: bool = False

    op = ops.all_gather_matmul

    @property
    def detail(self) -> str:
        count = len(self.products)
        return f"{count} product{'s' if count > 1 else ''}{', A returned' if self.return_A else ''}"

    @classmethod
    def from_collective(cls, c: Collective) -> AllGatherMatmul:
        """
        Raises:
            LeftAlone: no product of the gathered tensor is exactly what the op computes.
        """
        x = val(c.x)
        if x.dim() == 0:
            raise LeftAlone("its input is a number")
        gathered, dim, permutation, between = _joined(c)
        products = _products(c, gathered)
        rows, k = (val(_left(products[0])).shape[i] for i in (0, 1))
        if dim == 0:
            # Rows stay rows, whatever their shape was: one matrix over the other.
            if not known(rows % c.world == 0):
                raise LeftAlone(
                    f"the {rows} rows of the product are not known to come from {c.world} equal shards"
                )
            shape: tuple[Size, ...] = (rows // c.world, k)
        else:
            shape = tuple(x.shape if permutation is None else (x.shape[i] for i in permutation))
        check_no_mutation(c.node, products[-1])
        return cls(c, gathered, dim, permutation, shape, products, between)

    def replace(self) -> None:
        c, first = self.collective, self.products[0]
        shard = c.x
        if self.permutation is not None:
            shard = call(first, aten.permute.default, shard, list(self.permutation))
        if self.dim == 0:
            shard = reshape(shard, self.shard_shape, first, [c.x])
        Bs: list[fx.Node] = [p.args[-1] for p in self.products]  # type: ignore[misc]
        fused = call(first, self.op, shard, Bs, self.dim, c.group, return_A=False)
        outs = call(first, operator.getitem, fused, 1)
        doomed = [c.node, c.wait, *self.between]
        for i, product in enumerate(self.products):
            shape = val(product).shape
            out = reshape(call(product, operator.getitem, outs, i), shape, product, [shard, Bs[i]])
            if product.target is aten.addmm.default:
                out = call(product, aten.add.Tensor, out, product.args[0])
            product.replace_all_uses_with(out)
            doomed += _way(product, self.gathered)
            product.graph.erase_node(product)
        _sizes_from_shard(c, self.gathered, self.permutation)
        used = erase_unused(doomed)
        if self.gathered in used:
            self._return_A(fused, shard)
            erase_unused(used)

    def _return_A(self, fused: fx.Node, shard: fx.Node) -> None:
        """The op gives the gathered tensor, too, to all that still use it."""
        self.return_A = True
        before = fused.next
        fused.kwargs = {**fused.kwargs, "return_A": True}
        probe = call(before, self.op, *fused.args, **fused.kwargs)
        fused.meta["val"] = probe.meta["val"]
        fused.graph.erase_node(probe)
        A = call(before, operator.getitem, fused, 0)
        replaced = self.gathered
        if self.permutation is not None:
            # The permuted tensor stays, with the strides it had: A stands for what it permutes.
            A = call(
                before, aten.permute.default, A, [self.permutation.index(i) for i in range(val(A).dim())]
            )
            replaced = self.collective.wait
        gathered = reshape(A, val(replaced).shape, before, [shard, self.collective.x])
        replaced.replace_all_uses_with(gathered)


def _joined(c: Collective) -> tuple[fx.Node, int, tuple[int, ...] | None, tuple[fx.Node, ...]]:
    """The gathered tensor, along which dimension of the (permuted) input, and the nodes from wait to it."""
    wait = c.wait
    if _rows(wait):
        return wait, 0, None, ()
    users = [u for u in wait.users if not calls(u, aten.sym_size.int)]
    cats = list(dict.fromkeys(n for u in users for n in _cats(u)))
    if len(cats) == 1:
        parts = Parts.from_cat(cats[0], c.world)
        if parts.source is not wait or parts.cut_dim != 0:
            raise LeftAlone(f"{what(cats[0])} does not join the shards")
        others = [u for u in users if u not in parts.nodes]
        if others:
            raise LeftAlone(f"the gathered tensor is used before its shards are joined, by {some(others)}")
        dim = parts.join_dim
        # Before dimension dim there is one row only: joined along it or along 0 is the same.
        if dim != val(c.x).dim() - 1 and all(known(s == 1) for s in val(c.x).shape[:dim]):
            dim = 0
        return cats[0], dim, None, parts.nodes
    if len(users) == 1 and calls(users[0], aten.permute.default):
        permutation = tuple(int(p) % val(wait).dim() for p in users[0].args[1])  # type: ignore[arg-type, union-attr]
        if permutation[0] != 0:
            return users[0], permutation.index(0), permutation, ()
    raise LeftAlone(_why_no_product(wait))


def _cats(user: fx.Node) -> list[fx.Node]:
    """The cat nodes that join what ``user`` cuts."""
    parts = list(user.users) if calls(user, aten.split.Tensor, aten.split_with_sizes.default) else [user]
    return [n for part in parts for n in part.users if calls(n, aten.cat.default)]


def _rows(gathered: fx.Node) -> list[fx.Node]:
    """mm and addmm whose left operand is the gathered tensor, reshaped to a matrix."""
    seen = closure(gathered, lambda n: (u for u in n.users if flat(u)))
    return [
        product
        for n in seen
        for product in n.users
        if calls(product, *_PRODUCTS) and _left(product) is n and val(n).dim() == 2
    ]


def _left(product: fx.Node) -> fx.Node:
    left = product.args[-2]
    assert isinstance(left, fx.Node)
    return left


def _products(c: Collective, gathered: fx.Node) -> list[fx.Node]:
    """The products that one op can compute, in the order of the graph."""
    candidates = set(_rows(gathered))
    if not candidates:
        raise LeftAlone(_why_no_product(gathered))
    ordered = [n for n in c.node.graph.nodes if n in candidates]
    after = closure(c.node, lambda n: n.users)
    columns = val(gathered).shape[-1]
    products: list[fx.Node] = []
    reasons = []
    for product in ordered:
        k = val(_left(product)).shape[1]
        dtype = val(product).dtype
        if product.args[-1] in after:
            reasons.append(f"the right operand of {what(product)} depends on the gathered tensor, too")
        elif any(argument(product, 9, name, 1) != 1 for name in ("alpha", "beta")):
            reasons.append(f"{what(product)} scales its operands")
        elif gathered is not c.wait and not known(k == columns):
            reasons.append(
                f"{what(product)} multiplies rows of {k}, the gathered tensor has rows of {columns}"
            )
        elif products and not known(k == val(_left(products[0])).shape[1]):
            reasons.append(f"{what(product)} multiplies rows of another length")
        elif dtype != val(c.x).dtype or not contiguous(val(product)):
            reasons.append(f"{what(product)} has another dtype or layout")
        else:
            products.append(product)
    if not products:
        raise LeftAlone("; ".join(reasons))
    return products


def _why_no_product(gathered: fx.Node) -> str:
    seen = closure(gathered, lambda n: (u for u in n.users if flat(u)))
    users = [u for n in gathered.graph.nodes if n in seen for u in n.users if u not in seen]
    right = [u for u in users if calls(u, *_PRODUCTS) and u.args[-1] in seen]
    if right:
        return f"the gathered tensor is the right operand of {some(right)}"
    return f"no matrix product takes the gathered tensor, but {some(users) if users else 'nothing'}"


def _way(product: fx.Node, gathered: fx.Node) -> list[fx.Node]:
    """The nodes from the gathered tensor to the product's left operand."""
    nodes = [gathered]
    node = _left(product)
    while node is not gathered:
        nodes.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return nodes


def _sizes_from_shard(c: Collective, gathered: fx.Node, permutation: Sequence[int] | None) -> None:
    """A size of the gathered tensor is read from the shard: it is no reason to return A."""
    for node in dict.fromkeys((c.node, c.wait, gathered)):
        shape = val(node).shape
        for user in [u for u in node.users if calls(u, aten.sym_size.int)]:
            dim = int(user.args[1]) % len(shape)  # type: ignore[arg-type]
            source = permutation[dim] if permutation is not None and node is gathered else dim
            own = val(c.x).shape[source]
            size: fx.Node | None = None
            if known(own == shape[dim]):
                size = call(user, aten.sym_size.int, c.x, source)
            elif known(own * c.world == shape[dim]):
                size = call(user, operator.mul, c.world, call(user, aten.sym_size.int, c.x, source))
            if size is not None and isinstance(size.meta["val"], torch.SymInt):
                user.replace_all_uses_with(size)
                user.graph.erase_node(user)
