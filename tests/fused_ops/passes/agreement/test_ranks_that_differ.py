"""Ranks that run different graphs: the results are right, nobody hangs, and the report says what differs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from opcommon import DEVICES
from ranks import run_ranks
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from weft.fused_ops import Plan, last_plan
from weft.fused_ops.dispatch import plan
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement import guard
from weft.fused_ops.passes.agreement.outcomes import Disagreement


@contextlib.contextmanager
def compiler(cached: bool = False) -> Iterator[None]:
    """Without caches of graphs or with them; everything is put back at the end, the ranks' patience, too.

    What a C++ compiler has made of Inductor's code is kept in both cases: that code is written anew."""
    before = guard.VOTE_DEADLINE
    torch._dynamo.reset()
    try:
        with (
            functorch_config.patch(enable_autograd_cache=cached),
            inductor_config.patch(fx_graph_cache=cached, force_disable_caches=False),
        ):
            yield
    finally:
        guard.VOTE_DEADLINE = before
        torch._dynamo.reset()


def gather(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, dim, group)


def scatter(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", dim, group)


def world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(gather(x, world()) @ a @ b, world())


def broken_layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = gather(x, world())
    torch._dynamo.graph_break()
    return scatter(y @ a @ b, world())


def inputs() -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64).float().requires_grad_() for s in ((3, 8), (8, 6), (6, 4))]


def results(fn: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    own = [t.detach().clone().requires_grad_() for t in tensors]
    y = fn(*own)
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(t.grad for t in own if t.grad is not None)]


def check(fn: Callable[..., Tensor], reference: Callable[..., Tensor] = layer) -> None:
    """Forward and backward, against the same in eager mode and float64. All ranks must come."""
    tensors = inputs()
    grad = torch.randn(3, 4)
    got = results(fn, tensors, grad)
    want = results(reference, [t.double() for t in tensors], grad.double())
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 3e-6


def one_graph_is_broken(rank: int, size: int) -> tuple[str, list[str], str]:
    with compiler():
        fusion = FusionPass(fuse="always", collectives=False)
        mine = torch.compile(broken_layer if rank == 0 else layer, options=fusion.options)
        plan.ran(Plan("none"))
        for _ in range(3):
            check(mine)
        unfused = last_plan().algorithm
        reasons = [str(d) for d in fusion.report().disagreements]
        torch._dynamo.reset()
        check(torch.compile(layer, options=fusion.options))  # and then all ranks the same
        return unfused, reasons, last_plan().algorithm


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_that_is_broken_on_one_rank(device: str) -> None:
    for rank, (unfused, reasons, then) in enumerate(run_ranks(one_graph_is_broken, 2, device=device)):
        assert unfused == "none"  # no op of weft has run
        assert then == "host" if device == "cpu" else then != "none"
        assert any(f"rank {1 - rank} runs another graph: " in r for r in reasons), reasons
        assert any("ran unfused 3 times" in r for r in reasons), reasons
        left = "collective 0 is all_gather_into_tensor over group 0 left alone there"
        assert rank == 0 or any(left in r for r in reasons), reasons


