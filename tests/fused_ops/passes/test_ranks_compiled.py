"""Programs through torch.compile with the pass, on CPU ranks that communicate, against eager float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiled import SLOW, run_as_it_is
from graphs import Copied, Reduced, gather, scatter
from opcommon import BOUND
from ranks import run_ranks
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass

Shapes = tuple[tuple[int, ...], ...]
WORLD = 2


def qkv(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    y = gather(x, 1)
    return F.linear(y, a), F.linear(y, b), F.linear(y, c)


def swiglu(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = gather(x, 1)
    return x + scatter(F.linear(F.silu(F.linear(y, a)) * F.linear(y, b), c), 1)


def swiglu0(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = gather(x, 0)
    return x + scatter((F.silu(y @ a) * (y @ b)) @ c, 0)


def with_biases(x: Tensor, a: Tensor, bias: Tensor, b: Tensor, other: Tensor) -> Tensor:
    return scatter(F.linear(F.gelu(F.linear(gather(x, 1), a, bias)), b, other), 1)


def biased_after(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return x + (scatter(F.linear(F.gelu(F.linear(gather(x, 1), a)), b), 1) + bias)


def columns(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(torch.tanh(gather(x, 1) @ a) @ b, 1)


def without_sequence_parallelism(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = F.silu(F.linear(Copied.apply(x), a)) * F.linear(Copied.apply(x), b)
    return x + Reduced.apply(F.linear(h, c))


def summed(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Python's sum, which begins with a 0."""
    y = gather(x, 1)
    return sum([scatter(sum(F.linear(F.linear(y, w).tanh(), c) for w in (a, b)), 1), x])


def gathered_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, gather(w, 0))


