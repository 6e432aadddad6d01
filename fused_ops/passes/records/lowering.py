"""Nodes of Inductor's that are lines of the generated code, and the one that is a graph's record.

Imported when the pass first runs, which is inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

_RECORD = torch.ops.weft.record.default
_IMPORT = "from weft.fused_ops.passes.records.seen import graph_loaded as weft_graph_loaded"


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


class _Record(CodeNode):
    """Writes the record into the file's head, wherever the scheduler puts this node."""

    def __init__(self, packed: str, device: torch.device | None) -> None:
        super().__init__(device)
        self.packed = packed

    def codegen(self, wrapper: Any) -> None:
        wrapper = outermost(wrapper)
        # Before all else: with the C++ wrapper what follows is text of C++.
        wrapper.header._lines[:0] = [_IMPORT, f"weft_graph_loaded({self.packed!r})"]


@register_lowering(_RECORD, type_promotion_kind=None)
def _lower_record(packed: str) -> None:
    # A node of the CPU would keep a graph of a GPU from being captured.
    there = (d for d in V.graph.device_node_mapping if d.type not in ("cpu", "meta"))
    _Record(packed, next(there, None)).register()
