"""regather=True: gathered activations that the backward gathers again, inside of the product of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, Seen, captured, check_same, gather, scatter
from opcommon import check
from opcommon import gather as of_all
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.joint import JOINT_SLOT, joint_options
from weft.fused_ops.passes.pass_sequence import passes_of

Fn = Callable[..., Any]
ROWS = 6  # of a shard


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    g = gather(F.rms_norm(x, x.shape[-1:]))
    return x + scatter(F.linear(F.silu(F.linear(g, a)) * F.linear(g, b), c))


MLP = (ROWS, 8), (10, 8), (10, 8), (8, 10)


def both(fn: Fn, *shapes: tuple[int, ...], regather: bool = True, dynamic: bool = False) -> list[Seen]:
    """The graphs of forward and backward, which compute what they did without the pass."""
    fusion = FusionPass(agree=False, regather=regather)
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    with inductor_config.patch({JOINT_SLOT: None} | joint_options(fusion)):
        seen = captured(fn, *inputs, fusion=fusion, dynamic=dynamic)
    for each in seen:
        check_same(each, 2)
    return seen


def gathers(seen: Seen) -> list[str]:
    return [e.detail for e in seen.entries if e.collective == "all_gather_into_tensor"]


def kept(forward: Seen) -> int:
    """Numbers in what the forward returns beyond its inputs: its result, and what is kept for the backward."""
    results: Any = forward.after.output_node().args[0]
    made = {n for n in results if isinstance(n, fx.Node) and n.op != "placeholder"}
    return sum(prod(n.meta["val"].shape) for n in made if isinstance(n.meta.get("val"), Tensor))


@pytest.mark.usefixtures("two")
def test_the_forward_keeps_the_shard() -> None:
    plain, _ = both(mlp, *MLP, regather=False)
    forward, backward = both(mlp, *MLP)
    assert gathers(plain) == ["2 products, A returned"] and gathers(forward) == ["2 products"]
    assert gathers(backward) == ["1 product, A returned", "2 products, gathered again"]
    assert set(forward.fused) == set(backward.fused) == {AG, RS}
    assert kept(plain) - kept(forward) == 2 * ROWS * 8, "the gathered tensor; of the norm it keeps the input"


@pytest.mark.usefixtures("two")
def test_dynamic_sizes() -> None:
    forward, backward = both(mlp, *MLP, dynamic=True)
    assert gathers(forward) == ["2 products"]
    assert "2 products, gathered again" in gathers(backward)


@pytest.mark.usefixtures("two")
def test_a_gathered_weight() -> None:
    """Sharded along what the backward contracts, as FSDP has it: the forward drops it, too."""
    forward, backward = both(lambda x, w: (x @ gather(w).t()).sin(), (4, 8), (5, 8))
    assert forward.fused == [AG] and sorted(backward.fused) == [AG, RS]  # type: ignore[type-var]
    assert gathers(backward) == ["1 product, gathered again"]


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    g = gather(x)
    return g, (g @ w).sin()


def multiplied(x: Tensor, w: Tensor) -> Tensor:
    g = gather(x)
    return (g @ w).sin() + (g * g).sum()


def along_the_sequence(x: Tensor, w: Tensor) -> Tensor:
    """Of several batches: the gathered dimension is contracted, but is not the outermost one."""
    return (gather(x, 1) @ w).sin()


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x, w: (gather(x) @ w).sin(), x, w, use_reentrant=False)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("fn", [returned, multiplied, along_the_sequence, checkpointed])
def test_others_are_as_without_it(fn: Fn) -> None:
    shapes = ((2, 3, 8) if fn is along_the_sequence else (ROWS, 8)), (8, 4)
    plain, with_it = (both(fn, *shapes, regather=regather) for regather in (False, True))
    assert [s.entries for s in plain] == [s.entries for s in with_it]
    assert [s.after.python_code("").src for s in plain] == [s.after.python_code("").src for s in with_it]


@pytest.mark.usefixtures("two")
def test_graphs_without_a_backward_and_other_groups_are_left_alone() -> None:
    for groups, requires_grad in ((None, False), (["another"], True)):
        fusion = FusionPass(groups, agree=False, regather=True)
        inputs = [torch.randn(s, requires_grad=requires_grad) for s in MLP]
        with inductor_config.patch(joint_options(fusion)):
            seen = captured(mlp, *inputs, fusion=FusionPass(agree=False))
        assert not any("again" in each for s in seen for each in gathers(s))


def test_options() -> None:
    assert JOINT_SLOT not in FusionPass().options
    fusion = FusionPass(regather=True)
    for options in (fusion.options, fusion.options_with(lambda graph: None)):
        assert options[JOINT_SLOT]["regather"] is True
    assert fusion.uuid() != FusionPass().uuid() and fusion.options[JOINT_SLOT].uuid() != fusion.uuid()
    other: Any = lambda graph: None  # noqa: E731
    assert passes_of(joint_options(fusion, other)[JOINT_SLOT])[0] is other


def sine(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(F.linear(F.linear(gather(x), a).sin(), b))


def biased(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return sine(x, a, b) + b[:, 0]


def trained(rank: int, size: int, dynamic: bool, differs: bool) -> tuple[int, int, str]:
    """Graphs that the pass saw, runs fused, the report; results and gradients are right."""
    torch._dynamo.reset()
    fusion = FusionPass(regather=True)
    another = differs and rank == 1  # its op adds something
    compiled = torch.compile(biased if another else sine, options=fusion.options, dynamic=dynamic)
    for rows in (ROWS, ROWS + 1) if dynamic else (ROWS, ROWS):
        shapes = (rows, 16), (24, 16), (12, 24)
        # Sums of about 1, whose sine is as exact as they are.
        inputs = [(torch.randn(s) / s[1] ** 0.5).requires_grad_() for s in shapes]
        out = compiled(*inputs)
        weight = torch.randn_like(out)
        (out * weight).sum().backward()
        whole, a, b = (of_all(t) for t in inputs)
        x = torch.cat(whole).requires_grad_()
        for t in (*a, *b):
            t.requires_grad_()
        want = sum(F.linear(F.linear(x, u).sin(), v) for u, v in zip(a, b, strict=True))
        if differs:
            want = want + torch.cat([0 * want[:rows], b[1][:, 0].expand(rows, -1)])
        (want * torch.cat(of_all(weight))).sum().backward()
        check("result", out, want.chunk(size)[rank], 1e-5)
        check("gradient of x", inputs[0].grad, x.grad.chunk(size)[rank], 1e-5)
        check("gradient of a", inputs[1].grad, a[rank].grad, 1e-5)
        check("gradient of b", inputs[2].grad, b[rank].grad, 1e-5)
    report = fusion.report()
    return report.runs.graphs, report.questions.fused, report.details()


@pytest.mark.parametrize(("ranks", "dynamic"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_compiled(ranks: int, dynamic: bool, tmp_path: Path) -> None:
    """In a second process, too, which takes the graphs from the cache."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for made in (True, False):
        found = run_ranks(trained, ranks, dynamic, False, env=env, fresh=True)
        # One rank may find what another one has just stored.
        graphs, _, report = max(found)
        assert (graphs > 0) is made and "1 product, gathered again" in report, report
        assert {fused for _, fused, _ in found} == {4}


def uncached(rank: int, size: int) -> tuple[int, int, str]:
    with inductor_config.patch(fx_graph_cache=False):
        return trained(rank, size, False, True)


def test_ranks_that_differ_run_unfused() -> None:
    """The backward that gathers again, too, by the backend."""
    (_, fused, report), (_, other, _) = run_ranks(uncached, 2)
    assert fused == other < 4, report
    assert "ran unfused" in report and "1 product, gathered again" in report
