"""What the pass did with each collective of the graphs it saw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Entry:
    """One collective: fused into ``fused_into``, or left alone because of ``reason``.

    ``graph`` counts the graphs that the pass saw, from 0. ``node`` is the collective's name in the graph and
    ``source`` the line of the model that it comes from ("" where torch kept none). ``dim`` is the dimension along
    which the fused op gathers or scatters, None when left alone. For a fused one ``reason`` is "" and ``detail``
    says how many products were fused, and what else.
    """

    graph: int
    node: str
    collective: str
    group: str | None
    dim: int | None = None
    fused_into: str | None = None
    reason: str = ""
    detail: str = ""
    source: str = ""

    def __str__(self) -> str:
        kind = "" if self.node.startswith(self.collective) else f" ({self.collective})"
        group = "" if self.group is None else f" over group {self.group!r}"
        head = f"graph {self.graph}: {self.node}{kind}{group}"
        if self.fused_into is not None:
            body = f"fused into {self.fused_into}, dim {self.dim}{f', {self.detail}' if self.detail else ''}"
        else:
            body = f"left alone: {self.reason}"
        return f"{head}: {body}{f'  [{self.source}]' if self.source else ''}"


class Report:
    """The entries in the order of graphs and of collectives in a graph; ``str()`` gives one line each."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = tuple(entries)

    @property
    def fused(self) -> int:
        """How many collectives were fused."""
        return sum(e.fused_into is not None for e in self.entries)

    @property
    def left(self) -> int:
        """How many collectives were left alone."""
        return len(self.entries) - self.fused

    def __str__(self) -> str:
        if not self.entries:
            return "no collectives were seen"
        lines = [str(e) for e in self.entries]
        return "\n".join([*lines, f"{self.fused} of {len(self.entries)} collectives fused"])

    def __repr__(self) -> str:
        return f"Report(fused={self.fused}, left={self.left})"


def source_of(node: fx.Node) -> str:
    """``file:line in function: code`` of the innermost frame outside of torch, or ""."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    frames = list(_FRAME.finditer(trace))
    outside = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not outside:
        return ""
    frame = outside[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}: {frame['code'].strip()}"
