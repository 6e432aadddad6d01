"""Patterns that Inductor has matched before the pass runs, and lowers by functions of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import pytest
import torch
from graphs import AG, RS, Seen, applied, captured, check_same, copied, fake_ranks, gather, scatter
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement import fallback_graph
from weft.fused_ops.passes.canonicalize import write_out

X, W = torch.randn(6, 8), torch.randn(8, 8)


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks that look as if they could be asked."""
    with fake_ranks(2), inductor_config.patch(max_autotune=True):
        monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: None)
        monkeypatch.setattr(graphs, "applied", applied_and_written)
        yield


def applied_and_written(graph: fx.Graph, fusion: FusionPass | None) -> Seen:
    """The graph that was captured is run, too, and not by Inductor."""
    seen = applied(graph, fusion)
    write_out(graph)
    return seen


def matched(graph: fx.Graph) -> list[str]:
    """The names of the functions by which Inductor lowers something."""
    targets = (n.target for n in graph.nodes if n.op == "call_function")
    return [t.func.__name__ for t in targets if isinstance(t, functools.partial)]


def check(fn: Callable[..., Any], name: str, *inputs: Tensor) -> list[Seen]:
    """Both graphs compute the same, once the one before is written in operators."""
    found = captured(fn, *inputs, fusion=FusionPass())
    assert name in [m for seen in found for m in matched(seen.before)]
    for seen in found:
        before, after = copied(seen.before), copied(seen.after)
        write_out(before)
        # Interpreted, the question refuses to be passed by.
        for question in after.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
            after.erase_node(question)
        check_same(Seen(before, after, seen.entries), 2)
    return found


def test_a_sum_of_two_products_is_reduced() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = gather(x)
        return torch.relu(y @ a) * (y @ b)

    inputs = [t.clone().requires_grad_() for t in (X, W, W)]
    forward, backward = check(fn, "mm_plus_mm", *inputs)
    assert (forward.fused, backward.fused) == ([AG], [RS]), backward.reasons
    assert backward.entries[0].form == "sum of 2 products → reduce_scatter"
    assert not matched(backward.after)


def test_a_sum_of_two_products_for_something_else() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = gather(x) @ a
        return y, torch.relu(y @ a + y.sin() @ b)

    (seen,) = check(fn, "mm_plus_mm", X, W, W)
    assert seen.fused == [AG], seen.reasons
    assert not matched(seen.after)


def test_a_sum_of_two_products_of_gathered_tensors() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return gather(x) @ a + gather(x.sin()) @ b

    (seen,) = check(fn, "mm_plus_mm", X, W, W)
    assert seen.fused == [AG, AG], seen.reasons


def test_cut_and_joined() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (gather(x) @ w).split([4, 2, 2], -1)
        return scatter(torch.cat([q, k, v], -1) @ w)

    (seen,) = check(fn, "splitwithsizes_cat_replace", X, W)
    assert seen.fused == [AG, RS], seen.reasons


def test_joined_and_cut() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = gather(x)
        first, second = torch.cat([y @ a, y @ b[:, :5]], -1).split([8, 5], -1)
        return scatter(first @ a), second

    (seen,) = check(fn, "cat_splitwithsizes_replace", X, W, W)
    assert seen.fused == [AG, RS], seen.reasons


def test_joined_once_more() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = torch.cat([gather(x) @ w, gather(x).relu()], 1)
        return torch.cat([y, y[:, :3]], 1)

    (seen,) = check(fn, "cat_slice_cat", X, W)
    assert seen.fused == [AG, AG], seen.reasons
