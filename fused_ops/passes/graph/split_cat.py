"""Parts of a tensor, as programs cut them.

By ``split`` (or ``split_with_sizes``) with one ``getitem`` a part, or one ``slice`` a part. Or by ``unbind``, or one
``select`` a part, which have no dimension any more where they were cut.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

import torch
from torch import fx

from .nodes import argument, aten, calls, is_val, val
from .sizes import Size, known

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
SLICES = (aten.slice.Tensor, aten.select.int)


class Cut(NamedTuple):
    """``source`` from ``start`` to ``stop`` along ``dim``, which is ``dropped`` if the part has it no more."""

    source: fx.Node
    dim: int
    start: Size
    stop: Size
    dropped: bool = False


def cut_of(node: Any) -> Cut | None:
    """What a node is a part of, without gaps; None if it is none, or it is not known where that starts or ends."""
    if calls(node, operator.getitem) and calls(node.args[0], *SPLITS):
        split, i = node.args
        source, whole = split.args[0], val(split.args[0])
        if calls(split, aten.unbind.int):
            return Cut(source, argument(split, 1, "dim", 0) % whole.dim(), i, i + 1, True)
        dim = argument(split, 2, "dim", 0) % whole.dim()
        start = sum(piece.shape[dim] for piece in split.meta["val"][:i])
        return Cut(source, dim, start, start + val(node).shape[dim])
    if not calls(node, *SLICES) or not is_val(node.args[0]):
        return None
    source, whole = node.args[0], val(node.args[0])
    dim = argument(node, 1, "dim", 0) % whole.dim()
    if calls(node, aten.select.int):
        i = node.args[2]
        return Cut(source, dim, i, i + 1, True) if isinstance(i, int) else None
    size = whole.shape[dim]
    start, stop = _bound(argument(node, 2, "start"), 0, size), _bound(argument(node, 3, "end"), size, size)
    if start is None or stop is None or argument(node, 4, "step", 1) != 1:
        return None
    return Cut(source, dim, start, stop) if known(stop - start == val(node).shape[dim]) else None


def is_cut(node: fx.Node, source: fx.Node, dim: int, start: Size) -> bool:
    """Whether a node is a part of another one, of as many dimensions, that starts there along ``dim``."""
    cut = cut_of(node)
    if cut is None or cut.source is not source or cut.dropped or cut.dim != dim:
        return False
    return known(cut.start == start)


def _bound(given: Any, default: Size, size: Size) -> Size | None:
    bound = given.meta.get("val") if isinstance(given, fx.Node) else given
    # Beyond the end means the end.
    if bound is None or (isinstance(bound, int) and bound == sys.maxsize):
        return default
    if not isinstance(bound, (int, torch.SymInt)):
        return None
    if known(bound < 0):
        return bound + size
    return size if known(bound >= size) else bound
