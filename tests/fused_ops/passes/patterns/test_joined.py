"""Collectives of what a cat has joined are taken apart: the same bits, nothing copied before them or after."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graphs import copied, traced
from orders import WORLD, gathered, name, scattered
from ranks import run_ranks
from torch import Tensor, fx
from weft.fused_ops import FusionPass
from weft.fused_ops.async_collectives import registration
from weft.fused_ops.async_collectives.call import AsyncCall

aten, c10d, weft_ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.weft
LARGE, SMALL = 512 * 256, 24  # elements of float32: as many as copy engines carry, and fewer
two = pytest.mark.usefixtures("two")


def by_rank(*shards: Tensor) -> tuple[Tensor, ...]:
    """As FSDP joins a layer's parameters."""
    whole = gathered(torch.cat([s.reshape(-1) for s in shards])).view(WORLD, -1)
    parts = whole.split([s.numel() for s in shards], 1)
    return tuple(p.reshape(-1, *s.shape[1:]) for p, s in zip(parts, shards, strict=True))


def passed(fn: Callable[..., Any], *inputs: Tensor, **settings: Any) -> tuple[fx.Graph, fx.Graph]:
    """The graph before the pass and after it."""
    graph = traced(fn, *inputs)
    graph.eliminate_dead_code()
    before = copied(graph)
    FusionPass(**{"reorder": True, "agree": False, **settings})(graph)
    graph.lint()
    return before, graph


def starts(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if str(n.target).endswith("_start.default")]


def products(x: Tensor, *shards: Tensor) -> list[Tensor]:
    return [x @ w.t() for w in by_rank(*shards)]


@two
def test_parameters_are_sent_from_where_they_lie() -> None:
    """And read where they come: neither a cat nor a clone is left."""
    x, shards = torch.randn(8, 256), [torch.randn(512, 256) for _ in range(3)]
    before, graph = passed(products, x, *shards)
    found = starts(graph)
    assert len(found) == 3 and all(s.kwargs["placed"] for s in found)
    for start, shard in zip(found, [n for n in graph.nodes if n.op == "placeholder"][1:], strict=True):
        view = start.args[0]
        assert view.target is aten.view.default and view.args[0] is shard
    kinds = (aten.cat.default, aten.clone.default)
    assert any(n.target in kinds for n in before.nodes)
    assert not any(n.target in kinds for n in graph.nodes)


@two
def test_small_parts_stay_together() -> None:
    shapes = [(512, 256), (1, 256), (512, 256), (3, 256)]
    _, graph = passed(lambda *shards: [w.sin() for w in by_rank(*shards)], *map(torch.randn, shapes))
    assert len(starts(graph)) == 2
    (left,) = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert left.args[0].meta["val"].shape == (4 * 256,)
    assert left < starts(graph)[1], "what is used first is gathered first"


def columns(cut: Callable[[Tensor], Any], dim: int = 1) -> Callable[..., Any]:
    return lambda a, b: [t.sin() for t in cut(gathered(torch.cat([a, b], dim)))]


@two
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (columns(lambda w: w.split([256, 256], 1)), True),
        (columns(lambda w: (w[:, :256], w[:, 256:])), True),
        (columns(lambda w: w.split(1024), dim=0), False),
        (columns(lambda w: w.split([128, 384], 1)), False),
        (columns(lambda w: (w[:, :256], w[:, 255:])), False),
        (columns(lambda w: (w[:, :256:2], w[:, 256:])), False),
        (columns(lambda w: (w[:, :256],)), False),
        (columns(lambda w: (*w.split([256, 256], 1), w)), False),
        (columns(lambda w: (w[:, :256], w[:, 256:].as_strided((4, 4), (512, 1), 256))), False),
        (lambda a, b: (torch.cat([a, b], 1), *columns(lambda w: w.split(256, 1))(a, b)), True),
        (lambda a, b: (lambda j: (j.sin(), *gathered(j).split(256, 1)))(torch.cat([a, b], 1)), False),
        (lambda a, b: by_rank(a.bfloat16(), b), False),
    ],
)
def test_what_is_cut_where_it_was_joined(fn: Callable[..., Any], said: bool) -> None:
    _, graph = passed(fn, torch.randn(512, 256), torch.randn(512, 256))
    assert (len(starts(graph)) == 2) is said


@two
def test_what_is_written_before_the_wait_is_joined_first() -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        begun = c10d.all_gather_into_tensor(torch.cat([a, b], 1), WORLD, name())
        b.zero_()
        return [t.sin() for t in c10d.wait_tensor(begun).split(256, 1)]

    _, graph = passed(fn, torch.randn(512, 256), torch.randn(512, 256))
    assert len(starts(graph)) == 1


@two
@pytest.mark.parametrize("settings", [{"reorder": False}, {"groups": []}, {"collectives": False}], ids=str)
def test_settings_with_which_no_copy_engine_carries(settings: dict[str, Any]) -> None:
    _, graph = passed(products, torch.randn(8, 256), *[torch.randn(512, 256)] * 2, **settings)
    assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == 1


