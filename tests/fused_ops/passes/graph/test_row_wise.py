"""Which operators make each element of the operands' elements there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.fused_ops.passes.graph.row_wise import is_pointwise, reduced_dims

aten = torch.ops.aten
X = (4, 6)


def called(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call with the node of a tensor before the arguments."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *args), kwargs)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(X)
        node.meta["val"] = target(x.meta["val"], *args, **kwargs)
    return node


CAST = torch.ops.prims.convert_element_type.default
POINTWISE: dict[str, tuple[Any, ...]] = {
    "arithmetic": (aten.mul.Tensor, 2.0),
    "cast": (CAST, torch.bfloat16),
    "cast as Inductor's inputs have it": (aten._to_copy.default,),
    "copy": (aten.clone.default,),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "sum": (aten.sum.dim_IntList, [1]),
    "softmax": (aten._softmax.default, 1, False),
    "random": (aten.bernoulli.p, 0.5),
    "dropout": (aten.native_dropout.default, 0.5, True),
    "in place": (aten.relu_.default,),
    "in place of another": (aten.add_.Tensor, 1.0),
}


@pytest.mark.parametrize("call", POINTWISE.values(), ids=POINTWISE)
def test_pointwise(call: tuple[Any, ...]) -> None:
    assert is_pointwise(called(*call))


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_not_pointwise(call: tuple[Any, ...]) -> None:
    assert not is_pointwise(called(*call))


def test_a_cast_to_another_device_is_not() -> None:
    assert is_pointwise(called(aten._to_copy.default, dtype=torch.float16))
    assert not is_pointwise(called(aten._to_copy.default, device=torch.device("cuda")))


def test_inputs_and_views_are_not() -> None:
    node = called(aten.view.default, [24])
    (given,) = node.all_input_nodes
    assert not is_pointwise(node) and not is_pointwise(given)


@pytest.mark.parametrize(
    ("call", "dims"),
    [
        ((aten.amax.default, [-1], True), [1]),
        ((aten.max.dim, 0), [0]),
        ((aten.max.dim, -2), [0]),
        ((aten.max.default,), []),
        ((aten.var_mean.correction, [0, 1]), [0, 1]),
    ],
)
def test_reduced_dims(call: tuple[Any, ...], dims: list[int]) -> None:
    assert reduced_dims(called(*call)) == dims


def test_reduced_dims_by_name() -> None:
    assert reduced_dims(called(aten.amax.default, dim=[-1])) == [1]
