"""What Inductor is told of the ops: they are collectives, which it leaves in the order of the graph.

Imported when a graph with an op of weft comes to Inductor (``compiled.py``), or the pass runs: Inductor takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.lowering import add_needs_realized_inputs, lowerings, register_lowering
from torch._inductor.virtualized import NullHandler, V
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from . import schema
from .compiled import COMMUNICATING, KEEPS, why_unordered

_wait = torch.ops._c10d_functional.wait_tensor.default


class _Constants(tuple[Any, ...]):
    """Arguments that are no tensors. Torch estimates how long a collective takes for the group that is the last one."""

    def __getitem__(self, index: Any) -> Any:
        if index == -1:
            return next((each for each in reversed(self) if isinstance(each, str)), None)
        return super().__getitem__(index)


class _Collective(ir._CollectiveKernel):
    """For the scheduler, which drops no collective and keeps all of them in the order of the graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.constant_args = _Constants(self.constant_args)


def lower_as_collective(op: OpOverload) -> None:
    """Has Inductor take the op for a collective from now on."""
    add_needs_realized_inputs(op)

    returned = op._schema.returns
    one = len(returned) == 1 and isinstance(returned[0].type, torch._C.TensorType)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        _refuse_unordered(str(op))
        # One tensor is made like torch's own collectives make it: Inductor takes it for the result of one where a graph
        # waits for it, and where it reduces it in place.
        created = (_Collective.create_out_of_place if one else _Collective.create)(op, *args, **kwargs)
        if kwargs.get("placed") and op is schema.all_gather_wait:  # a buffer of the heap
            V.graph.never_reuse_buffers.add(created.get_name())  # type: ignore[union-attr]
        return tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, created)


def _refuse_unordered(op: str) -> None:
    if (why := why_unordered()) is not None:
        raise RuntimeError(f"{op}: {why}, with which ranks may communicate in different orders")


def refuse_in_lite_mode() -> None:
    """To be called with each fake result: in lite mode Inductor calls the ops as they are, and lowers none."""
    if config.fallback_by_default and not isinstance(V.graph, NullHandler):
        _refuse_unordered("an op of weft")


def _lower_wait() -> None:
    """No code for a wait that only keeps an op of weft: its result is there for all that follows on the stream."""
    as_before = lowerings[_wait]

    @register_lowering(_wait, type_promotion_kind=None)
    def lower(tensor: Any) -> Any:
        node = V.graph.current_node
        return tensor if isinstance(node, fx.Node) and KEEPS in node.meta else as_before(tensor)


def keep_in_order() -> None:
    """Has Inductor know all ops of COMMUNICATING, and those no more that are not in it any longer."""
    if _known.keys() == set(COMMUNICATING):
        return
    for op in COMMUNICATING:
        if op not in _known:
            _known[op] = lowerings.get(op)
            lower_as_collective(op)
    for op in _known.keys() - set(COMMUNICATING):
        before = _known.pop(op)
        if before is None:
            del lowerings[op]
        else:
            lowerings[op] = before


_known: dict[OpOverload, Any] = {}  # and how each was lowered before
keep_in_order()
_lower_wait()
