"""Shards of different sizes, as DTensor gathers and scatters them: padded with rows of zeros to one size.

Padding moves to the other side of the product, so that this stands beside its collective: rows that were cut off the
gathered tensor are cut off the product, and zeros after the product's rows are put after its operand's. They are the
last rows, of each sequence of a batch where that is not sharded, fewer than there are ranks.

A row of zeros times a matrix is zero, or NaN in columns of the matrix that are not finite. There each other row of the
product is infinite or NaN, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import fx

from .graph.effects import first_write
from .graph.nodes import FLAT, LeftAlone, argument, aten, c10d, calls, is_val, val, walk
from .graph.rewrite import call, erase_unused, reshape, undone_if_left
from .graph.sizes import known
from .graph.split_cat import SPLITS, cut_of

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_PADDING = (aten.slice.Tensor, aten.constant_pad_nd.default, aten.full.default, *SPLITS[:2], operator.getitem)
# How shards are joined along another dimension than the first.
_JOINING = (aten.permute.default, aten.cat.default, *SPLITS, operator.getitem)
_GATHER, _SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default


def move_padding(graph: fx.Graph) -> None:
    """Moves it wherever it stands between a collective and a product."""
    for node in list(graph.nodes):
        if node._erased or not calls(node, *_PRODUCTS, aten.cat.default):
            continue
        moved = None
        with suppress(LeftAlone), undone_if_left():
            moved = _cut_after(node) if calls(node, *_PRODUCTS) else _padded_before(node)
        if moved is not None:
            product, result = moved
            made_of = _made_of(node)
            old = next(n for n in made_of if calls(n, *_PRODUCTS))
            product.meta = {**old.meta, "val": val(product)}
            node.replace_all_uses_with(result)
            erase_unused(made_of)


def _cut_after(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``gathered[..., :n, :] @ w`` is ``(gathered @ w)[..., :n, :]``: the product of all rows, and what is cut off it
    has the node's shape."""
    args: Any = node.args
    *addend, left, right = args
    *_, sliced = _flat(left, copies=True)
    cut = cut_of(sliced)
    rows_added = any(is_val(a) and val(a).dim() != 1 for a in addend)
    if cut is None or not calls(sliced, aten.slice.Tensor) or rows_added:
        return None
    source, dim, start, few, _ = cut
    gather = _gather_of(source)
    kept, there = _rows(left), _rows(source)
    if gather is None or kept is None or there is None or first_write(gather, node) is not None:
        return None
    width, shape = val(left).shape[1], list(val(source).shape)
    if not known(start == 0) or dim == len(shape) - 1 or width != shape[-1]:
        return None
    if not 0 < shape[dim] - few < gather.args[1]:  # type: ignore[operator]
        return None
    product = call(node, node.target, *addend, reshape(source, [there, width], node), right, **node.kwargs)
    columns = val(product).shape[1]
    whole = reshape(product, [*shape[:-1], columns], node)
    result = reshape(call(node, aten.slice.Tensor, whole, dim, 0, few), [kept, columns], node)
    return product, result


def _padded_before(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``pad(a @ w)`` is ``pad(a) @ w``, where it is cut into parts, the last of which are padded, and joined again: the
    product, and that in its shape."""
    parts: Any = node.args[0]
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        return None
    dim, source, end = argument(node, 1, "dim", 0) % val(node).dim(), None, 0
    cut_parts: list[fx.Node] = []
    filled_up = False
    for part in parts:
        pads = calls(part, aten.constant_pad_nd.default)
        inner = part.args[0] if pads or calls(part, aten.clone.default) else part
        if (pads and not _pads_last(part, dim)) or val(part).shape[dim] != val(parts[0]).shape[dim]:
            return None
        cut = cut_of(inner)
        if cut is not None and cut.source is (source or cut.source) and known(cut.start == end):
            # Rows after padding would move: shares of 2, 1 and 1 rows have some between them.
            if cut.dim != dim or cut.dropped or (filled_up and not known(cut.start == cut.stop)):
                return None
            source, end = cut.source, cut.stop
            cut_parts += [inner, part]
        elif not pads or val(inner).shape[dim] != 0:
            return None
        filled_up |= pads
    if source is None or not known(end == val(source).shape[dim]) or not _is_scattered(node):
        return None
    chain = list(_flat(source))
    product, have, want = chain[-1], _rows(source), _rows(node)
    shape, wanted = list(val(source).shape), list(val(node).shape)
    if not calls(product, aten.mm.default) or have is None or want is None or not 0 <= dim < len(shape) - 1:
        return None
    missing = wanted[dim] - shape[dim]
    if not 0 < missing < len(parts) or have != val(product).shape[0] or shape[-1] != val(product).shape[1]:
        return None
    inside = {*chain, *cut_parts, *(part.args[0] for part in cut_parts)}
    if any(user not in inside and user is not node for n in inside for user in n.users):  # type: ignore[union-attr]
        return None  # it would be computed twice
    a: Any = product.args[0]
    w = product.args[1]
    depth, after = val(a).shape[1], [0, 0] * (len(shape) - 1 - dim)
    rows = reshape(a, [*shape[:-1], depth], node)
    padded = call(node, aten.constant_pad_nd.default, rows, [*after, 0, missing], 0.0)
    new = call(node, aten.mm.default, reshape(padded, [want, depth], node), w)
    return new, reshape(new, wanted, node)


def _made_of(node: fx.Node) -> list[fx.Node]:
    """The node and what it is made of, the last first, as far as that is padding beside a product and the product."""
    made_of = walk([node], lambda n: (a for a in n.all_input_nodes if calls(a, *FLAT, *_PADDING, *_PRODUCTS)))
    return sorted(made_of, reverse=True)


def _flat(node: Any, *, copies: bool = False) -> Iterator[fx.Node]:
    """The node, and what it only reshapes; with ``copies`` also what it copies."""
    yield node
    while calls(node, *FLAT) and (copies or node.target is not aten.clone.default) and is_val(node.args[0]):
        node = node.args[0]
        yield node


def _gather_of(node: fx.Node) -> fx.Node | None:
    """The gather whose result has these elements, along whichever dimension the shards are joined."""
    made_of = walk([node], lambda n: n.all_input_nodes if calls(n, *FLAT, *_JOINING) else ())
    gathers = {n.args[0] for n in made_of if calls(n, c10d.wait_tensor.default) and calls(n.args[0], _GATHER)}
    return gathers.pop() if len(gathers) == 1 else None  # type: ignore[return-value]


def _rows(node: fx.Node) -> int | None:
    """How many there are of the last dimension; None where that is not known."""
    shape = val(node).shape
    if len(shape) < 2 or not all(isinstance(s, int) for s in shape) or not shape[-1]:
        return None
    return int(val(node).numel() // shape[-1])


def _pads_last(node: fx.Node, dim: int) -> bool:
    """Whether it puts zeros after a dimension, and nowhere else."""
    pads: Any = node.args[1]
    value = argument(node, 2, "value", 0)
    at = 2 * (val(node).dim() - 1 - dim) + 1  # pairs, from the last dimension
    return value == 0 and all(p == 0 for i, p in enumerate(pads) if i != at) and len(pads) > at


def _is_scattered(node: fx.Node) -> bool:
    """Whether a reduce-scatter takes it, maybe cut into parts along this dimension and joined along the first."""
    users = walk([node], lambda n: (u for u in n.users if calls(u, *FLAT, *_JOINING)))
    return any(calls(user, _SCATTER) for n in users for user in n.users)
