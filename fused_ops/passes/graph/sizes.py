"""What can be said of sizes and shapes for certain.

Sizes may be symbolic. What is not known to be true is taken to be false, without a guard. Guards come only with what is
put in: what its fake implementation checks holds for the inputs that the graph is then used for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import LeftAlone

Size = Any  # int or torch.SymInt


def known(fact: Any) -> bool:
    """Whether ``fact`` about sizes holds for every input that the graph may get."""
    return statically_known_true(fact)


def hint(size: Size) -> int:
    """What a size is in the example that the graph was made with. LeftAlone: it depends on data."""
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise LeftAlone(f"the size {size} depends on data")
    return int(size.node.hint)


def hint_or_one(size: Size) -> int:
    """The same; 1 for a size that depends on data."""
    return hint(size) if isinstance(size, int) or size.node.has_hint() else 1


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, as ``hint``."""
    return hint(tensor.numel()) * tensor.dtype.itemsize


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both have the same dtype and are known to have the same shape."""
    return a.dtype == b.dtype and same_shape(a.shape, b.shape)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the tensor is known to be contiguous."""
    return bool(is_contiguous_or_false(tensor))
