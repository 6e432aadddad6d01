"""Texts that differ in numbers alone, as one: what a report says of the same layer, many times."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The number that torch gives to a node, as in "mm_3 (mm.default)", and that of a child, as in "layers.3.mlp".
_NODE = re.compile(r"(?<=[A-Za-z])(?:_?\d+)+(?= \([a-z_]\w*(?:\.\w+)*\))")
_CHILD = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$| )")


def without_numbers(text: str) -> str:
    """The text, the same for all nodes and modules that differ in their numbers only."""
    return _CHILD.sub("*", _NODE.sub("", text))


def as_ranges(texts: Sequence[str]) -> str:
    """One of the texts, with ranges of numbers where the others have other numbers: "layers.0-2,5.mlp"."""
    numbers = [[int(n) for n in _CHILD.findall(text)] for text in texts]
    columns = iter([_ranges(sorted(set(column))) for column in zip(*numbers, strict=True)])
    return _CHILD.sub(lambda _: next(columns), texts[0])


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