def one_adds_more(rank: int, size: int) -> tuple[str, str, str]:
    """After the same reduction: here the residual is added by the op, there it cannot be."""

    def fn(x: Tensor, w: Tensor, r: Tensor, watched: bool) -> tuple[Tensor, Tensor]:
        y = scatter(x @ w, world())
        return y + r, y.sum() if watched else r.sum()

    x, w, r = (torch.randn(s) for s in ((6, 8), (8, 4), (3, 4)))
    with compiler(), torch.no_grad():
        fusion = FusionPass(fuse="always")
        plan.ran(Plan("none"))
        got = torch.compile(fn, options=fusion.options)(x, w, r, rank == 0)
        unfused = last_plan().algorithm
        for a, b in zip(got, fn(x, w, r, rank == 0), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        (entry,) = fusion.report().entries
        (disagreement,) = fusion.report().disagreements
        return disagreement.reason, unfused, entry.form


def test_a_residual_that_one_rank_adds_after_the_op() -> None:
    first, second = run_ranks(one_adds_more, 2)
    assert first[1:] == ("none", "product → reduce_scatter")
    assert second[1:] == ("none", "product → reduce_scatter → add")
    assert all("get other shapes, addends or factors, or" in r for r in (first[0], second[0]))


def other_shapes(rank: int, size: int, shapes: list[tuple[int, ...]], dynamic: bool) -> list[str]:
    """As many elements on each rank, along dimension 1, so that the ranks send them in another order."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, world(), 1) @ w

    x, w = torch.randn(shapes[rank]), torch.randn(4, 5)
    with compiler(), torch.no_grad():
        fusion = FusionPass()
        plan.ran(Plan("none"))
        got = torch.compile(fn, options=fusion.options, dynamic=dynamic)(x, w)
        torch.testing.assert_close(got, fn(x, w), rtol=1e-4, atol=1e-4)
        report = fusion.report()
        assert [e.fused_into is not None for e in report.entries] == [True], report
        said = "0 of 1 collectives fused; 1 more are in graphs that ran unfused each time"
        assert (report.fused, said in report.details()) == ((0, True) if report.disagreements else (1, False))
        return [last_plan().algorithm, *(d.reason for d in report.disagreements)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_same_elements_in_other_shapes(dynamic: bool) -> None:
    alike, reason = "the same collectives", "or elements in another order"
    for algorithm, *reasons in run_ranks(other_shapes, 2, [(3, 2, 4), (2, 3, 4)], dynamic):
        assert algorithm == "none"
        assert alike in reasons[0]
        assert reason in reasons[0]
    assert run_ranks(other_shapes, 2, [(3, 2, 4)] * 2, dynamic) == [["host"]] * 2


def columns_of_its_own(rank: int, size: int) -> tuple[str, bool, str]:
    """A hidden size of 17 over two ranks, and one that they share evenly."""
    with compiler():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(layer, options=fusion.options)
        grad = torch.randn(3, 4)
        for hidden in (9 - rank, 6):
            x, a, b = (torch.randn(s, requires_grad=True) for s in ((3, 8), (8, hidden), (hidden, 4)))
            got = results(mine, [x, a, b], grad)
            want = results(layer, [t.double() for t in (x, a, b)], grad.double())
            for g, w in zip(got, want, strict=True):
                assert ((g.double() - w).norm() / w.norm()).item() < 3e-6
        report, asked = fusion.report(), fusion.report().questions
        return last_plan().algorithm, asked.fused == asked.count > 0, report.details()


def test_columns_of_each_ranks_own_are_fused() -> None:
    for algorithm, fused, text in run_ranks(columns_of_its_own, 2):
        assert algorithm == "host"
        assert fused, text
        assert "ran unfused" not in text


def now_and_then_in_eager_mode(rank: int, size: int) -> tuple[list[Disagreement], str]:
    with compiler():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(layer, options=fusion.options)
        check(torch.compile(layer, backend="eager"))  # what torch does once is done
        dist.barrier()
        for step in range(6):
            check(layer if rank == 0 and step in (2, 3) else mine)
            if step == 1:
                fused = last_plan().algorithm
                guard.VOTE_DEADLINE = 2.0
            dist.barrier()
        return list(fusion.report().disagreements), fused


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_leaves_its_graph_in_some_steps(device: str) -> None:
    (first, fused), (second, also) = run_ranks(now_and_then_in_eager_mode, 2, device=device)
    assert fused == also == "host" if device == "cpu" else "none" not in (fused, also)
    # It is waited for once for the forward graph, briefly for the backward graph, and not in every step.
    assert sum(d.runs for d in second if d.reason == "rank 0 did not come within 2 s") == 1
    reasons = {d.reason for d in second}
    assert "rank 0 runs without graphs of this pass since it was waited for in vain" in reasons
    assert not first  # as soon as it votes again, they run fused


def from_the_cache(rank: int, size: int, folder: str) -> list[tuple[bool, int, str, list[str]]]:
    """Whether the pass ran, how many entries its report has, what ran last, and the disagreements."""
    seen = []
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        for fn in (layer, layer, broken_layer if rank == 0 else layer):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
            with compiler(cached=True):
                fusion = FusionPass()
                plan.ran(Plan("none"))
                check(torch.compile(fn, options=fusion.options))
                report = fusion.report()
                told = [str(d) for d in report.disagreements]
                seen.append((report.runs.graphs > 0, len(report.entries), last_plan().algorithm, told))
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    return seen


def test_one_rank_compiles_and_another_loads(tmp_path: Path) -> None:
    first, again, differ = zip(*run_ranks(from_the_cache, 2, str(tmp_path)), strict=True)
    assert [seen[:3] for seen in first] == [(True, 4, "host")] * 2
    assert [seen[:3] for seen in again] == [(False, 4, "host")] * 2
    compiled, loaded = differ
    assert compiled[:3] == (True, 4, "none")
    assert loaded[:3] == (False, 4, "none")
    assert "rank 0 runs another graph: " in loaded[3][0]
    assert "rank 1 runs another graph: " in compiled[3][0]


def crossed(x: Tensor, a: Tensor, b: Tensor, row: Any, column: Any) -> Tensor:
    return scatter(gather(x, row) @ a @ b, column)


def broken_crossed(x: Tensor, a: Tensor, b: Tensor, row: Any, column: Any) -> Tensor:
    y = gather(x, row) @ a
    torch._dynamo.graph_break()
    return scatter(y @ b, column)


def two_groups(rank: int, size: int) -> list[tuple[int, str]]:
    """A mesh of 2 x 2: rank 3 shares no group with rank 0, and yet it must do as rank 0's neighbours do."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    row, column = mesh.get_group("row"), mesh.get_group("column")
    seen = []
    answers: list[bool] = []
    with compiler(), listening(answers):
        for broken in (False, True):
            torch._dynamo.reset()
            fusion = FusionPass()
            fn = broken_crossed if broken and rank == 0 else crossed
            mine = torch.compile(lambda *t, fn=fn: fn(*t, row, column), options=fusion.options)
            answers.clear()
            check(mine, lambda *t: crossed(*t, row, column))
            seen.append((sum(answers), "; ".join(str(d) for d in fusion.report().disagreements)))
    return seen


@contextlib.contextmanager
def answering(answer: Callable[..., bool]) -> Iterator[None]:
    """What a graph is told that asks: ``answer(its guard, sizes)``."""
    with mock.patch.object(guard.GraphGuard, "fused", lambda self, sizes=(): answer(self, sizes)):
        yield


def listening(answers: list[bool]) -> contextlib.AbstractContextManager[None]:
    """Every answer that a graph gets is noted."""
    asked = guard.GraphGuard.fused

    def fused(self: guard.GraphGuard, sizes: tuple[int, ...]) -> bool:
        answers.append(asked(self, sizes))
        return answers[-1]

    return answering(fused)


def test_groups_that_cross() -> None:
    found = run_ranks(two_groups, 4)
    assert [whole for (whole, _), _ in found] == [2] * 4  # forward and backward, fused on all ranks
    assert [parts for _, (parts, _) in found] == [0] * 4
    assert "another graph" in found[1][1][1] + found[2][1][1]
    assert "ran unfused" in found[3][1][1]


def updates(x: Tensor, a: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
    y = gather(x, world(), 1).flatten(0, 1) @ a
    seen.copy_(y[0])
    part = scatter(x.flatten(0, 1) @ a, world())
    return y.t(), part, y.shape[0], y.new_ones(math.ceil(y.shape[0] * 0.7))


def without_agreement(rank: int, size: int, dynamic: bool) -> None:
    """Every other run takes the way out: what it returns and writes is what a fused run does, to the stride."""
    answer = [True]
    with compiler(), answering(lambda *_: answer[0]):
        fusion = FusionPass()
        mine = torch.compile(updates, options=fusion.options, dynamic=dynamic)
        for rows in (4, 6) if dynamic else (4,):
            compare(mine, [torch.randn(2, rows, 8), torch.randn(8, 6), torch.zeros(6)], answer)
        assert fusion.report().fused == 2, fusion.report()


def drops(x: Tensor, a: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.nn.functional.dropout(gather(x, world()) @ a, 0.5)
    return y, torch.nn.functional.dropout(torch.ones_like(y), 0.1)


def without_agreement_but_random(rank: int, size: int) -> None:
    def seeded(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return (*mine(*tensors), torch.rand(3))  # what is drawn later is the same, too

    answer = [True]
    with compiler(), answering(lambda *_: answer[0]):
        fusion = FusionPass()
        mine = torch.compile(drops, options=fusion.options)
        compare(seeded, [torch.randn(4, 8), torch.randn(8, 6), torch.zeros(6)], answer)
        assert fusion.report().fused == 1, fusion.report()


def test_the_way_out_draws_the_same_numbers() -> None:
    run_ranks(without_agreement_but_random, 2)


def compare(mine: Callable[..., Any], tensors: list[Tensor], answer: list[bool]) -> None:
    outs = []
    for answer[0] in (True, False, False, False):  # op by op at first, and then compiled
        own = [t.clone() for t in tensors]
        outs.append([*mine(*own), own[2]])
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            if isinstance(a, Tensor):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()
            else:
                assert a == b


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_way_out_returns_the_same(dynamic: bool) -> None:
    run_ranks(without_agreement, 2, dynamic)
