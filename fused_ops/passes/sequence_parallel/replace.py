"""A region in its graph, on each rank's own rows: reduce-scatters, what is computed row by row, and all-gathers."""

from __future__ import annotations

import operator

from torch import fx

from ..agreement.signature import COMPARED, compare
from ..graph.collectives import Collective
from ..graph.nodes import FLAT, aten, c10d, calls, memory, val
from ..graph.rewrite import call, make_contiguous, put_in_place, reshape, undone_if_left
from ..graph.row_wise import step_by_rows, sum_of_own_rows
from ..graph.sizes import Size, same_shape
from ..origin import put_for
from .region import Region


def put_on_rows(region: Region) -> dict[fx.Node, Collective]:
    """Changes the graph; gives the reduce-scatters, and in place of which all-reduce each is. LeftAlone: a size is not
    there where it is needed. The graph is as it was."""
    layout = region.layout
    own: dict[fx.Node, fx.Node] = {}
    whole: dict[fx.Node, fx.Node] = {}
    new: dict[fx.Node, fx.Node] = {}
    scattered: dict[fx.Node, Collective] = {}
    roots, needed = {c.wait: c for c in region.collectives}, {*region.gathered}
    with undone_if_left():
        for node in region.leads:
            with put_for(node):
                if node in roots:
                    pending, own[node] = _scattered(roots[node], region)
                    scattered[pending] = roots[node]
                else:
                    own[node] = step_by_rows(node, own, region.leads, layout)
                if node in needed:
                    whole[node] = _gathered(own[node], node, region)
        for chunk, source in region.chunks.items():
            with put_for(chunk):
                new[chunk] = reshape(own[source], val(chunk).shape, chunk)
        for total, source in region.sums.items():
            with put_for(total):
                part = sum_of_own_rows(total, own[source], layout)
                pending = call(total, c10d.all_reduce.default, part, "sum", layout.group)
                new[total] = call(total, c10d.wait_tensor.default, pending)
        for size, (x, dim) in region.sizes.items():
            with put_for(size):
                new[size] = call(size, aten.sym_size.int, x, dim)
    # A number of own rows becomes one of all rows, for all ranks; and what meets them is taken to be the same.
    compare(region.leads, layout.group, region.leads)
    for node in own.values():
        if not calls(node, *FLAT):
            node.meta[COMPARED] = {layout.group}
    for node, gathered in whole.items():
        for user in region.all_rows(node):
            user.replace_input_with(node, gathered)
    gone = [*region.leads, *new, *(n for c in region.collectives for n in (c.node, c.wait))]
    splits = [n for chunk in region.chunks for n in chunk.all_input_nodes if n not in region.leads]
    gone += [n for split in splits for n in (split, *split.users)]
    for c in region.collectives:
        x = c.x
        while calls(x, *FLAT):
            gone.append(x)
            x = x.args[0]  # type: ignore[assignment]
    put_in_place(new, gone)
    return scattered


def _scattered(c: Collective, region: Region) -> tuple[fx.Node, fx.Node]:
    """The reduce-scatter in place of an all-reduce, and the node that waits for it."""
    layout, at = region.layout, c.node
    with put_for(at):
        x = _in_shape(c.x, [*layout.lead, val(c.x).shape[-1]], at)
        if layout.dim:
            x = call(at, aten.cat.default, _parts(x, layout.own[layout.dim], layout.dim, region, at), 0)
        x = make_contiguous(x, at)
        pending = call(at, c10d.reduce_scatter_tensor.default, x, c.reduce_op, layout.world, layout.group)
    return pending, call(c.wait, c10d.wait_tensor.default, pending)


def _in_shape(x: fx.Node, shape: list[Size], at: fx.Node) -> fx.Node:
    """The node with this shape; of what it was reshaped from, which says more of a product with symbolic sizes, if
    that has it."""
    node = x
    while not same_shape(val(node).shape, shape) and calls(node, *FLAT) and memory(node.args[0]) == memory(x):  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node if same_shape(val(node).shape, shape) else reshape(x, shape, at)


def _gathered(own: fx.Node, node: fx.Node, region: Region) -> fx.Node:
    """All rows, as the node has them, before it."""
    layout = region.layout
    own = make_contiguous(own, node)
    pending = call(node, c10d.all_gather_into_tensor.default, own, layout.world, layout.group)
    rows = call(node, c10d.wait_tensor.default, pending)
    if layout.dim:
        rows = call(node, aten.cat.default, _parts(rows, layout.lead[0], 0, region, node), layout.dim)
    return reshape(rows, val(node).shape, node, [node])


def _parts(x: fx.Node, size: int, dim: int, region: Region, at: fx.Node) -> list[fx.Node]:
    split = call(at, aten.split.Tensor, x, size, dim)
    return [call(at, operator.getitem, split, i) for i in range(region.layout.world)]
