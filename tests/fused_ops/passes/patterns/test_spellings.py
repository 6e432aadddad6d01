"""Collectives that are coalesced or write to an ``out``: other spellings of those that the forms are found for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from graphs import AG, AR, RS, applied, c10d, captured, check_same, copied, traced
from spelled import ag, ar, check_left, only, rs
from torch import Tensor
from torch_versions import needs_compiled_out_collectives

pytestmark = pytest.mark.usefixtures("two")


def both(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    gathered = c10d.all_gather_into_tensor_coalesced([x, y], 2, "0")
    return [c10d.wait_tensor(g) @ w for g, w in zip(gathered, (a, b), strict=True)]


def test_coalesced() -> None:
    assert only(both, (6, 8), (4, 8), (8, 5), (8, 3)).fused == [AG, AG]

    def fn(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        first, second = map(c10d.wait_tensor, c10d.all_gather_into_tensor_coalesced([x, y], 2, "0"))
        return [first @ w, second.sin()]

    check_left(fn, "coalesced with others, of which number 1", (6, 8), (4, 8), (8, 5))


@pytest.fixture
def wait_for_all() -> Iterator[Callable[[list[Tensor]], list[Tensor]]]:
    """What waits for coalesced collectives since torch 2.15; older torch gets an operator of that name."""
    if hasattr(c10d, "wait_tensors"):
        yield c10d.wait_tensors
        return
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
        library.impl("wait_tensors", list, "CompositeExplicitAutograd")
        yield c10d.wait_tensors


@pytest.mark.parametrize("op", ["gather", "scatter", "reduce"])
def test_coalesced_and_waited_for_at_once(
    op: str, wait_for_all: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    def fn(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        if op == "gather":
            gathered = wait_for_all(c10d.all_gather_into_tensor_coalesced([x, y], 2, "0"))
            return [g @ w for g, w in zip(gathered, (a, b), strict=True)]
        if op == "scatter":
            return wait_for_all(c10d.reduce_scatter_tensor_coalesced([x @ a, y @ b], "sum", 2, "0"))
        return wait_for_all(c10d.all_reduce_coalesced([x @ a, y @ b], "sum", "0"))

    seen = only(fn, (6, 8), (4, 8), (8, 5), (8, 3))
    assert seen.fused == [{"gather": AG, "scatter": RS, "reduce": AR}[op]] * 2, seen.reasons
    assert "wait_tensors" in str(seen.before)
    assert "wait_tensor" not in str(seen.after)


def test_coalesced_and_waited_for_at_once_where_not_all_can_be_fused(
    wait_for_all: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        first, second = wait_for_all(c10d.all_gather_into_tensor_coalesced([x, y], 2, "0"))
        return [first @ w, second.sin()]

    def fn_that_uses_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return wait_for_all(c10d.all_gather_into_tensor_coalesced([x, y], 2, "0"))[0] @ w

    seen = only(fn, (6, 8), (4, 8), (8, 5))
    assert seen.fused == [None]
    assert "coalesced with others, of which number 1" in seen.reasons
    seen = only(fn_that_uses_one, (6, 8), (4, 8), (8, 5))
    assert seen.fused == [None]
    assert str(seen.after).count("wait_tensor.default") == 2, "nothing is left pending"


def test_a_coalesced_one_that_is_not_profitable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weft.fused_ops.dispatch.profitability.why_not_profitable", lambda *args, **kwargs: "it is too small"
    )
    check_left(
        both, "coalesced with others, of which number 0: it is too small", (6, 8), (4, 8), (8, 5), (8, 3)
    )


def test_into_new_memory() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = torch.empty(12, 8)
        return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, "0", out=out)) @ w

    def fn_that_returns_it(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(12, 8)
        return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, "0", out=out)) @ w, out

    seen = only(fn, (6, 8), (8, 5))
    assert seen.fused == [AG], seen.reasons
    assert not any(n.target is torch.ops.aten.empty.memory_format for n in seen.after.nodes)
    check_left(fn_that_returns_it, "which others may use", (6, 8), (8, 5))


def test_into_new_memory_with_strides_of_its_own() -> None:
    """What the collective returns has them, too: a collective that returns new memory would not."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided((12, 8), (1, 12))
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, "0", out=out))
        return gathered @ w, gathered

    check_left(fn, "which has strides of its own", (6, 8), (8, 5))


def test_coalesced_of_which_one_is_taken_twice() -> None:
    graph = traced(both, *(torch.randn(s) for s in ((6, 8), (4, 8), (8, 5), (8, 3))))
    first = next(n for n in graph.nodes if n.target is operator.getitem)
    with graph.inserting_after(first):
        again = graph.call_function(operator.getitem, first.args)
    again.meta = dict(first.meta)
    output = graph.output_node()
    output.args = ((*output.args[0], again),)
    seen = applied(graph)
    assert "not each of its results is used once" in seen.reasons
    assert str(seen.after) == str(seen.before)


@needs_compiled_out_collectives
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_into_new_memory_under_torch_compile(scattered: bool, returned: bool) -> None:
    """torch.compile makes a higher-order operator of a collective that writes to its ``out``."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w if scattered else x
        if scattered:
            out = y.new_empty(y.shape[0] // 2, y.shape[1])
            done = c10d.wait_tensor(c10d.reduce_scatter_tensor_out(y, "sum", 2, "0", out=out))
        else:
            out = y.new_empty(2 * y.shape[0], y.shape[1])
            done = c10d.wait_tensor(c10d.all_gather_into_tensor_out(y, 2, "0", out=out)) @ w
        return (done, out) if returned else (done,)

    (seen,) = captured(fn, torch.randn(6, 8), torch.randn(8, 5))
    if "auto_functionalized" in str(seen.before) and "_out_size" not in str(seen.before):
        pytest.skip("this torch says otherwise that the memory is new")
    assert seen.fused == [RS if scattered else AG], seen.reasons
    assert "auto_functionalized" not in str(seen.after)


@pytest.mark.parametrize("form", ["gather", "scatter", "reduce"])
def test_arguments_by_name(form: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        if form == "gather":
            return ag(x) @ w
        if form == "scatter":
            return rs(x @ w) + x[:3, :5]
        return ar(x @ w)

    graph = traced(fn, torch.randn(6, 8), torch.randn(8, 5))
    before = copied(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            names = [a.name for a in node.target._schema.arguments]
            node.args, node.kwargs = (), {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    seen = applied(graph)
    assert seen.fused == [{"gather": AG, "scatter": RS, "reduce": AR}[form]]
    check_same(replace(seen, before=before), 2)
