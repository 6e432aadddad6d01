"""all_reduce, then the residual is added and the sum normalised: what follows a row-parallel layer.

Known are the two spellings of the norm ``s * rsqrt(mean(s ** 2) + eps) * weight``: that of torch's rms_norm, which
multiplies by the weight in float32, and that of Hugging Face's models, which rounds before. A graph for training has
none of them: its backward pass uses what stands between.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph import rewrite
from ..graph.collectives import (
    Collective,
    alike,
    argument,
    aten,
    calls,
    communicates,
    first_write,
    group_of,
    is_contiguous,
    is_val,
    known,
    only_user,
    val,
)
from ..graph.rewrite import call
from ..graph.views import CASTS, unchanged


@dataclass
class RmsNorm:
    """``normed`` is the norm of ``added``, the reduced tensor plus ``residual``."""

    added: fx.Node
    normed: fx.Node
    residual: fx.Node
    weight: fx.Node
    eps: float
    nodes: list[fx.Node]

    @classmethod
    def after(cls, c: Collective) -> RmsNorm | None:
        """What follows a collective, if it is exactly that."""
        reduced, copies = c.wait, []
        while is_val(copy := only_user(reduced)) and unchanged(copy) is not None:
            copies.append(copy)
            reduced = copy
        add = only_user(reduced)
        if not calls(add, aten.add.Tensor) or argument(add, 9, "alpha", 1) != 1 or not c.only_waited_for:
            return None
        residual = add.args[1] if add.args[0] is reduced else add.args[0]
        if residual is reduced or not is_val(residual) or not alike(val(residual), val(c.wait)):
            return None
        found = _norm(add)
        if found is None or not is_contiguous(val(add)) or not is_contiguous(val(found[0])):
            return None
        normed, weight, eps, nodes = found
        if not weight < add or first_write(c.node, normed) is not None:
            return None
        node = c.node.next
        while node is not add:
            if communicates(node) and group_of(node) == c.group:
                return None
            node = node.next
        return cls(add, normed, residual, weight, eps, [*nodes, add, *copies])

    def replaced_by(self, op: Any, c: Collective) -> dict[fx.Node, fx.Node]:
        """The op in the graph, and what takes the place of which node."""
        at = self.added
        both = rewrite.fused(at, op, c, c.x, self.residual, self.weight, self.eps)
        normed, added = (call(at, operator.getitem, both, i) for i in (0, 1))
        return {
            self.normed: rewrite.make_contiguous(normed, at),
            self.added: rewrite.make_contiguous(added, at),
        }


def _norm(x: fx.Node) -> tuple[fx.Node, fx.Node, float, list[fx.Node]] | None:
    """The norm of a node: the node that is it, the weight, eps, and all nodes from the one to the other."""
    for user in x.users:
        wide = user if calls(user, *CASTS) and val(user).dtype == torch.float32 else x
        if val(wide).dtype != torch.float32:
            continue
        for square in wide.users:
            if _is_square(square, wide) and (found := _from_square(x, wide, square)) is not None:
                return found
    return None


def _from_square(
    x: fx.Node, wide: fx.Node, square: fx.Node
) -> tuple[fx.Node, fx.Node, float, list[fx.Node]] | None:
    mean = only_user(square)
    if not calls(mean, aten.mean.dim) or not argument(mean, 2, "keepdim", False) or "dtype" in mean.kwargs:
        return None
    dims = argument(mean, 1, "dim")
    if not isinstance(dims, (list, tuple)) or [d % val(x).dim() for d in dims] != [val(x).dim() - 1]:
        return None
    plus = only_user(mean)
    # Of two arguments: one more, by name or not, scales the second.
    if not calls(plus, aten.add.Tensor, aten.add.Scalar) or plus.kwargs or len(plus.args) != 2:
        return None
    if plus.args[0] is not mean:
        return None
    eps = plus.args[1]
    root = only_user(plus)
    if not isinstance(eps, float) or not calls(root, aten.rsqrt.default):
        return None
    scaled = only_user(root)
    if not calls(scaled, aten.mul.Tensor) or {*scaled.args} != {wide, root}:
        return None
    nodes = [square, mean, plus, root, scaled]
    if wide is not x:
        nodes.append(wide)
        if len(wide.users) != 2:
            return None
    last = scaled
    if calls(only_user(last), *CASTS) and val(x).dtype == val(only_user(last)).dtype:
        last = only_user(last)
        nodes.append(last)
    product = only_user(last)
    if not calls(product, aten.mul.Tensor):
        return None
    weight = product.args[1] if product.args[0] is last else product.args[0]
    if not is_val(weight) or val(weight).dim() != 1 or not known(val(weight).shape[0] == val(x).shape[-1]):
        return None
    nodes.append(product)
    if val(product).dtype != val(x).dtype:
        product = only_user(product)
        if not calls(product, *CASTS) or val(product).dtype != val(x).dtype:
            return None
        nodes.append(product)
    return (product, weight, eps, nodes) if val(weight).dtype == val(x).dtype else None


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if calls(node, aten.pow.Tensor_Scalar):
        return node.args == (x, 2)
    return calls(node, aten.mul.Tensor) and node.args == (x, x)
