"""Graphs that other graphs call: branches and loops, regions that are compiled once, the functions of FlexAttention.

torch.compile hands such a graph to the pass before the graph that calls it, and does not say which of them it is. A
called graph cannot vote and run its fallback graph: what its caller has begun goes on, and a branch is not even taken
by all ranks. So the caller puts it back as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import fx

WHY = "it is inside of a graph that another one calls, which cannot ask the other ranks and run unfused"


class MayBeCalled(NamedTuple):
    """A graph that may turn out to be called by another one.

    Attributes:
        numbers: its own first, then those of graphs that it calls, as the pass counts them.
        before: what it was; None where it may stay as it is.
    """

    numbers: Sequence[int]
    before: fx.Graph | None


class Called:
    def __init__(self) -> None:
        self._there: weakref.WeakKeyDictionary[fx.GraphModule, MayBeCalled] = weakref.WeakKeyDictionary()

    def remember(self, graph: fx.Graph, numbers: Sequence[int], before: fx.Graph | None) -> None:
        if isinstance(graph.owning_module, fx.GraphModule):
            self._there[graph.owning_module] = MayBeCalled(numbers, before)

    def put_back(self, caller: fx.Graph) -> Iterator[tuple[fx.Graph, MayBeCalled]]:
        """The graphs that ``caller`` calls, made what they were where they may not stay as they are."""
        for node in caller.find_nodes(op="get_attr"):
            module = getattr(caller.owning_module, str(node.target), None)
            if not isinstance(module, fx.GraphModule) or module not in self._there:
                continue
            found = self._there.pop(module)
            if found.before is not None:
                module.graph = found.before
            yield module.graph, found
