"""RMSNorms.

Known are the spellings of ``s * rsqrt(mean(s ** 2) + eps) * weight`` that multiply by the weight in float32, as torch's
rms_norm does, or round before, as Hugging Face's models do; with a number added to the weight, as in Gemma.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.collectives import LeftAlone, aten, calls, is_val, only_user, some, val, what
from .steps import (
    FoundNorm,
    cast_behind,
    expect,
    is_mean_of_rows,
    is_row,
    is_square,
    next_of,
    of_dtype,
    scale_of,
    uncast_weight,
)


def rms_norm_of(x: fx.Node, wide: fx.Node, dtype: torch.dtype) -> FoundNorm | None:
    """The RMSNorm of ``x``, of the given dtype, read by way of ``wide``; None if there is none.

    Raises:
        LeftAlone: there is one, and it is none that the op computes.
    """
    if val(wide).dtype != torch.float32:
        return None
    for square in wide.users:
        if is_square(square, wide) and calls(only_user(square), aten.mean.dim):
            return _from_square(x, wide, square, dtype)
    return None


def _from_square(x: fx.Node, wide: fx.Node, square: fx.Node, dtype: torch.dtype) -> FoundNorm:
    mean = next_of(square)
    expect(is_mean_of_rows(mean, square), mean)
    eps, (plus, root) = scale_of(mean)
    scaled = next_of(root)
    expect(calls(scaled, aten.mul.Tensor) and {*scaled.args} == {wide, root}, scaled)
    nodes = [square, mean, plus, root, scaled]
    if wide is not x:
        nodes.append(wide)
        if others := [u for u in wide.users if u not in (square, scaled)]:
            raise LeftAlone(f"{what(wide)} is also used by {some(others)}")
    last = scaled
    if (cast := cast_behind(last, dtype)) is not None:
        last = cast
        nodes.append(last)
    product = next_of(last)
    expect(calls(product, aten.mul.Tensor), product)
    factor = product.args[1] if product.args[0] is last else product.args[0]
    expect(is_val(factor), product)
    weight, offset, read = uncast_weight(factor, dtype)  # type: ignore[arg-type]
    if not is_row(weight, x, dtype):
        raise LeftAlone(f"{what(weight)} is no weight of its rows")
    nodes += of_dtype(product, dtype)
    return FoundNorm(nodes[-1], weight, eps, nodes, read, offset)
