"""Has Inductor keep the order of collectives, waits and large kernels that the graph has.

Inductor's scheduler keeps the order of collectives among each other only: it may move products across them, to need
less memory. After the graph stands an op that makes no code. Where it is lowered, all that was called as a kernel of
its own, in the order of the graph, is tied to what was called before it. What Inductor generates itself, and fuses, is
free, but for what stays with a collective (``grouped.py``).

Imported inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import fx
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.lowering import register_lowering
from torch._inductor.scheduler import GroupedSchedulerNode
from torch._inductor.virtualized import V

from ..graph.effects import op_with_effect
from .grouped import mark_grouped

_keep = op_with_effect("keep_order()", lambda: None)
_KERNELS = (ir.TemplateBuffer, ir.ExternKernelOut, ir.ExternKernelAlloc)  # a fallback is one of the last


def keep_order(graph: fx.Graph) -> None:
    """Puts the op after everything else, in a graph whose order is final."""
    mark_grouped(graph)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(_keep).meta["val"] = None


@register_lowering(_keep, type_promotion_kind=None)
def _lower_keep() -> None:
    tied = getattr(V.graph, "additional_buffer_deps", None)
    if tied is None:
        return  # a torch without such ties keeps the order as far as it pleases
    called = [op for op in V.graph.operations if isinstance(op, _KERNELS) and op.operation_name]
    for early, late in pairwise(called):
        name = late.operation_name
        assert name is not None
        tied[name].add(early.get_name())


class GroupOfNodes(GroupedSchedulerNode):
    """torch's own, unpacked, stays in what the scheduler notes of who reads a buffer, and its code generation fails."""

    def unpack(self) -> list[Any]:
        nodes: list[Any] = super().unpack()
        for node in (self, *nodes):
            for dep in node.read_writes.reads:
                name = dep.name
                while name in self.scheduler.name_to_buf:
                    readers = self.scheduler.name_to_buf[name].mpi_buffer.succ_nodes
                    if node is self:
                        readers.discard(self)
                    elif not (isinstance(dep, WeakDep) and dep.is_fake):
                        readers.add(node)
                    name = self.scheduler.mutation_real_name.get(name, "")
        return nodes
