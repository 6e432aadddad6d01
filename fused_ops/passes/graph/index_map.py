"""Where the elements of a tensor lie in another one, as digits of its indices.

A gathered tensor and everything that reshapes, permutes, cuts and joins make of it hold the same elements in another
order. Each dimension of such a tensor is a list of digits of the indices of one shard, and of the rank: with 2 ranks,
shards of 4 x 6, joined along the columns and seen as rows of 3, the dimensions are ::

    [row]  [rank, column // 3]  [column % 3]

Reshapes split and join digits, permutes change their order; a cat of parts takes the first digit of the dimension that
was cut to the front of the one along which they are joined. Two tensors with equal digits are equal, and how one is
made from the other can be read from them.

Sizes may be symbolic. What is not known to divide is not split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .nodes import LeftAlone
from .sizes import Size, known

RANK = -1  #: the axis that counts the ranks; others are the dimensions of a shard


@dataclass(frozen=True, eq=False)
class Digit:
    """``index // step % size`` of the index along an axis. ``same`` compares: symbolic sizes have no plain equality."""

    axis: int
    size: Size
    step: Size = 1

    def split(self, size: Size) -> tuple[Digit, Digit]:
        """The first of them has the given size, which must divide the digit's."""
        rest = self.size // size
        return Digit(self.axis, size, self.step * rest), Digit(self.axis, rest, self.step)


Digits = tuple[Digit, ...]
Dims = tuple[Digits, ...]


def plain(shape: Iterable[Size]) -> Dims:
    """The dimensions of the shard itself."""
    return tuple(_merged([Digit(i, size)]) for i, size in enumerate(shape))


def gathered_dims(shape: Sequence[Size], world: int, dim: int = 0) -> Dims:
    """The dimensions of shards of this shape joined along one of these, or of what is cut into them."""
    return by_rank(plain(shape), world, dim)


def by_rank(dims: Dims, world: int, dim: int) -> Dims:
    """Those of shards of the given dimensions, joined along one of these."""
    return (*dims[:dim], (Digit(RANK, world), *dims[dim]), *dims[dim + 1 :])


def flat_dims(dims: Iterable[Digits]) -> Digits:
    return _merged([digit for digits in dims for digit in digits])


def numel(digits: Iterable[Digit]) -> Size:
    return math.prod((d.size for d in digits), start=1)


def strides(dims: Dims, shape: Sequence[Size]) -> list[list[tuple[Size, Size]]]:
    """Of each dimension's digits the size, and how far apart in the memory of shards of this shape neighbours lie."""
    apart = {axis: math.prod(shape[axis + 1 :], start=1) for axis in range(len(shape))}
    apart[RANK] = math.prod(shape, start=1)
    return [[(d.size, d.step * apart[d.axis]) for d in _merged(digits)] for digits in dims]


def same_size(a: Digits, b: Digits) -> bool:
    """Whether they are known to be the same."""
    a, b = _merged(a), _merged(b)
    return len(a) == len(b) and all(
        x.axis == y.axis and known(x.size == y.size) and known(x.step == y.step)
        for x, y in zip(a, b, strict=True)
    )


def same_dims(a: Dims, b: Dims) -> bool:
    """The same of all dimensions."""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def reshaped(dims: Dims, shape: Sequence[Size]) -> Dims:
    """The dimensions of the same elements, in the same order, in another shape of as many. LeftAlone: an end of a
    dimension of ``shape`` is not known to fall between two digits."""
    pending = [digit for digits in dims for digit in digits]
    front: list[Digits] = []
    back: list[Digits] = []
    left = list(shape)
    # From both ends: one size may be unknown to fit, since the number of elements is the same.
    while left and (taken := _taken(pending, left[0], first=True)) is not None:
        front.append(taken)
        left.pop(0)
    while left and (taken := _taken(pending, left[-1], first=False)) is not None:
        back.append(taken)
        left.pop()
    if len(left) > 1:
        sizes = " x ".join(str(s) for s in shape)
        raise LeftAlone(f"a shape of {sizes} cuts through the dimensions of the shards")
    if left:
        back.append(tuple(pending))
    elif pending:
        # Of size 1, if not known to be.
        raise LeftAlone(f"{numel(pending)} is not known to be 1")
    return tuple(_merged(d) for d in (*front, *back[::-1]))