def program(seed: int) -> Callable[..., Any]:
    """Parts of any size that are gathered or scattered together, by columns or by rank, cast before or after."""

    def fn(*given: Tensor) -> list[Tensor]:
        rng, made = random.Random(seed), []
        for _ in range(rng.randint(1, 3)):
            parts = rng.sample(given, rng.randint(2, 4))
            if rng.random() < 0.5:
                parts = [p.to(torch.bfloat16) for p in parts]
            wide = rng.random() < 0.5 and len({p.shape[0] for p in parts}) == 1
            if rng.random() < 0.6:
                joined = torch.cat(parts, 1) if wide else torch.cat([p.reshape(-1) for p in parts])
                whole = gathered(joined)
                whole = whole if wide else whole.view(WORLD, -1)
            elif wide:
                whole = scattered(torch.cat(parts, 1))
            else:
                whole = scattered(torch.cat([p.reshape(WORLD, -1) for p in parts], 1).reshape(-1))
            if rng.random() < 0.5:
                whole = whole.float()
            cut = rng.random() < 0.5
            sizes = [p.shape[1] if wide else p.numel() for p in parts]
            if not wide and whole.dim() == 1:
                sizes = [s // WORLD for s in sizes]
            ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            pieces = (
                [whole.narrow(-1, a, b - a) for a, b in pairwise(ends)] if cut else whole.split(sizes, -1)
            )
            for piece in pieces:
                kind = rng.randrange(4)
                if kind == 0:
                    made.append(piece * 2)
                elif kind == 1:
                    made.append(piece.reshape(-1).clone())
                elif kind == 2:
                    made.append(piece.contiguous().add_(1))
                else:
                    made.append(piece.t().cos() if piece.dim() == 2 else piece)
        return made

    return fn


def alike(rank: int, world: int, seeds: range) -> int:
    torch.manual_seed(rank)
    shapes = [(512, 512), (512, 520), (512, 2), (1024, 512), (2, 12), (512, 516)]
    given = [torch.randn(s) for s in shapes]
    apart = 0
    for seed in seeds:
        fn = program(seed)
        before, after = passed(fn, *given, groups=None)
        apart += len(starts(after)) > len(starts(before))
        want, got = (fx.Interpreter(fx.GraphModule({}, g)).run(*given) for g in (before, after))
        for a, b in zip(want, got, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), seed
    return apart


def test_random_parts_are_the_same_bits() -> None:
    for apart in run_ranks(alike, 2, range(20, 60)):
        assert apart > 20


def operands(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    """Of each start whether it sends a parameter's own memory, and the results of a run before, and after a move."""
    x, shards = torch.randn(8, 256), [torch.randn(512, 256) for _ in range(2)]
    memory, own = {s.data_ptr() for s in shards}, []
    begin = registration._slow_start

    def noted(call: AsyncCall) -> Tensor:
        own.append(call.x.data_ptr() in memory)
        return begin(call)

    before, graph = passed(products, x, *shards)
    with patch.object(registration, "_slow_start", noted):
        results = []
        for _ in range(2):
            want, got = (fx.Interpreter(fx.GraphModule({}, g)).run(x, *shards) for g in (before, graph))
            results.append(all(map(torch.equal, want, got)))
            if rank:  # an optimizer has put them elsewhere on one rank
                shards = [s * 2 for s in shards]
                memory |= {s.data_ptr() for s in shards}
    return own, results


def test_no_operand_is_copied_wherever_parameters_lie() -> None:
    """Only its own rank reads an operand, so parameters may move, and the ranks need not know."""
    for own, same in run_ranks(operands, 2):
        assert own == [True] * 4 and same == [True, True]


def in_another_order(rank: int, world: int) -> tuple[list[bool], int]:
    """Whether results are those without the pass, and disagreements; rank 1 uses the parts in the other order."""

    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(torch.cat([a.flatten(), b.flatten()]), 2, "0"))
        wa, wb = (w.reshape(-1, 256) for w in whole.view(2, -1).split([a.numel(), b.numel()], 1))
        first, second = (wa, wb) if rank else (wb, wa)
        y = first @ first.t()[:, :8]
        z = second @ y[:256].contiguous()
        return [y, z] if rank else [z, y]

    given = [torch.full((512, 256), v + rank) for v in (1.0, 10.0)]
    fusion = FusionPass(reorder=True)
    compiled = torch.compile(fn, options=fusion.options, fullgraph=True)
    want, got = fn(*given), compiled(*given)
    return [torch.allclose(a, b) for a, b in zip(want, got, strict=True)], len(fusion.report().disagreements)


def test_ranks_that_use_the_parts_in_another_order_run_the_joined_one() -> None:
    for right, disagreements in run_ranks(in_another_order, 2):
        assert right == [True, True] and disagreements == 1


@two
def test_a_strict_pass_leaves_no_small_part_to_the_backend() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        a, b, c = by_rank(w, v, bias)
        return x @ a.t() + x @ b.t() + c

    given = torch.randn(8, 256), *[torch.randn(512, 256)] * 2, torch.randn(512)
    for strict in (False, True):
        _, graph = passed(fn, *given, strict=strict)
        assert len(starts(graph)) == (1 if strict else 2)
