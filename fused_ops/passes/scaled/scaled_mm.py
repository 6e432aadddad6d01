"""Scaled products in a graph: ``aten._scaled_mm`` as torch.compile leaves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ....kernels.device.gemm.scaling import FP8, OUT_DTYPES, ScaledProducts, ScaleKind
from ..graph.collectives import (
    LeftAlone,
    Size,
    argument,
    aten,
    calls,
    is_contiguous,
    is_val,
    known,
    val,
    what,
)

SCALED_MM = aten._scaled_mm.default


@dataclass(frozen=True)
class ScaledMm:
    """``_scaled_mm(left, right, left_scale, right_scale, bias)`` of matrices."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_scale: fx.Node
    right_scale: fx.Node
    bias: fx.Node | None

    @property
    def given(self) -> list[fx.Node]:
        """What it takes besides the left operand and its scales."""
        return [self.right, self.right_scale, *([] if self.bias is None else [self.bias])]

    @property
    def out_dtype(self) -> torch.dtype:
        return val(self.node).dtype

    @property
    def fast(self) -> bool:
        return bool(argument(self.node, 7, "use_fast_accum", False))

    @property
    def width(self) -> Size:
        return val(self.right).shape[-1]

    @property
    def kind(self) -> ScaleKind:
        """How the left operand is scaled."""
        scale = val(self.left_scale)
        if known(scale.numel() == 1):
            return ScaleKind.TENSOR
        return ScaleKind.ROWS if known(scale.shape[-1] == 1) else ScaleKind.BLOCKS

    def products(self, out_dtype: torch.dtype, *, travels: bool) -> ScaledProducts:
        """What ``profitability`` is told of it, rounded to a dtype."""
        return ScaledProducts(
            types=(val(self.left).dtype, val(self.right).dtype),
            kind=self.kind,
            out_dtype=out_dtype,
            promote=self.kind is ScaleKind.BLOCKS or not self.fast,
            travels=travels,
        )

    def check(self) -> None:
        """
        Raises:
            LeftAlone: weft's ops compute no such product.
        """
        if argument(self.node, 5, "scale_result") is not None:
            raise LeftAlone("it has a scale of its result")
        if self.out_dtype not in OUT_DTYPES:
            raise LeftAlone(f"its result is {self.out_dtype}, not bfloat16, float16 or float32")
        for operand in (self.left, self.right):
            if val(operand).dtype not in FP8:
                raise LeftAlone(f"{what(operand)} is {val(operand).dtype}, not float8_e4m3fn or float8_e5m2")
        for scale in (self.left_scale, self.right_scale):
            if val(scale).dtype != torch.float32:
                raise LeftAlone(f"{what(scale)}, its scale, is {val(scale).dtype}, not float32")
        (k, _), (row, column) = val(self.right).shape, val(self.right).stride()
        if not (known(row == 1) and known(column >= k)):
            raise LeftAlone(f"{what(self.right)}, its right operand, is not column-major")
        if not is_contiguous(val(self.node)):
            raise LeftAlone("it has another layout")


def scaled_mm(node: fx.Node) -> ScaledMm | None:
    """The node as a scaled product, None if it is none."""
    if not calls(node, SCALED_MM) or not is_val(node):
        return None
    left, right, left_scale, right_scale = node.args[:4]
    bias = argument(node, 4, "bias")
    if not (is_val(left) and is_val(right) and is_val(left_scale) and is_val(right_scale)):
        return None
    if bias is not None and not is_val(bias):
        return None
    return ScaledMm(node, left, right, left_scale, right_scale, bias)
