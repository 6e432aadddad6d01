"""Compiled graphs of ranks that run ahead of each other: on CPU ranks, whose hosts pause at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_ranks_that_differ import compiler, gather, results, scatter, world
from torch import Tensor
from weft import symm_mem
from weft.fused_ops.passes.agreement.votes import foresight
from weft.fused_ops.passes.report import Report

BLOCKS, STEPS = 4, 16
SOON = 16  # graphs in which the ranks agree until one of them runs ahead


def block(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x + scatter(gather(x, world()) @ a.sin() @ b, world())


def model(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def blocks(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for _ in range(BLOCKS):
            x = fn(x, a, b)
        return x

    return blocks


def tensors() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(dist.get_rank())
    return [torch.randn(s, requires_grad=True) for s in ((3, 8), (8, 6), (6, 8))], torch.randn(3, 8)


def trust() -> ExitStack:
    """Inside, ranks trust each other soon, and need not meet once they do."""
    stack = ExitStack()
    limits = foresight.AheadLimits(trusted=SOON, meeting=1 << 20)
    stack.enter_context(mock.patch.object(foresight, "LIMITS", limits))
    return stack


def step(mine: Callable[..., Tensor], noise: random.Random) -> None:
    given, grad = tensors()

    def pausing(*args: Tensor) -> Tensor:
        time.sleep(noise.choice([0, 0, 0, 1e-3, 5e-3]))
        return mine(*args)

    got = results(model(pausing), given, grad)
    want = results(model(block), [t.detach().double() for t in given], grad.double())
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 3e-6


def trained(rank: int, size: int, agree: bool | str) -> Report:
    from weft.fused_ops.passes import FusionPass

    noise = random.Random(rank)
    with compiler(), trust():
        fusion = FusionPass(fuse="always", agree=agree)
        mine = torch.compile(block, options=fusion.options)
        for _ in range(STEPS // 2):
            step(mine, noise)
        fusion.clear()
        for _ in range(STEPS):
            step(mine, noise)
        return fusion.report()


@pytest.mark.parametrize("size", [2, 3])
def test_hosts_that_pause_at_random(size: int) -> None:
    reports = run_ranks(trained, size, "ahead", fresh=True)
    for report in reports:
        assert not report.disagreements
        questions = report.questions
        assert questions.count == questions.fused == 2 * BLOCKS * STEPS
    # On CPU ranks an op waits for the others, so each graph has one that comes first.
    assert sum(r.questions.ahead for r in reports) > BLOCKS * STEPS, [r.questions for r in reports]


def test_ranks_that_wait_at_each_graph() -> None:
    for report in run_ranks(trained, 2, "each", fresh=True):
        assert (report.questions.ahead, report.questions.fused) == (0, 2 * BLOCKS * STEPS)


def test_ranks_wait_in_the_forward_alone() -> None:
    reports = run_ranks(trained, 2, True, fresh=True)
    assert all(r.questions.fused == 2 * BLOCKS * STEPS for r in reports)
    assert all(not r.disagreements for r in reports)
    assert sum(r.questions.ahead for r in reports) > BLOCKS * STEPS / 2
    assert max(r.questions.ahead for r in reports) <= BLOCKS * STEPS


def leaves(rank: int, size: int, how: str) -> tuple[list[str], float]:
    """Rank 1 takes another way, late, in a step that rank 0 has begun by then; then all begin anew."""
    from weft.fused_ops.passes import FusionPass

    def doubled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return 2 * x + scatter(gather(x, world()).flip(0) @ a @ b, world())

    symm_mem.set_timeout(60)
    texts, begin = [], 0.0
    with compiler(), trust(), torch.no_grad():
        fusion = FusionPass(fuse="always", agree="ahead")
        mine = torch.compile(block, options=fusion.options)
        given = [t.detach() for t in tensors()[0]]
        other = torch.compile(doubled, options=fusion.options) if how == "graph" else block
        for _ in range(3 * SOON):
            model(mine)(*given)
        if how == "eager":
            symm_mem.set_timeout(3)  # not while graphs are compiled
        begin = time.monotonic()
        try:
            if rank == 1:
                time.sleep(0.5)
                other(*given)
            for _ in range(5 - rank):
                mine(*given)
        except symm_mem.WeftError as e:
            texts.append(str(e))
            if how == "eager" and rank == 0:
                block(*given)  # what rank 1 waits for in the backend
        seconds = time.monotonic() - begin
        if how == "graph":
            symm_mem.reset()
            torch.testing.assert_close(mine(*given), block(*given), rtol=1e-4, atol=1e-4)
            assert fusion.report().questions.ahead > 0
    return texts, seconds


def test_a_rank_that_comes_with_another_graph_is_named_on_all_ranks_at_once() -> None:
    (first, seconds), (left, _) = run_ranks(leaves, 2, "graph", fresh=True)
    (text,) = left
    assert text.startswith(
        "agree on a graph in group '0': rank 1 came to another graph than all ranks had run there"
    )
    assert 'FusionPass(agree="each")' in text
    (text,) = first
    assert "waited" in text and "for rank 1: " in text and "and it has given up" in text, text
    assert seconds < 30


def breaks_its_graph_now_and_then(rank: int, size: int) -> tuple[Report, int]:
    """By default: in every 24th step rank 0 prints in one block, where its graph ends."""
    from weft.fused_ops.passes import FusionPass

    def printing(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rows = gather(x, world())
        torch._dynamo.graph_break()
        return x + scatter(rows @ a.sin() @ b, world())

    noise = random.Random(rank)
    with compiler(), trust():
        fusion = FusionPass(fuse="always", collectives=False)
        mine, other = (torch.compile(fn, options=fusion.options) for fn in (block, printing))
        ahead = 0
        for n in range(60):
            blocks = iter([mine] * BLOCKS)
            if n % 24 == 23:
                ahead = fusion.report().questions.ahead  # by then
                blocks = iter([mine, other if rank == 0 else mine, *[mine] * (BLOCKS - 2)])
            step(lambda *args, blocks=blocks: next(blocks)(*args), noise)
        return fusion.report(), ahead


def test_a_rank_that_breaks_its_graph_now_and_then_has_the_others_run_unfused() -> None:
    reports = run_ranks(breaks_its_graph_now_and_then, 2, fresh=True)
    for report, _ in reports:
        assert report.disagreements and all("rank" in str(d) for d in report.disagreements)
    assert sum(ahead for _, ahead in reports) > 0, "none had run ahead when rank 0 came with another graph"


def differs_in_the_backward(rank: int, size: int) -> tuple[list[str], float, int]:
    """By default: rank 1's forward graph communicates as the others' does, its backward graph does not."""
    from weft.fused_ops.passes import FusionPass

    def partly(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x + scatter(gather(x.detach(), world()) @ a.sin() @ b, world())

    symm_mem.set_timeout(60)
    texts = []
    with compiler(), trust():
        fusion = FusionPass(fuse="always")
        mine, other = (torch.compile(fn, options=fusion.options) for fn in (block, partly))
        given, grad = tensors()
        results(other, given, grad)
        for _ in range(3 * SOON):
            results(mine, given, grad)
        assert not fusion.report().disagreements
        begin = time.monotonic()
        y = (other if rank == 1 else mine)(*given)
        time.sleep(0.5 * rank)
        try:
            y.backward(grad)
        except symm_mem.WeftError as e:
            texts.append(str(e))
        seconds = time.monotonic() - begin
        symm_mem.reset()
        ahead = fusion.report().questions.ahead
        got, want = results(mine, given, grad), results(block, given, grad)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        return texts, seconds, fusion.report().questions.ahead - ahead


def test_a_backward_graph_that_differs_is_named_on_all_ranks_at_once() -> None:
    (first, seconds, ahead), (left, _, ahead_too) = run_ranks(differs_in_the_backward, 2, fresh=True)
    (text,) = left
    assert "rank 1 came to another graph than all ranks had run there" in text
    (text,) = first
    assert "waited" in text and "for rank 1: " in text and "and it has given up" in text, text
    assert seconds < 30 and ahead == ahead_too == 0


def test_a_rank_in_eager_mode_is_waited_for_until_the_deadline_and_named() -> None:
    (first, seconds), (left, _) = run_ranks(leaves, 2, "eager", fresh=True)
    (text,) = first
    assert "waited 3 s for rank 1: " in text
    assert 3 <= seconds < 30
    (text,) = left
    assert "rank 1 came to another graph" in text and "the same collectives elsewhere" in text


def calls_directly(rank: int, size: int) -> list[str]:
    """Rank 1 makes the call of the graph that rank 0 has begun, by itself and of other data."""
    from weft.fused_ops import fused_all_gather_matmul, last_plan
    from weft.fused_ops.passes import FusionPass

    texts = []
    with compiler(), trust(), torch.no_grad():
        mine = torch.compile(block, options=FusionPass(fuse="always", agree="ahead").options)
        x, a, b = (t.detach() for t in tensors()[0])
        fused_all_gather_matmul(x, [a.sin()], 0, world(), return_A=False)  # calls of this kind are known
        for _ in range(3 * SOON):
            mine(x, a, b)
        symm_mem.set_timeout(3)
        try:
            if rank == 1:
                time.sleep(0.5)
                fused_all_gather_matmul(-x, [a.sin()], 0, world(), return_A=False)
                assert last_plan().algorithm == "host"
            mine(x, a, b)
        except symm_mem.WeftError as e:
            texts.append(str(e))
    return texts


def test_a_rank_that_calls_an_op_directly_does_not_meet_a_graph_of_another_rank() -> None:
    (first,), (direct,) = run_ranks(calls_directly, 2, fresh=True)
    assert "fused_all_gather_matmul" in first and "waited 3 s for rank 1: " in first, first
    assert "fused_all_gather_matmul" in direct and "rank 0" in direct, direct
