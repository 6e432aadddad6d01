"""The spelling of a gather or scatter along a dimension other than 0: a tensor cut into parts, joined along another.

``split`` (or ``split_with_sizes``) with one ``getitem`` a part, or one ``slice`` a part; then ``cat``. Or ``unbind``,
or one ``select`` a part, which have no dimension any more where they were cut.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .nodes import LeftAlone, Size, argument, aten, calls, is_val, known, val, what

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
SLICES = (aten.slice.Tensor, aten.select.int)


@dataclass(frozen=True)
class Parts:
    """All of ``source``, cut along ``cut_dim``, the parts joined in order along ``join_dim``.

    The parts are equal if the two differ, and if they have not that dimension (``dropped``); else they may be anything.
    """

    source: fx.Node
    count: int
    cut_dim: int
    join_dim: int
    dropped: bool
    nodes: tuple[fx.Node, ...]  # those between source and cat

    @classmethod
    def from_cat(cls, cat: fx.Node) -> Parts:
        """LeftAlone: it does not join exactly the parts of one tensor, once each and in order."""
        inputs = cat.args[0]
        if not isinstance(inputs, list | tuple) or not all(map(is_val, inputs)):
            raise LeftAlone(f"the inputs of {what(cat)} are not known")
        parts: list[fx.Node] = list(inputs)  # type: ignore[arg-type]
        if calls(parts[0], operator.getitem):
            source, cut_dim, nodes = _split(cat, parts)
        elif calls(parts[0], *SLICES):
            source, cut_dim, nodes = _slices(cat, parts)
        else:
            raise LeftAlone(f"{what(cat)} joins {what(parts[0])}, not a part of a tensor")
        join_dim = argument(cat, 1, "dim", 0) % val(cat).dim()
        # Parts can be joined only if their sizes are the same in every other dimension. So the parts cut along one
        # dimension and joined along another are equal, and those of a split cover all of it. Joined along the
        # dimension they were cut along, they are the tensor itself.
        dropped = calls(nodes[0], aten.unbind.int, aten.select.int)
        return cls(source, len(parts), cut_dim, join_dim, dropped, nodes)


def _in_order(cat: fx.Node, order: list[int]) -> None:
    if order != list(range(len(order))):
        raise LeftAlone(f"{what(cat)} joins the parts in the order {', '.join(map(str, order))}")


def _split(cat: fx.Node, parts: list[fx.Node]) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    split: Any = parts[0].args[0]
    if not calls(split, *SPLITS):
        raise LeftAlone(f"{what(cat)} joins {what(parts[0])}, not a part of a tensor")
    for part in parts:
        if not calls(part, operator.getitem) or part.args[0] is not split:
            raise LeftAlone(f"{what(cat)} joins {what(part)}, which is no part of {what(split)}")
    if (number := len(split.meta["val"])) != len(parts):
        raise LeftAlone(f"{what(split)} makes {number} parts, not {len(parts)}")
    _in_order(cat, [part.args[1] for part in parts])  # type: ignore[misc]
    source = split.args[0]
    at = 1 if calls(split, aten.unbind.int) else 2
    dim = argument(split, at, "dim", 0) % val(source).dim()
    return source, dim, (split, *parts)


def _slices(cat: fx.Node, parts: list[fx.Node]) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    source: fx.Node = parts[0].args[0]  # type: ignore[assignment]
    dims = set()
    for part in parts:
        if part.target is not parts[0].target or part.args[0] is not source:
            raise LeftAlone(f"{what(cat)} joins {what(part)}, which is no part of {what(source)}")
        dims.add(int(argument(part, 1, "dim", 0)) % val(source).dim())
        if calls(part, aten.slice.Tensor) and argument(part, 4, "step", 1) != 1:
            raise LeftAlone(f"{what(part)} takes not every element")
    if len(dims) != 1:
        raise LeftAlone(f"{what(cat)} joins parts cut along different dimensions")
    (dim,) = dims
    whole = val(source).shape[dim]
    if calls(parts[0], aten.select.int):
        _in_order(cat, [part.args[2] for part in parts])  # type: ignore[misc]
        if not known(whole == len(parts)):
            raise LeftAlone(f"{what(cat)} joins {len(parts)} of the {whole} parts of {what(source)}")
        return source, dim, tuple(parts)
    end: Size = 0
    for part, (start, stop) in zip(parts, _bounds(parts, whole), strict=True):
        if not known(start == end):
            raise LeftAlone(
                f"{what(part)} starts at {start}, where {end} is next: parts overlap, miss or swap"
            )
        if not known(stop - start == val(part).shape[dim]):
            raise LeftAlone(f"the size of {what(part)} is not known")
        end = stop
    if not known(end == whole):
        raise LeftAlone(f"the parts that {what(cat)} joins end at {end}, {what(source)} at {whole}")
    return source, dim, tuple(parts)


def _bounds(parts: list[fx.Node], whole: Size) -> Iterator[tuple[Size, Size]]:
    def number(bound: object, default: Size) -> Size:
        if isinstance(bound, fx.Node):
            bound = bound.meta.get("val")
        if bound is None or (isinstance(bound, int) and bound == sys.maxsize):
            return default
        if not isinstance(bound, (int, torch.SymInt)):
            raise LeftAlone(f"where {what(part)} starts or ends is not known")
        if known(bound < 0):
            return bound + whole
        # Beyond the end means the end.
        return default if known(bound >= whole) and default is whole else bound

    for part in parts:
        yield number(argument(part, 2, "start"), 0), number(argument(part, 3, "end"), whole)


def cut_from(node: fx.Node) -> tuple[fx.Node, int, Size] | None:
    """(what the node is a part of, the dimension along which it was cut, where it begins there)."""
    if calls(node, operator.getitem) and calls(node.args[0], *SPLITS[:2]):
        split: Any = node.args[0]
        source, dim = split.args[0], argument(split, 2, "dim", 0) % val(node).dim()
        return source, dim, sum(piece.shape[dim] for piece in split.meta["val"][: node.args[1]])
    if calls(node, aten.slice.Tensor) and argument(node, 4, "step", 1) == 1 and is_val(node.args[0]):
        dim, start = argument(node, 1, "dim", 0) % val(node).dim(), argument(node, 2, "start", 0) or 0
        if isinstance(start, int) and start >= 0:
            return node.args[0], dim, start
    return None
