"""A scaled product, then reduce_scatter: ``fused_scaled_matmul_reduce_scatter``.

Whatever reshapes, permutes, or cuts into parts and joins stands between. A product of float32 that is cast to 16 bits
before it is reduced is the op's with such a result: it is rounded to be sent, and summed in float32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from ....kernels.device.gemm.scaling import OUT_DTYPES, ScaleKind
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.index_map import Dims, numel, plain
from ..graph.nodes import LeftAlone, some, val, what
from ..graph.rewrite import call, make_contiguous, put_in_place, rearrange, reshape, undone_if_left
from ..graph.scaling import Scaling
from ..graph.views import ViewStep, steps_back
from ..patterns.matmul_reduce_scatter import parts_of_input, scattered_part
from ..patterns.pattern import Pattern
from .scaled_mm import ScaledMm, scaled_mm


def match_scaled_matmul_reduce_scatter(c: Collective) -> Pattern | None:
    """None where what is reduced is no scaled product. LeftAlone: it is one, but not exactly what the op computes."""
    steps = list(steps_back(c.x))
    if (product := scaled_mm(steps[-1].source if steps else c.x)) is None:
        return None
    dims = parts_of_input(c)
    try:
        product.check()
    except LeftAlone as e:
        raise LeftAlone(f"{what(product.node)}: {e}") from e
    nodes: list[fx.Node] = []
    for step in steps:
        if isinstance(step.change, Scaling):
            raise LeftAlone(f"{what(step.node)} multiplies the scaled product by {step.change.factor:g}")
        dims = step.backward(dims)
        nodes += step.nodes
    inside = {*nodes, c.node}
    if others := [u for n in (*nodes, product.node) for u in n.users if u not in inside]:
        raise LeftAlone(f"the scaled product is also used by {some(others)}")
    out_dtype = val(c.x).dtype
    _check_dtypes(product, steps, out_dtype)
    check_no_write(product.node, c.node)
    part, dim = scattered_part(c, *dims)
    of_columns = dim == len(part) - 1
    cast = " → cast" if product.out_dtype != out_dtype else ""
    m, k = val(product.left).shape
    return Pattern(
        collective=c,
        op=schema.scaled_matmul_reduce_scatter,
        form=f"scaled product{cast} → reduce_scatter{' of columns' * of_columns}",
        detail=f"1 product, {product.kind.value} scales",
        sizes=(m, product.width, k),
        dtype=out_dtype,
        order=(part, tuple(val(c.wait).shape)),
        replace=partial(_replace, c, product, dim, part, nodes),
        dim=dim,
        last_dim=of_columns,
        scaled=product.products(out_dtype, travels=False),
    )


def _replace(c: Collective, product: ScaledMm, dim: int, part: Dims, nodes: list[fx.Node]) -> None:
    """``part`` are the dimensions of what the op gives, this rank's part of ``product``, which it scatters along
    ``dim`` of the shape that it is told; ``nodes`` stand between the product and the collective."""
    at = c.node
    with undone_if_left():
        left, scale = product.left, product.left_scale
        if len(part) > 2:
            lead = [numel(part[0]), c.world * numel(part[1])]
            left = reshape(left, [*lead, val(left).shape[1]], at)
            if product.kind is not ScaleKind.TENSOR:
                scale = reshape(scale, [*lead, val(scale).shape[1]], at, [left])
        if product.kind is ScaleKind.TENSOR:  # of no dimension: none could be taken for a row's
            scale = reshape(scale, [], at)
        operands = left, product.right, scale, product.right_scale
        more = None, product.bias, None, val(c.x).dtype, product.fast
        where = c.reduce_op, dim, dim, c.group
        out = call(at, schema.scaled_matmul_reduce_scatter, *operands, *where, *more, group_size=c.world)
        want = val(c.wait).shape
        out = rearrange(out, part, plain(want), want, at, [product.left])
        out = make_contiguous(out, at)
    put_in_place({c.wait: out}, [product.node, *nodes, c.node, c.wait])


def _check_dtypes(product: ScaledMm, steps: list[ViewStep], want: torch.dtype) -> None:
    """What is cast is cast once, from float32 to what is reduced."""
    casts = [step.node for step in steps if step.change is not None]
    if not casts:
        return
    if want not in OUT_DTYPES or len(casts) > 1 or product.out_dtype != torch.float32:
        raise LeftAlone(
            f"the scaled product is rounded to {product.out_dtype} and then cast by {some(casts)}, where the op rounds "
            f"to {want} alone"
        )
