"""Where a graph's record goes in Inductor's code.

Imported when the pass first runs, which is inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ..graph.code_node import CodeNode, outermost

_RECORD = torch.ops.weft.record.default
_IMPORT = "from weft.fused_ops.passes.records.seen import graph_loaded as weft_graph_loaded"


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
