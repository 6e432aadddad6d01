"""Scaled products in a graph: ``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm``, as torch.compile has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....kernels.device.gemm.scaling import FP8, OUT_DTYPES, ScaledProducts, ScaleKind
from ..graph.nodes import LeftAlone, argument, aten, calls, is_val, val, what
from ..graph.sizes import Size, is_contiguous, known

_SECOND = getattr(aten, "_scaled_mm_v2", None)
#: What such products are: the second is what torch.nn.functional.scaled_mm calls, where torch has it.
SCALED_MMS = (aten._scaled_mm.default, *([] if _SECOND is None else [_SECOND.default]))
# As torch.nn.functional.ScalingType numbers them: one scale each, those of rows, those of 1 x 128 and of 128 x 128.
_KINDS = (([0], [0]), ([1], [1]), ([4], [5]))


@dataclass(frozen=True)
class ScaledMm:
    """``_scaled_mm(left, right, left_scale, right_scale, bias)`` of matrices."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_scale: fx.Node
    right_scale: fx.Node
    bias: fx.Node | None
    fast: bool
    why_not: str  # of its arguments

    @property
    def given(self) -> list[fx.Node]:
        """What it takes besides the left operand and its scales."""
        return [self.right, self.right_scale, *([] if self.bias is None else [self.bias])]

    @property
    def out_dtype(self) -> torch.dtype:
        return val(self.node).dtype

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
        """LeftAlone: weft's ops compute no such product."""
        if self.why_not:
            raise LeftAlone(self.why_not)
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
    if not calls(node, *SCALED_MMS) or not is_val(node):
        return None
    if node.target is SCALED_MMS[0]:
        operands, bias = [*node.args[:4]], argument(node, 4, "bias")
        fast = bool(argument(node, 7, "use_fast_accum", False))
        why_not = "it has a scale of its result" if argument(node, 5, "scale_result") is not None else ""
    else:
        lists: list[Any] = list(node.args[2:8])
        scales, kinds, swizzles = lists[::3], lists[1::3], lists[2::3]
        if any(len(each) != 1 for each in scales):
            return None
        operands, bias = [*node.args[:2], *(each[0] for each in scales)], argument(node, 8, "bias")
        fast = bool(argument(node, 11, "use_fast_accum", False))
        odd = any(map(any, swizzles)) or argument(node, 10, "contraction_dim", [])
        plain = tuple(map(list, kinds)) in _KINDS and not odd
        why_not = "" if plain else f"its scales are of the kinds {kinds[0]} and {kinds[1]}, or swizzled"
    left, right, of_left, of_right = operands
    if not (is_val(left) and is_val(right) and is_val(of_left) and is_val(of_right)):
        return None
    if bias is not None and not is_val(bias):
        return None
    return ScaledMm(node, left, right, of_left, of_right, bias, fast, why_not)
