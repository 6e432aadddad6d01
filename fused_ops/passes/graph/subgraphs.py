"""Graphs that other graphs call: branches and loops, regions that are compiled once, the functions of FlexAttention.

torch.compile hands such a graph to the pass before the graph that calls it, and does not say which of them it is. A
called graph cannot vote and run its fallback graph: what its caller has begun goes on, and a branch is not even taken
by all ranks. So the caller puts it back as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import fx

WHY = "it is inside of a graph that another one calls, which cannot ask the other ranks and run unfused"


class Called:
    """What the graphs were that may turn out to be called by another one."""

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[fx.GraphModule, tuple[fx.Graph, int]] = (
            weakref.WeakKeyDictionary()
        )

    def remember(self, graph: fx.Graph, before: fx.Graph, number: int) -> None:
        """``before`` is what the graph was, which is the ``number``-th that the pass has seen."""
        if isinstance(graph.owning_module, fx.GraphModule):
            self._before[graph.owning_module] = before, number

    def put_back(self, caller: fx.Graph) -> Iterator[int]:
        """Makes the graphs that ``caller`` calls what they were; the numbers of those that the pass had changed."""
        for node in caller.find_nodes(op="get_attr"):
            module = getattr(caller.owning_module, str(node.target), None)
            if not isinstance(module, fx.GraphModule) or module not in self._before:
                continue
            before, number = self._before.pop(module)
            module.graph = before
            yield number
