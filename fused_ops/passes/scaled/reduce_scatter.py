"""A scaled product, then reduce_scatter: ``fused_scaled_matmul_reduce_scatter``.

Whatever reshapes, permutes, or cuts into parts and joins stands between. A product of float32 that is cast to 16 bits
before it is reduced is the op's with such a result: it is rounded to be sent, and summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ....kernels.device.gemm.scaling import OUT_DTYPES, ScaledProducts, ScaleKind
from ...library import schema
from ..graph import rewrite
from ..graph.collectives import Collective, LeftAlone, Size, check_no_write, known, some, val, what
from ..graph.index_map import Dims, around_rank, gathered_dims, numel, plain
from ..graph.rewrite import call
from ..graph.scaling import Scaling
from ..graph.views import ViewStep, view_step
from .scaled_mm import ScaledMm, scaled_mm


@dataclass
class ScaledMatmulReduceScatterPattern:
    """``part`` are the dimensions of what the op gives, this rank's part of ``product``."""

    collective: Collective
    product: ScaledMm
    dim: int  # of the product in the shape that the op is told, where it scatters it
    part: Dims
    nodes: list[fx.Node]  # between the product and the collective

    op = schema.scaled_matmul_reduce_scatter
    others = ()
    adds = ()

    @property
    def last_dim(self) -> bool:
        return self.dim == len(self.part) - 1

    @property
    def order(self) -> tuple[Dims, tuple[Size, ...]]:
        return self.part, tuple(val(self.collective.wait).shape)

    @property
    def out_dtype(self) -> torch.dtype:
        return val(self.collective.x).dtype

    @property
    def form(self) -> str:
        cast = " → cast" if self.product.out_dtype != self.out_dtype else ""
        return f"scaled product{cast} → reduce_scatter{' of columns' if self.last_dim else ''}"

    @property
    def detail(self) -> str:
        return f"1 product, {self.product.kind.value} scales"

    @property
    def scaled(self) -> ScaledProducts:
        """What ``profitability`` is told of the product."""
        return self.product.products(self.out_dtype, travels=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.out_dtype

    @property
    def m(self) -> Size:
        return val(self.product.left).shape[0]

    @property
    def n(self) -> Size:
        return self.product.width

    @property
    def k(self) -> Size:
        return val(self.product.left).shape[1]

    @classmethod
    def from_collective(cls, c: Collective) -> ScaledMatmulReduceScatterPattern | None:
        """None where what is reduced is no scaled product.

        Raises:
            LeftAlone: it is one, but not exactly what the op computes.
        """
        steps, product = _behind(c.x)
        if product is None:
            return None
        rows = val(c.x).shape[0]
        if known(rows != c.world * val(c.wait).shape[0]):
            raise LeftAlone(f"its input has {rows} rows, no multiple of {c.world} ranks")
        try:
            product.check()
        except LeftAlone as e:
            raise LeftAlone(f"{what(product.node)}: {e}") from e
        dims = gathered_dims(val(c.wait).shape, c.world)
        nodes: list[fx.Node] = []
        for step in steps:
            if isinstance(step.change, Scaling):
                raise LeftAlone(f"{what(step.node)} multiplies the scaled product by {step.change.factor:g}")
            dims = step.backward(dims)
            nodes += step.nodes
        inside = {*nodes, c.node}
        if others := [u for n in (*nodes, product.node) for u in n.users if u not in inside]:
            raise LeftAlone(f"the scaled product is also used by {some(others)}")
        _check_dtypes(product, steps, val(c.x).dtype)
        check_no_write(product.node, c.node)
        rows_, columns = dims
        if (around := around_rank(rows_, c.world)) is not None:
            before, after = around
            part = (before, after, columns) if before else (after, columns)
            return cls(c, product, int(bool(before)), part, nodes)
        before, after = around_rank(columns, c.world) or ((), ())
        if before:
            raise LeftAlone("each rank gets columns of the product that do not stand side by side")
        return cls(c, product, 1, (rows_, after), nodes)

    def replace(self) -> None:
        """
        Raises:
            LeftAlone: a size is not there where it is needed, or the op takes no such operand. The graph is as it was.
        """
        c, at, taken = self.collective, self.collective.node, self.product
        with rewrite.undone_if_left():
            left, scale = taken.left, taken.left_scale
            if len(self.part) > 2:
                lead = [numel(self.part[0]), c.world * numel(self.part[1])]
                left = rewrite.reshape(left, [*lead, self.k], at)
                if taken.kind is not ScaleKind.TENSOR:
                    scale = rewrite.reshape(scale, [*lead, val(scale).shape[1]], at, [left])
            if taken.kind is ScaleKind.TENSOR:  # of no dimension: none could be taken for a row's
                scale = rewrite.reshape(scale, [], at)
            operands = left, taken.right, scale, taken.right_scale
            more = None, taken.bias, None, self.out_dtype, taken.fast
            where = c.reduce_op, self.dim, self.dim, c.group
            out = call(at, self.op, *operands, *where, *more, group_size=c.world)
            want = val(c.wait).shape
            out = rewrite.rearrange(out, self.part, plain(want), want, at, [taken.left])
            out = rewrite.make_contiguous(out, at)
        rewrite.replace_result(c, out)
        rewrite.erase_unused([taken.node, *self.nodes, c.node, c.wait])


def _behind(node: fx.Node) -> tuple[list[ViewStep], ScaledMm | None]:
    """The steps back from what is reduced to the scaled product that it is made of, if it is made of one."""
    steps: list[ViewStep] = []
    while (product := scaled_mm(node)) is None:
        try:
            step = view_step(node)
        except LeftAlone:
            step = None
        if step is None:
            return steps, None
        steps.append(step)
        node = step.source
    return steps, product


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
