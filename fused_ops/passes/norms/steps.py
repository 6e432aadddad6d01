"""The steps that norms are written in, one node after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..graph.collectives import LeftAlone, argument, aten, calls, is_val, known, only_user, some, val, what
from ..graph.row_wise import reduced_dims
from ..graph.views import CASTS


@dataclass
class FoundNorm:
    """``normed`` of a sum, by which weight, bias and numbers; ``layer``: of a LayerNorm, else of an RMSNorm.

    ``nodes`` are its steps, ``read`` those in front of its weight and bias that the op makes needless.
    """

    normed: fx.Node
    weight: fx.Node | None
    eps: float
    nodes: list[fx.Node]
    read: list[fx.Node]
    offset: float = 0.0
    bias: fx.Node | None = None
    layer: bool = False

    @property
    def word(self) -> str:
        return "layer_norm" if self.layer else "rms_norm"


def next_of(node: fx.Node) -> fx.Node:
    """The one user of a node."""
    users = list(node.users)
    if len(users) != 1:
        raise LeftAlone(f"{what(node)} is used by {some(users) if users else 'nothing'}")
    return users[0]


def expect(right: object, node: fx.Node) -> None:
    if not right:
        raise LeftAlone(f"{what(node)} is another step than a norm has there")


def is_square(node: fx.Node, x: fx.Node) -> bool:
    if calls(node, aten.pow.Tensor_Scalar):
        return node.args == (x, 2)
    return calls(node, aten.mul.Tensor) and node.args == (x, x)


def of_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether a reduction is along the last dimension of ``x``, which it keeps."""
    along = reduced_dims(node) == [val(x).dim() - 1]
    return along and argument(node, 2, "keepdim", False) is True


def is_mean_of_rows(node: fx.Node, x: fx.Node) -> bool:
    return (
        calls(node, aten.mean.dim) and node.args[0] is x and of_rows(node, x) and "dtype" not in node.kwargs
    )


def scale_of(variance: fx.Node) -> tuple[float, list[fx.Node]]:
    """eps, and the nodes from the variance to the root, the last of them."""
    plus = next_of(variance)
    # Of two arguments: one more, by name or not, scales the second.
    of_two = calls(plus, aten.add.Tensor, aten.add.Scalar) and not plus.kwargs and len(plus.args) == 2
    expect(of_two and plus.args[0] is variance and isinstance(plus.args[1], float), plus)
    root = next_of(plus)
    expect(calls(root, aten.rsqrt.default), root)
    return plus.args[1], [plus, root]  # type: ignore[return-value]


def cast_behind(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The one user of a node, where it casts to that dtype."""
    user = only_user(node)
    return user if calls(user, *CASTS) and val(user).dtype == dtype else None


def is_row(node: fx.Node, x: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node may be a weight or bias of the rows of ``x``."""
    row = val(node).dim() == 1 and known(val(node).shape[0] == val(x).shape[-1])
    return row and val(node).dtype in (dtype, torch.float32)


def uncast(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, list[fx.Node]]:
    """What is cast to float32 from the given dtype, and the cast; another node as it is."""
    source = node.args[0] if calls(node, *CASTS) and val(node).dtype == torch.float32 else None
    return (source, [node]) if is_val(source) and val(source).dtype == dtype else (node, [])


def uncast_weight(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, float, list[fx.Node]]:
    """The weight that a factor is made of, the number that is added to it, and the nodes that the op makes needless."""
    read: list[fx.Node] = []
    offset = 0.0
    if calls(node, aten.add.Tensor) and len(node.args) == 2 and not node.kwargs and is_val(node.args[0]):
        number = node.args[1]
        if isinstance(number, int | float) and not isinstance(number, bool):
            read.append(node)
            node, offset = node.args[0], float(number)
    node, casts = uncast(node, dtype)
    return node, offset, [*read, *casts]


def of_dtype(node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The node in that dtype: itself, or the one cast that uses it, behind it."""
    if val(node).dtype == dtype:
        return [node]
    cast = next_of(node)
    if not calls(cast, *CASTS) or val(cast).dtype != dtype:
        raise LeftAlone(f"its result is not {dtype}, as what is reduced")
    return [node, cast]
