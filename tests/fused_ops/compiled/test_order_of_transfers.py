"""Compiled graphs put, get, signal and wait as the program does, each once and in its order, among collectives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from programs import compiled, written
from torch import Tensor
from torch._inductor import config as inductor_config

SHAPES = ((4, 16), (8, 16), (12, 16), (16, 16))  # three registered tensors, and a weight
OPS = ("signal", "wait", "put", "get", "batch_put", "batch_signal", "batch_wait", "one_shot_all_reduce")
Program = Callable[..., list[Tensor]]


@pytest.fixture(autouse=True)
def group(two: str) -> Iterator[str]:
    """The other rank never does anything: nothing is run."""
    yield two
    torch._dynamo.reset()


def drawn_transfers(seed: int, group: str, heavy: int = 1) -> Program:
    """``heavy``: how much a rank works in between, its own choice."""
    rng = random.Random(seed)
    steps = [(rng.choice(OPS), rng.randrange(3), rng.random() < 0.7) for _ in range(14)]
    ops = torch.ops.weft

    def program(*tensors: Tensor) -> list[Tensor]:
        *xs, w = tensors
        values = [w[:4].detach() * 2]
        for op, which, used in steps:
            x = xs[which]
            work = values[-1].mean(0, keepdim=True).expand(heavy * x.shape[0], 16) @ w.detach()
            source = work.view(heavy, *x.shape).mean(0)
            if op in ("signal", "wait"):
                getattr(ops, op)(x, 1, group)
                values += [x + 1] * used
            elif op in ("batch_signal", "batch_wait"):
                getattr(ops, op)([x, xs[which - 1]], [1, 0], group)
                values += [xs[which - 1] + 1] * used
            elif op == "put":
                ops.put(x, source, 1, group)
            elif op == "get":
                out = torch.empty_like(source)
                ops.get(x, out, 1, group)
                values += [out] * used
            elif op == "batch_put":
                ops.batch_put(
                    [x, xs[which - 1], x], [source, xs[which - 1] * 2, source + 1], [1, 1, 0], group
                )
            else:
                reduced = ops.one_shot_all_reduce(source, "avg", group)
                values += [reduced] * used
        return values[1:]

    return program


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(2), id="some"), pytest.param(range(2, 40), marks=[pytest.mark.slow], id="more")],
)
def test_transfers_are_those_of_the_program(group: str, seeds: range) -> None:
    for seed in seeds:
        wanted = written(drawn_transfers(seed, group), SHAPES, False)
        forward, backward = compiled(drawn_transfers(seed, group, heavy=1 + 63 * (seed % 2)), SHAPES, False)
        assert forward == wanted and not backward


@pytest.mark.parametrize("make", ["made", "derived"])
def test_what_the_graph_makes_is_refused(group: str, make: str) -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.zeros(4, 16) if make == "made" else x * 2
        torch.ops.weft.signal(y, 1, group)
        return y + 1

    with pytest.raises(Exception, match=r"weft.signal.default: x is a tensor that the compiled graph makes"):
        compiled(fn, SHAPES[:1], False)


def test_settings_that_reorder_are_refused_by_name(group: str) -> None:
    passes = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits_iterative"],
    }
    with (
        inductor_config.patch(passes),
        pytest.raises(Exception, match=r"its passes have 'sink_waits_iterative', .* in different orders"),
    ):
        compiled(drawn_transfers(0, group), SHAPES, False)
