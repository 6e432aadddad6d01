"""Has Inductor keep the order of collectives, waits and large kernels that the graph has.

Inductor's scheduler keeps the order of collectives among each other only: it may move products across them, to need
less memory. After the graph stands an op that makes no code. Where it is lowered, all that was called as a kernel of
its own, in the order of the graph, is tied to what was called before it. What Inductor generates itself, and fuses, is
free, but for what only a collective reads: it stays before that one. Where it reads inputs of the graph alone, as
the casts of sharded weights do, nothing is fused into it either: the collective would wait for that, too.

Imported inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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
    """Puts the op after everything else."""
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
    _keep_in_front(tied, called)


def _keep_in_front(tied: Any, called: list[Any]) -> None:
    """Ties what only a collective reads to what was called before that."""
    place: dict[int, int] = {}  # by id, as some are not hashable
    first_read: dict[str, int] = {}
    for i, op in enumerate(V.graph.operations):
        place[id(op)] = i
        for name in _names_read(op):
            first_read[name] = min(i, first_read.get(name, i))
    unfused: Any = getattr(V.graph, "no_fuse_buffer_names", set())  # older torch has none
    for early, late in pairwise([None, *called]):
        if not isinstance(late, ir._CollectiveKernel) or isinstance(late, ir._WaitKernel):
            continue
        for name in _names_read(late):
            made = V.graph.name_to_buffer.get(name)
            # What was called earlier has had its operands made earlier, so it needs nothing that is first read here.
            if not isinstance(made, ir.ComputedBuffer) or first_read[name] < place[id(late)]:
                continue
            if early is not None and made.operation_name is not None:
                tied[made.operation_name].add(early.get_name())
            if all(read in V.graph.graph_inputs for read in _names_read(made)):
                unfused.add(name)


def _names_read(op: Any) -> set[str]:
    if isinstance(op, ir.ComputedBuffer):  # get_reads() of a reduction raises
        return set(op.get_read_names())
    return {read.name for read in op.get_reads()}
