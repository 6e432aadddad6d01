"""What Inductor is told of single ops: who lowers them, a collective's group, and what a forward graph saves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weft.fused_ops  # noqa: F401  (the ops)
from torch import fx
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from weft.fused_ops.library import inductor
from weft.fused_ops.library.compiled import declare_communicating, withdraw_communicating

aten = torch.ops.aten


@pytest.fixture
def op() -> Iterator[OpOverload]:
    """An op of somebody else's."""
    library = torch.library.Library("weft_lowering_test", "DEF")
    library.define("sum(Tensor x, str group_name, int size) -> Tensor")
    yield torch.ops.weft_lowering_test.sum.default
    library._destroy()


def somebodys(*args: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("before", [None, somebodys])
def test_an_op_that_is_withdrawn_is_lowered_as_before(op: OpOverload, before: Any) -> None:
    if before is not None:
        lowerings[op] = before
    try:
        declare_communicating(op)
        inductor.keep_in_order()
        assert lowerings[op].__module__ == inductor.__name__
        withdraw_communicating(op)
        assert lowerings.get(op) is before
    finally:
        lowerings.pop(op, None)


def test_the_last_constant_of_a_collective_is_its_group() -> None:
    constants = inductor._Constants((0, "sum", "group", 2, 1e-5))
    assert constants[-1] == "group" and constants[0] == 0 and constants[1:3] == ("sum", "group")
    assert inductor._Constants((0, 1.0))[-1] is None


@pytest.mark.parametrize(("inference", "backward"), [(False, False), (True, False), (False, True)])
def test_a_forward_saves_copies_of_registered_tensors(inference: bool, backward: bool) -> None:
    """A peer may write to them before the backward runs; what is computed from them needs no copy."""
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    signal = graph.call_function(torch.ops.weft.signal.default, (x, 1, "group"))
    view = graph.call_function(aten.t.default, (x,))
    product = graph.call_function(aten.mul.Tensor, (x, 2))
    output = graph.output((product, x, other, view))
    with V.set_graph_handler(SimpleNamespace(is_inference=inference, is_backward=backward)):
        inductor._save_copies(signal)
    saved: Any = output.args[0]
    if inference or backward:
        assert saved == (product, x, other, view)
        return
    assert saved[0] is product and saved[2] is other
    assert [(n.target, n.args) for n in (saved[1], saved[3])] == [
        (aten.clone.default, (x,)),
        (aten.clone.default, (view,)),
    ]


def test_views_of_a_tensor_lead_to_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.slice.Tensor, (graph.call_function(aten.t.default, (x,)), 0, 1, 3))
    copy = graph.call_function(aten.clone.default, (view,))
    assert inductor._views_of(view)[-1] is x and inductor._views_of(copy) == [copy]