def _taken(pending: list[Digit], size: Size, first: bool) -> Digits | None:
    """Takes digits of this size in all from one end of ``pending``; None, and nothing, if that is not known to work."""
    taken: list[Digit] = []
    rest = list(pending)
    need = size
    while not known(need == 1):
        if not rest:
            return None
        digit = rest.pop(0 if first else -1)
        if known(digit.size == need):
            taken.append(digit)
            break
        if _divides(need, digit.size):
            high, low = digit.split(need if first else digit.size // need)
            taken.append(high if first else low)
            rest.insert(0 if first else len(rest), low if first else high)
            break
        if not _divides(digit.size, need):
            return None
        taken.append(digit)
        need = need // digit.size
    pending[:] = rest
    return tuple(taken if first else taken[::-1])


def _divides(a: Size, b: Size) -> bool:
    return not known(a == 0) and not known(b == 0) and known(b % a == 0)


def permuted(dims: Dims, permutation: Sequence[int]) -> Dims:
    return tuple(dims[p] for p in permutation)


def moved_dims(dims: Dims, count: Size, source: int, target: int) -> Dims:
    """What is cut into ``count`` equal parts along ``source``, the parts joined along ``target``. LeftAlone: the parts
    are not known to end where a digit ends."""
    if source == target:
        return dims
    rest = list(dims[source])
    taken = _taken(rest, count, first=True)
    if taken is None:
        raise LeftAlone(f"{count} parts of {numel(dims[source])} cut through the dimensions of the shards")
    result = list(dims)
    result[source] = _merged(rest)
    result[target] = _merged([*taken, *result[target]])
    return tuple(result)


def around_rank(digits: Digits, world: int) -> tuple[Digits, Digits] | None:
    """The digits before and after the ranks, of which there are ``world``, or None where there are no ranks. LeftAlone:
    the ranks are there in part only."""
    at = [i for i, digit in enumerate(digits) if digit.axis == RANK]
    if not at:
        return None
    if len(at) > 1 or not known(digits[at[0]].size == world):
        raise LeftAlone("the ranks are no single dimension there")
    return digits[: at[0]], digits[at[0] + 1 :]


def part_of_rank(rows: Digits, columns: Digits, world: int) -> tuple[Dims, int] | None:
    """The dimensions of a rank's part of a matrix, and along which of these the ranks' parts stand side by side; None
    where they are columns of the matrix that do not. LeftAlone: the ranks are there in part only."""
    if (around := around_rank(rows, world)) is not None:
        before, after = around
        return ((before, after, columns), 1) if before else ((after, columns), 0)
    before, after = around_rank(columns, world) or ((), ())
    return None if before else ((rows, after), 1)


def refined(have: Digits, want: Digits) -> tuple[Digits, Digits]:
    """Both, split so that each digit of the one is a digit of the other. LeftAlone: that is not known to be
    possible."""
    parts: tuple[dict[Digit, list[Digit]], ...] = ({}, {})
    for axis in dict.fromkeys(digit.axis for digit in (*have, *want)):
        # What is left of each side's digits of the axis, and which digit it is a piece of.
        a, b = ([(d, d) for d in _chain(digits, axis)] for digits in (have, want))
        while a and b:
            (x, x_of), (y, y_of) = a.pop(0), b.pop(0)
            if known(x.size == y.size):
                pass
            elif _divides(x.size, y.size):
                y, rest = y.split(x.size)
                b.insert(0, (rest, y_of))
            elif _divides(y.size, x.size):
                x, rest = x.split(y.size)
                a.insert(0, (rest, x_of))
            else:
                raise LeftAlone(f"parts of {x.size} and of {y.size} cut through each other")
            # One piece for both, also where its size is written in two ways.
            parts[0].setdefault(x_of, []).append(x)
            parts[1].setdefault(y_of, []).append(x)
        if a or b:
            raise LeftAlone("not all elements of the shards are there")
    return (
        tuple(piece for digit in have for piece in parts[0][digit]),
        tuple(piece for digit in want for piece in parts[1][digit]),
    )


def _chain(digits: Digits, axis: int) -> list[Digit]:
    """The digits of an axis from the first to the last one."""
    pending = [d for d in digits if d.axis == axis]
    chain: list[Digit] = []
    step: Size = 1
    while pending:
        found = next((d for d in pending if known(d.step == step)), None)
        if found is None:
            raise LeftAlone("the order of a dimension's elements is not known")
        pending.remove(found)
        chain.insert(0, found)
        step = step * found.size
    return chain


def _merged(digits: Iterable[Digit]) -> Digits:
    """Without digits of size 1, and neighbours that are one digit joined."""
    result: list[Digit] = []
    for digit in digits:
        if known(digit.size == 1):
            continue
        last = result[-1] if result else None
        if last is not None and last.axis == digit.axis and known(last.step == digit.step * digit.size):
            result[-1] = Digit(digit.axis, last.size * digit.size, digit.step)
        else:
            result.append(digit)
    return tuple(result)