# The function, the shapes of its inputs, how many collectives its forward and backward graphs have.
PROGRAMS: dict[str, tuple[Callable[..., Any], Shapes, int]] = {
    "q k v": (qkv, ((3, 5, 24), (8, 24), (16, 24), (7, 24)), 2),
    "swiglu": (swiglu, ((2, 9, 24), (20, 24), (20, 24), (24, 20)), 4),
    "batch 1": (swiglu, ((1, 9, 24), (20, 24), (20, 24), (24, 20)), 4),
    "rows": (swiglu0, ((17, 24), (24, 20), (24, 20), (20, 24)), 4),
    "biases": (with_biases, ((2, 9, 24), (20, 24), (20,), (24, 20), (24,)), 4),
    "bias and residual after": (biased_after, ((2, 9, 24), (20, 24), (24, 20), (24,)), 4),
    "all_reduce": (without_sequence_parallelism, ((2, 9, 24), (20, 24), (20, 24), (24, 20)), 3),
    "Python's sum": (summed, ((2, 9, 24), (20, 24), (20, 24), (24, 20)), 4),
    "weight": (gathered_weight, ((2, 9, 24), (10, 24)), 2),
    "last dimension": (columns, ((6, 12), (24, 10), (10, 14)), 4),
}


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(name: str, fn: Any, compiled: Any, shapes: Shapes, dtype: torch.dtype, dynamic: bool) -> None:
    ours = [torch.randn(s, dtype=torch.float64).div(s[-1] ** 0.5).to(dtype) for s in shapes]
    exact = [t.double() for t in ours]
    for t in (*ours, *exact):
        t.requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(ours[0], ours[0].dim() - 2)
    want, got = leaves(fn(*exact)), leaves(compiled(*ours))
    grads = [torch.randn(w.shape, dtype=torch.float64).to(dtype) for w in want]
    torch.autograd.backward(want, [g.double() for g in grads])
    torch.autograd.backward(got, grads)
    pairs = [*zip(got, want, strict=True), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    for i, (a, b) in enumerate(pairs):
        assert a is not None
        assert b is not None
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        error = ((a.double() - b).norm() / b.norm()).item()
        # A few products, one after the other.
        assert error <= 5 * BOUND[dtype], f"{name}, result {i}: {error}"


def programs(
    rank: int, world: int, names: list[str], dtype: torch.dtype, dynamic: bool, codegen: bool
) -> list[tuple[int, int, str]]:
    found = []
    for name in names:
        torch._dynamo.reset()
        fn, shapes, _ = PROGRAMS[name]
        fusion = FusionPass(strict=True)
        if codegen:
            compiled = torch.compile(fn, options=fusion.options, dynamic=dynamic)
        else:
            compiled = torch.compile(fn, backend=run_as_it_is, dynamic=dynamic)
        with (
            functorch_config.patch(enable_autograd_cache=False),
            inductor_config.patch(
                fx_graph_cache=False, post_grad_custom_post_pass=None if codegen else fusion
            ),
        ):
            for more in (0, 1) if dynamic else (0,):
                first = (*shapes[0][:-2], shapes[0][-2] + more, shapes[0][-1])
                check(name, fn, compiled, (first, *shapes[1:]), dtype, dynamic)
        report = fusion.report()
        found.append((report.fused, report.left, report.details()))
    torch._dynamo.reset()
    return found


def check_ranks(names: list[str], *args: Any) -> None:
    results = run_ranks(programs, WORLD, names, *args)
    assert results[0] == results[1], "the ranks fused differently"
    for name, (fused, left, text) in zip(names, results[0], strict=True):
        # Compiled once, also where a size changes.
        assert (fused, left) == (PROGRAMS[name][2], 0), text


@pytest.mark.parametrize(
    ("names", "dtype", "dynamic"),
    [
        ([*PROGRAMS][0::3], torch.float32, False),
        ([*PROGRAMS][1::3], torch.bfloat16, False),
        ([*PROGRAMS][2::3], torch.float32, True),
        pytest.param([*PROGRAMS], torch.bfloat16, True, marks=SLOW),
    ],
    ids=["float32", "bfloat16", "dynamic", "all"],
)
def test_fused_graphs_are_right_and_wholly_fused(names: list[str], dtype: torch.dtype, dynamic: bool) -> None:
    check_ranks(names, dtype, dynamic, False)


@pytest.mark.slow  # each run has test_pass_on_gpus.py, and of dynamic sizes test_backend.py
@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    ("name", "dtype", "dynamic"),
    [
        ("swiglu", torch.bfloat16, False),
        ("q k v", torch.float32, False),
        ("biases", torch.float32, True),
        ("bias and residual after", torch.float16, True),
    ],
    ids=["swiglu", "q k v", "biases", "bias and residual after"],
)
def test_compiled_by_inductor(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    check_ranks([name], dtype, dynamic, True)


def summed_wide(rank: int, world: int) -> tuple[float, float, bool]:
    """Relative errors of bfloat16 products that are cast to float32 and reduced, fused and not."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter(F.linear(x.bfloat16(), w.bfloat16()).float(), 0)

    x, w = torch.randn(64, 24), torch.randn(40, 24)
    exact = [t.bfloat16().double() for t in (x, w)]
    want = scatter(exact[0] @ exact[1].t(), 0)
    fusion = FusionPass(strict=True)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, post_grad_custom_post_pass=fusion):
        fused = torch.compile(fn, backend=run_as_it_is)(x, w)
    torch._dynamo.reset()
    ours, theirs = (((y.double() - want).norm() / want.norm()).item() for y in (fused, fn(x, w)))
    return ours, theirs, torch.equal(fused, fused.bfloat16().float())


def test_what_is_cast_to_float32_is_summed_to_float32() -> None:
    for ours, theirs, rounded in run_ranks(summed_wide, WORLD):
        assert not rounded
        # Both round the products that are sent; the fused op not the own one.
        assert 0 < ours <= theirs < 4e-3


def rounded_once(rank: int, world: int) -> tuple[float, float, str]:
    """256 from 2 ranks, and two more, in bfloat16, where 257 is rounded to 256: with the pass and without."""

    def fn(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return scatter(x @ w, 0) + bias + residual

    one = torch.ones((), dtype=torch.bfloat16)
    inputs = [one.expand(s).contiguous() for s in ((6, 128), (128, 5), (5,), (3, 5))]
    fusion = FusionPass(strict=True)
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        ours = torch.compile(fn, options=fusion.options)(*inputs)
        theirs = fn(*inputs)
    torch._dynamo.reset()
    assert (ours.unique().numel(), theirs.unique().numel()) == (1, 1)
    return ours[0, 0].item(), theirs[0, 0].item(), fusion.report().details()


def test_what_is_added_after_is_rounded_once() -> None:
    for ours, theirs, report in run_ranks(rounded_once, WORLD):
        assert (ours, theirs) == (258, 256)
        assert "bias and residual added" in report
        assert "(product → reduce_scatter → add → add)" in report


def waits_and_chains(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What is fused is waited for once more, also through a view, and is reduced again as it is."""
    import torch.distributed._functional_collectives as funcol

    group = dist.distributed_c10d._get_default_group()
    reduced = Reduced.forward(None, x @ w)
    scattered = funcol.wait_tensor(scatter(x @ w, 0))
    gathered = funcol.wait_tensor(gather(x, 0)) @ w
    return (
        funcol.wait_tensor(reduced).sin(),
        funcol.wait_tensor(reduced.view(-1)) + 1,
        funcol.all_reduce(scattered, "sum", group).cos(),
        funcol.all_reduce(gathered, "max", group),
        Reduced.forward(None, Reduced.forward(None, x.sin() @ w)),
    )


def waited_and_chained(rank: int, world: int) -> tuple[list[str | None], str]:
    fusion = FusionPass(fuse="always")
    torch._dynamo.reset()
    x, w = torch.randn(6, 8), torch.full((8, 5), 0.5)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        got = torch.compile(waits_and_chains, options=fusion.options)(x, w)
        for a, b in zip(got, waits_and_chains(x, w), strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    return [e.fused_into for e in fusion.report().entries], fusion.report().details()


def test_what_is_fused_is_waited_for_and_reduced_again() -> None:
    for into, text in run_ranks(waited_and_chained, WORLD):
        assert into.count(None) == 3, text
        assert len(into) == 7, text


def cached(rank: int, world: int, configurations: list[list[str] | None]) -> list[tuple[int, int, int, bool]]:
    """Of a pass for each of these groups: on how many graphs it ran, how many collectives are fused and left, and
    whether the result is right."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0) @ w

    x, w = torch.full((4, 8), rank + 1.0), torch.ones(8, 3)
    want = torch.tensor([8.0, 16.0]).repeat_interleave(4)[:, None].expand(8, 3)
    found = []
    for groups in configurations:
        torch._dynamo.reset()
        fusion = FusionPass(groups=groups)
        y = torch.compile(fn, options=fusion.options)(x, w)
        report = fusion.report()
        found.append((report.runs.graphs, report.fused, report.left, torch.equal(y, want)))
    return found


def test_the_cache_serves_only_graphs_of_the_same_configuration(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    # One rank may find what the other has just stored.
    assert max(run_ranks(cached, WORLD, [None], env=env, fresh=True)) == [(1, 1, 0, True)]
    same, other = zip(*run_ranks(cached, WORLD, [None, []], env=env, fresh=True), strict=True)
    assert same == ((0, 1, 0, True),) * WORLD
    assert max(other) == (1, 0, 1, True)
