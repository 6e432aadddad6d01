"""A number by which every element of a tensor is multiplied: a factor, a divisor, or a minus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from .nodes import LeftAlone, aten, calls, is_val, val
from .rewrite import call, cast

_FACTORS = (aten.mul.Tensor, aten.mul.Scalar)
_DIVISORS = (aten.div.Tensor, aten.div.Scalar)
_MINUS = (aten.neg.default,)
# Beyond that a product with what fits would not fit, or would vanish.
_LARGEST = 2.0**64
# Beyond that an operand with what fits might not fit, where its product does.
_LARGEST_OF_OPERAND = 2.0**16


@dataclass(frozen=True)
class Scaling:
    """``op(x, *numbers)``, of the dtype of x: ``factor * x``."""

    op: Any
    numbers: tuple[int | float, ...]

    @property
    def factor(self) -> float:
        if not self.numbers:
            return -1.0
        (number,) = self.numbers
        return 1.0 / number if self.op in _DIVISORS else float(number)


# What is done to each element of a tensor alike: it is cast or multiplied.
Change: TypeAlias = "torch.dtype | Scaling"


def scaling(node: fx.Node) -> tuple[fx.Node, Scaling] | None:
    """The tensor that the node multiplies by a number, and how; None if it does something else. A factor that is 0 or
    no number is none: it does not leave what an infinite element is."""
    if not calls(node, *_FACTORS, *_DIVISORS, *_MINUS) or not is_val(node):
        return None
    source, *numbers = node.args
    if calls(node, aten.mul.Tensor) and not is_val(source):
        source, numbers = numbers[0], [source]
    if not is_val(source) or not all(map(is_factor, numbers)):
        return None
    dtype = val(node).dtype
    if dtype != val(source).dtype or not dtype.is_floating_point or node.kwargs:
        return None
    return source, Scaling(node.target, tuple(numbers))  # type: ignore[arg-type]


def is_factor(number: object) -> bool:
    """Whether something may be multiplied by the number, and divided by it again."""
    return (
        isinstance(number, int | float)
        and not isinstance(number, bool)
        and math.isfinite(number)
        and 1 / _LARGEST <= abs(number) <= _LARGEST
    )


def scaled(node: fx.Node, factor: float, before: fx.Node) -> fx.Node:
    """``factor * node``, before the given node; the node itself for 1."""
    if factor == 1:
        return node
    target, numbers = (aten.neg.default, ()) if factor == -1 else (aten.mul.Tensor, (factor,))
    return call(before, target, node, *numbers)


def changed(node: fx.Node, changes: tuple[Change, ...], before: fx.Node) -> fx.Node:
    """The node, cast and multiplied by one after the other."""
    for change in changes:
        if isinstance(change, Scaling):
            node = call(before, change.op, node, *change.numbers)
        else:
            node = cast(node, change, before)
    return node


def check_factor(factor: float, dtype: torch.dtype, what: str) -> None:
    """An operand of this dtype may be multiplied by the factor before its product is taken. LeftAlone: it may then be
    too large for the dtype, or too small."""
    if abs(factor) == 1:
        return
    if dtype == torch.float16:
        raise LeftAlone(
            f"{what} is multiplied by {factor:g}, and an operand may then be too large or too small for {dtype}"
        )
    if not 1 / _LARGEST_OF_OPERAND <= abs(factor) <= _LARGEST_OF_OPERAND:
        raise LeftAlone(f"{what} is multiplied by {factor:g}, with which an operand may be out of range")
