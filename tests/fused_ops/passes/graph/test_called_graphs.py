"""Graphs with operators of higher order: what the pass does inside of them, beside them, and in unfused runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from compiler import whole_inductor
from opcommon import BOUND, check, world
from ranks import run_ranks
from test_pass_on_gpus import gather, layer, scatter
from test_ranks_that_differ import compiler
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch_versions import DIFFERENTIABLE_INSIDE, GRADIENTS_OF_REGIONS, RECOMPUTED_COLLECTIVES
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement import guard
from weft.fused_ops.passes.graph import subgraphs


def gather_inside(x: Tensor) -> Tensor:
    """As a graph that another one calls may gather."""
    return gather(x) if DIFFERENTIABLE_INSIDE else funcol.all_gather_tensor(x, 0, world())


def layer_inside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if DIFFERENTIABLE_INSIDE:
        return layer(x, a, b)
    return funcol.reduce_scatter_tensor(F.relu(gather_inside(x) @ a) @ b, "sum", 0, world())


def branches(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Which branch is taken depends on the rank; both communicate alike."""

    def small(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return gather_inside(x) @ a @ b

    def large(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return gather_inside(x) @ b @ a

    return torch.cond(x[0, 0] > 0, large, small, (x, a, b))


def looped(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A loop with a branch in it: graphs that call graphs that call others."""

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cond(i < 1, layer_inside, lambda x, a, b: layer_inside(x, b, a), (x, a, b))
        return i + 1, y / 8

    return torch.while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]


def regions(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    block = torch.compiler.nested_compile_region(layer_inside)
    return block(block(x, a, b), a, b)


def recomputed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = checkpoint(layer, x, a, b, use_reentrant=False)
    return checkpoint(layer, y, a, b, use_reentrant=False)


def attention(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Computed again by the backward, with the state of a generator, though it has no dropout."""

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = (gather(x) @ a)[None, None]
        return scatter(F.scaled_dot_product_attention(h, h, h, is_causal=True)[0, 0] @ b)

    return checkpoint(layer, x, a, b, use_reentrant=False)


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A user's operator that writes to its argument."""
    h = gather(x) @ a
    torch.ops.weft_tests.double_(h)
    return scatter(h @ b)


def flexible(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """FlexAttention: a mask, and a score that reads a tensor."""
    slopes = b[0]

    def score(s: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + slopes[head] * (i - j) / 64

    def causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    rows = gather(x)
    n = rows.size(0)

    def heads(w: Tensor) -> Tensor:
        return (rows @ w).view(1, n, 4, 16).transpose(1, 2)

    # For CPUs torch before 2.13 compiles no attention of one tensor to itself.
    q, k, v = [heads(a)] * 3 if x.is_cuda else [heads(w).contiguous() for w in (a, b, a.t())]
    mask = create_block_mask(causal, None, None, n, n, device=x.device, BLOCK_SIZE=128)
    o = flex_attention(q, k, v, score_mod=score, block_mask=mask)
    return scatter(o.transpose(1, 2).reshape(n, -1) @ b)


def positive(h: Tensor) -> Tensor:
    return h * h.sigmoid()


def negative(h: Tensor) -> Tensor:
    return torch.cond(h[0, 0] > 0, torch.cos, torch.tanh, (h,))


def chosen(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Branches between collectives, and a region that is compiled once and does not communicate."""
    h = gather(x) @ a
    h = torch.cond(h.sum() > 0, positive, negative, (h,))
    region = REGION if GRADIENTS_OF_REGIONS or not h.requires_grad else positive
    return scatter(region(h) @ b)


def counted(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A loop between collectives."""

    def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, positive(h)

    return scatter(torch.while_loop(lambda i, h: i < 3, body, (torch.tensor(0), gather(x) @ a))[1] @ b)


REGION = torch.compiler.nested_compile_region(positive)
PROGRAMS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (branches, looped, regions, recomputed, attention, scaled, flexible, chosen, counted)
}


def define() -> None:
    if not hasattr(torch.ops.weft_tests, "double_"):

        @torch.library.custom_op("weft_tests::double_", mutates_args={"x"})
        def double_(x: Tensor) -> None:
            x.mul_(2)


def compiled_and_run(
    rank: int, size: int, name: str, agree: bool, plain: list[bool | str], train: bool
) -> Report:
    """Results of runs, some of them unfused, checked against the same program in float64. ``plain`` says of each run
    whether it is captured, and so unfused op by op; or that it is "left", and so compiled, too."""
    define()
    fn = PROGRAMS[name]
    with compiler(), whole_inductor() if name == "flexible" else contextlib.nullcontext():
        fusion = FusionPass(fuse="always", agree=agree)
        fusion.clear()
        ours = torch.compile(fn, options=fusion.options, dynamic=False)
        for unfused in plain:
            captured = guard, "_capturing", lambda unfused=unfused: unfused
            left = guard.GraphGuard, "turn", lambda self, *sizes: None
            with mock.patch.object(*(left if unfused == "left" else captured)):
                given: list[Any] = [torch.randn(s).div_(4) for s in ((32, 64), (64, 64), (64, 64))]
                given[0][0, 0] = rank - 0.5
                exact = [t.double().requires_grad_(train) for t in given]
                given = [t.requires_grad_(train) for t in given]
                got, want = ours(*given), fn(*exact)
                check("result", got, want, 4 * BOUND[torch.float32])
                if train:
                    got.backward(torch.ones_like(got))
                    want.backward(torch.ones_like(want))
                    for a, b in zip(given, exact, strict=True):
                        check("gradient", a.grad, b.grad, 8 * BOUND[torch.float32])
        return fusion.report()


def reported_and_said(rank: int, size: int, name: str, plain: list[bool | str]) -> tuple[Report, list[str]]:
    """With what is logged of a fallback graph that could not be compiled."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("weft.passes")
    log.addHandler(handler)
    try:
        report = compiled_and_run(rank, size, name, True, plain, False)
    finally:
        log.removeHandler(handler)
    return report, [text for text in said if "cannot be compiled" in text]


def test_ranks_that_take_different_branches() -> None:
    for report in run_ranks(compiled_and_run, 2, "branches", True, [False] * 3, False):
        assert {e.reason for e in report.entries} == {subgraphs.WHY}
        assert report.disagreements == ()


def test_a_region_that_is_compiled_once() -> None:
    train = DIFFERENTIABLE_INSIDE and GRADIENTS_OF_REGIONS
    for report in run_ranks(compiled_and_run, 2, "regions", True, [False] * 2, train):
        assert {e.reason for e in report.entries} == {subgraphs.WHY}
    for report in run_ranks(compiled_and_run, 2, "regions", False, [False] * 2, train):
        assert (report.fused, report.left) == (4 if train else 2, 0), report


def test_a_branch_in_a_loop() -> None:
    for report in run_ranks(compiled_and_run, 2, "looped", True, [False] * 2, False):
        assert {e.reason for e in report.entries} == {subgraphs.WHY}
    for report in run_ranks(compiled_and_run, 2, "looped", False, [False] * 2, False):
        assert (report.fused, report.left) == (4, 0), report


def test_activation_checkpointing_leaves_none() -> None:
    """The backward gathers again, in the same graph as everything else."""
    for report in run_ranks(compiled_and_run, 2, "recomputed", True, [False, True], True):
        assert (report.fused, report.left) == (10 if RECOMPUTED_COLLECTIVES else 8, 0), report


def test_attention_in_a_checkpoint() -> None:
    """Gathers are fused forward, again, and of gradients; reduce-scatters in both directions."""
    for report in run_ranks(compiled_and_run, 2, "attention", True, [False, True, True, True, False], True):
        assert (report.fused, report.left) == (5 if RECOMPUTED_COLLECTIVES else 4, 0), report
        assert sum(d.runs for d in report.disagreements) == 6


@pytest.mark.parametrize("train", [False, True])
def test_an_operator_that_writes_to_its_argument(train: bool) -> None:
    """Also in unfused runs, op by op at first and then compiled."""
    for report in run_ranks(compiled_and_run, 2, "scaled", True, [False, *[True] * 4, False], train):
        assert (report.fused, report.left) == (4 if train else 2, 0), report
        assert sum(d.runs for d in report.disagreements) == (8 if train else 4)


@pytest.mark.parametrize("name", [pytest.param("flexible", marks=pytest.mark.slow), "chosen", "counted"])
def test_operators_beside_collectives(name: str) -> None:
    """Also in unfused runs, op by op and, but for a loop, compiled: Inductor does not compile that from its text."""
    plain: list[bool | str] = [False, True, False, *["left"] * 4, False]
    for report, said in run_ranks(reported_and_said, 2, name, plain):
        assert (report.fused, report.left) == (2, 0), report
        assert sum(d.runs for d in report.disagreements) == 1
        assert len(said) == (name == "counted")


def test_branches_beside_collectives_in_training() -> None:
    for report in run_ranks(compiled_and_run, 2, "chosen", True, [False, True, *["left"] * 4, False], True):
        assert (report.fused, report.left) == (4, 0), report


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
def test_flex_attention_on_gpus(train: bool) -> None:
    """Its backward has no kernel for CPUs."""
    plain = [False, True, "left", "left", False]
    for report in run_ranks(compiled_and_run, 2, "flexible", True, plain, train, device="cuda"):
        assert report.left == 0, report
        assert report.fused == (4 if train else 2), report


def strictly(rank: int, size: int) -> str:
    with compiler():
        fusion = FusionPass(fuse="always", strict=True)
        given = [torch.randn(s) for s in ((32, 64), (64, 64), (64, 64))]
        try:
            torch.compile(regions, options=fusion.options)(*given)
        except Exception as e:
            return str(e)
    return ""


def test_strict_raises_with_what_was_put_back() -> None:
    for text in run_ranks(strictly, 2):
        assert "2 of 2 collectives were not fused" in text
        assert subgraphs.WHY in text
