"""A node of Inductor's that is lines of the generated code, and no data.

Imported with what lowers such nodes, which is inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet


class CodeNode(ir.ExternKernel):
    """Writes its lines in ``codegen``; reads and makes no buffer, and is kept though nothing uses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(None, ir.NoneLayout(device=device or torch.device("cpu")), [])

    def get_reads(self) -> OrderedSet[Any]:
        return OrderedSet()

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return True

    def register(self) -> None:
        """Puts the node into the graph that is lowered."""
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)


def outermost(wrapper: Any) -> Any:
    """The wrapper of the whole file; each partition of a graph has one of its own."""
    if getattr(wrapper, "partition_signatures", None) is None:
        return wrapper
    root = wrapper.get_root_graph()
    return getattr(root, "wrapper_code", root)
