"""Has Inductor keep the order of collectives, waits and large kernels that the graph has.

Inductor's scheduler keeps the order of collectives among each other only: it may move products across them, to need
less memory. After the graph stands an op that makes no code. Where it is lowered, all that was called as a kernel of
its own, in the order of the graph, is tied to what was called before it. What Inductor generates itself, and fuses, is
free, but for the group of a collective: what it alone reads, as the casts and the cat of sharded weights, stays before
it. Nothing is fused into copies and casts there, for which the collective would wait, too, nor into those of its
results.

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

from .least_memory import only_copies

_lib = torch.library.Library("weft", "FRAGMENT")
_lib.define("keep_order() -> ()")
_lib.impl("keep_order", lambda: None, "CompositeExplicitAutograd")
torch.library.register_fake("weft::keep_order", lambda: None, lib=_lib)
_keep = torch.ops.weft.keep_order.default
fx.node.has_side_effect(_keep)
_KERNELS = (ir.TemplateBuffer, ir.ExternKernelOut, ir.ExternKernelAlloc)  # a fallback is one of the last
_CALLED = (*_KERNELS[1:], ir.MultiOutput)


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
    _keep_groups(tied, called)


def _keep_groups(tied: Any, called: list[Any]) -> None:
    """Ties what only a collective reads to what was called before that, and has nothing fused into its copies."""
    place: dict[int, int] = {}  # by id, as some are not hashable
    readers: dict[str, list[Any]] = {}
    for i, op in enumerate(V.graph.operations):
        place[id(op)] = i
        for name in _names_read(op):
            readers.setdefault(name, []).append(op)
    unfused: Any = getattr(V.graph, "no_fuse_buffer_names", set())  # older torch has none
    for early, late in pairwise([None, *called]):
        if not isinstance(late, ir._CollectiveKernel) or isinstance(late, ir._WaitKernel):
            continue
        group: dict[int, Any] = {}
        pending = _names_read(late)
        while pending:
            made = V.graph.name_to_buffer.get(name := pending.pop())
            if id(made) in group or not isinstance(made, (ir.ComputedBuffer, ir.ConcatKernel)):
                continue
            # What was called earlier has had its operands made earlier, so it needs nothing that is first read here.
            if all(id(op) in group or place[id(op)] >= place[id(late)] for op in readers[name]):
                group[id(made)] = made
                pending |= _names_read(made)
        computed = [made for made in group.values() if isinstance(made, ir.ComputedBuffer)]
        for made in computed:
            if early is not None and made.operation_name is not None:
                tied[made.operation_name].add(early.get_name())
        if all(map(_is_copied_in, computed)):
            unfused.update(made.get_name() for made in computed)
    _leave_results_alone(unfused)


def _is_copied_in(made: Any) -> bool:
    """Whether it is made of the graph's inputs, or copied from what is called: nothing that is generated makes it."""
    read = _names_read(made)
    called = all(
        isinstance(V.graph.name_to_buffer.get(name), _CALLED) for name in read - {*V.graph.graph_inputs}
    )
    return called and (read <= {*V.graph.graph_inputs} or all(map(only_copies, made.origins)))


def _leave_results_alone(unfused: Any) -> None:
    """Has nothing fused into what only cuts, copies or casts results of collectives."""
    results: set[str] = set()
    operations: list[Any] = V.graph.operations
    for op in operations:
        read = _names_read(op)
        if isinstance(op, ir._CollectiveKernel) or (isinstance(op, ir.MultiOutput) and read <= results):
            results.add(op.get_name())
        cuts = isinstance(op, ir.ComputedBuffer) and all(map(only_copies, op.origins))
        if cuts and read and read <= results:
            unfused.add(op.get_name())


def _names_read(op: Any) -> set[str]:
    if isinstance(op, ir.ComputedBuffer):  # get_reads() of a reduction raises
        return set(op.get_read_names())
    if isinstance(op, ir.ConcatKernel):
        inputs: Any = op.inputs  # it tells no reads
        return {each.get_name() for each in inputs}
    return {read.name for read in op.get_reads()}
