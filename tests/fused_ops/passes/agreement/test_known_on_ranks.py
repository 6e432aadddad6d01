"""Compiled graphs that all ranks know run without asking: on CPU ranks, whose hosts pause at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_ranks_that_differ import compiler, gather, results, scatter, world
from torch import Tensor
from torch._functorch import config as functorch_config
from weft import symm_mem
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement.votes import vote_rows
from weft.fused_ops.passes.records.report import Report

BLOCKS, STEPS = 4, 16
SOON = 16  # graphs on which the ranks agree until they run those that they know without asking


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


def trust() -> AbstractContextManager[object]:
    """Inside, ranks trust each other soon."""
    return mock.patch.object(vote_rows, "TRUSTED", SOON)


def step(mine: Callable[..., Tensor], noise: random.Random) -> None:
    given, grad = tensors()

    def pausing(*args: Tensor) -> Tensor:
        time.sleep(noise.choice([0, 0, 0, 1e-3, 5e-3]))
        return mine(*args)

    got = results(model(pausing), given, grad)
    want = results(model(block), [t.detach().double() for t in given], grad.double())
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < 3e-6


def trained(rank: int, size: int) -> Report:
    noise = random.Random(rank)
    with compiler(), trust():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(block, options=fusion.options)
        for _ in range(STEPS // 2):
            step(mine, noise)
        fusion.clear()
        for _ in range(STEPS):
            step(mine, noise)
        return fusion.report()


@pytest.mark.parametrize("size", [2, 3])
def test_hosts_that_pause_at_random_do_not_ask_before_what_all_know(size: int) -> None:
    for report in run_ranks(trained, size, fresh=True):
        assert not report.disagreements
        questions = report.questions
        assert questions.count == questions.fused == questions.known == 2 * BLOCKS * STEPS
        assert questions.seconds == 0


def backwards(rank: int, size: int) -> int:
    """Of graphs that all know: a backward that runs twice, one that never runs, and those of two forwards crossed."""
    with compiler(), trust(), functorch_config.patch(donated_buffer=False):
        fusion = FusionPass(fuse="always")
        mine = torch.compile(block, options=fusion.options)
        given, grad = tensors()
        for _ in range(SOON):
            results(mine, given, grad)
        for _ in range(2):
            got, want = (backward_again(fn, given, grad) for fn in (mine, block))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        return fusion.report().questions.known


def backward_again(fn: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    own = [t.detach().clone().requires_grad_() for t in given]
    first, second, _ = fn(*own), fn(*own), fn(*own)
    first.backward(grad, retain_graph=True)
    second.backward(2 * grad)
    first.backward(3 * grad)
    return [t.grad for t in own]


def test_backward_graphs_that_run_twice_or_never_or_in_another_order() -> None:
    assert all(ahead >= 12 for ahead in run_ranks(backwards, 2, fresh=True))


def leaves(rank: int, size: int, how: str) -> tuple[list[str], float]:
    """Rank 1 takes another way, late, in a step that rank 0 has begun by then; then all begin anew."""

    def doubled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return 2 * x + scatter(gather(x, world()).flip(0) @ a @ b, world())

    symm_mem.set_timeout(60)
    texts, begin = [], 0.0
    with compiler(), trust(), torch.no_grad():
        fusion = FusionPass(fuse="always")
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
            assert fusion.report().questions.known > 0
    return texts, seconds


def test_a_rank_that_comes_with_another_graph_is_named_on_all_ranks_at_once() -> None:
    (first, seconds), (left, _) = run_ranks(leaves, 2, "graph", fresh=True)
    (text,) = left
    assert text.startswith(
        "agree on a graph in group '0': rank 1 came to another graph than others, which have begun to run one fused"
    )
    assert "from then on its ranks ask each other before each graph" in text
    (text,) = first
    assert "waited" in text and "for rank 1: " in text and "and it has given up" in text, text
    assert seconds < 30


def breaks_its_graph_now_and_then(rank: int, size: int) -> Report:
    """From the first step on, in every 24th one, rank 0 prints in one block, where its graph ends."""

    def printing(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rows = gather(x, world())
        torch._dynamo.graph_break()
        return x + scatter(rows @ a.sin() @ b, world())

    noise = random.Random(rank)
    with compiler(), trust():
        fusion = FusionPass(fuse="always", collectives=False)
        mine, other = (torch.compile(fn, options=fusion.options) for fn in (block, printing))
        for n in range(32):
            blocks = iter([mine] * BLOCKS)
            if n % 24 == 0:
                blocks = iter([mine, other if rank == 0 else mine, *[mine] * (BLOCKS - 2)])
            step(lambda *args, blocks=blocks: next(blocks)(*args), noise)
        return fusion.report()


def test_a_rank_that_breaks_its_graph_now_and_then_has_the_others_run_unfused() -> None:
    reports = run_ranks(breaks_its_graph_now_and_then, 2, fresh=True)
    for report in reports:
        assert report.disagreements and all("rank" in str(d) for d in report.disagreements)
        assert report.questions.fused > 0 == report.questions.known


def differs_in_the_backward(rank: int, size: int) -> tuple[list[str], float, int]:
    """Rank 1's forward graph communicates as the others' does, its backward graph does not."""

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
        known = fusion.report().questions.known
        got, want = results(mine, given, grad), results(block, given, grad)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        return texts, seconds, fusion.report().questions.known - known


def test_a_backward_graph_that_differs_is_named_on_all_ranks_at_once() -> None:
    (first, seconds, ahead), (left, _, ahead_too) = run_ranks(differs_in_the_backward, 2, fresh=True)
    (text,) = left
    assert "rank 1 came to another graph than others, which have begun to run one fused" in text
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

    texts = []
    with compiler(), trust(), torch.no_grad():
        mine = torch.compile(block, options=FusionPass(fuse="always").options)
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
