"""Has Inductor keep the order of collectives, waits and large kernels that the graph has.

Inductor's scheduler keeps the order of collectives among each other only: it may move products across them, to need
less memory. Behind the graph stands an op that makes no code. Where it is lowered, all that was called as a kernel of
its own, in the order of the graph, is tied to what was called before it. What Inductor generates itself, and fuses, is
free.

Imported inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

_lib = torch.library.Library("weft", "FRAGMENT")
_lib.define("keep_order() -> ()")
_lib.impl("keep_order", lambda: None, "CompositeExplicitAutograd")
torch.library.register_fake("weft::keep_order", lambda: None, lib=_lib)
_keep = torch.ops.weft.keep_order.default
fx.node.has_side_effect(_keep)
_KERNELS = (ir.TemplateBuffer, ir.ExternKernelOut, ir.ExternKernelAlloc)  # a fallback is one of the last


def keep_order(graph: fx.Graph) -> None:
    """Puts the op behind everything else."""
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
