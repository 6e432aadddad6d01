"""Random spellings of gathers and scatters, right and wrong: whatever the pass makes of one computes the same."""

from __future__ import annotations

from typing import Any

import torch
from graphs import AG, RS, applied, c10d, check_same, fake_ranks, traced
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
aten = torch.ops.aten


@st.composite
def cuts(draw: st.DrawFn, whole: int, count: int) -> tuple[str, list[tuple[int, int]], bool]:
    """(spelling, bounds of the parts, whether they are all of it in equal parts and in order)"""
    step = whole // count
    bounds = [(i * step, (i + 1) * step) for i in range(count)]
    right = list(bounds)
    wrong = draw(st.sampled_from(["", "", "", "swap", "repeat", "shift", "short", "fewer"]))
    if wrong == "swap":
        bounds = draw(st.permutations(bounds))
    elif wrong == "repeat":
        bounds = [draw(st.sampled_from(bounds)) for _ in bounds]
    elif wrong == "shift" and step > 1:
        bounds = [(a - 1, b - 1) if a else (a, b) for a, b in bounds]
    elif wrong == "short" and step > 1:
        bounds = [(i * (step - 1), (i + 1) * (step - 1)) for i in range(count)]
    elif wrong == "fewer":
        bounds = bounds[:-1]
    even = all(b - a == step and a % step == 0 for a, b in bounds)
    spelling = draw(st.sampled_from(["split", "sizes", "slice"] if even else ["slice"]))
    return spelling, bounds, bounds == right


def cut(x: Tensor, dim: int, spelling: str, bounds: list[tuple[int, int]]) -> list[Tensor]:
    step = bounds[0][1] - bounds[0][0]
    if spelling == "slice":
        return [aten.slice.Tensor(x, dim, a, b) for a, b in bounds]
    if spelling == "split":
        parts = aten.split.Tensor(x, step, dim)
    else:
        parts = aten.split_with_sizes.default(x, [step] * (x.shape[dim] // step), dim)
    return [parts[a // step] for a, _ in bounds]


def flattened(draw: st.DrawFn, x: Tensor) -> list[int]:
    """A shape with the same rows, or with others."""
    if draw(st.integers(0, 4)) == 0:
        return [x.shape[0], -1]
    return [-1, x.shape[-1]]


@SETTINGS
@given(st.data())
def test_gathers(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([2, 3]), "world")
    lead = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), "lead")
    shape = [*lead, data.draw(st.integers(1, 6), "columns")]
    join = data.draw(st.integers(0, len(shape) - 1), "join")
    spelling, bounds, right = data.draw(cuts(world * shape[0], world), "cuts")
    extra = data.draw(st.sampled_from(["", "", "wait", "joined", "rows", "product"]), "also used")
    bias = data.draw(st.sampled_from([None, "vector", "matrix"]), "bias")
    products = data.draw(st.integers(1, 3), "products")
    plain = join == 0 and data.draw(st.booleans(), "plain")
    rows_shape: list[int] = []

    with fake_ranks(world) as group:

        def fn(x: Tensor, seed: Tensor) -> tuple[Any, ...]:
            wait = c10d.wait_tensor(c10d.all_gather_into_tensor(x, world, group))
            joined = wait if plain else torch.cat(cut(wait, 0, spelling, bounds), join)
            if not rows_shape:
                rows_shape.extend(flattened(data.draw, joined))
            rows = joined.reshape(rows_shape)
            outs: list[Tensor] = []
            for i in range(products):
                B = seed[: rows.shape[1], : 2 + i]
                if bias is None:
                    outs.append(rows @ B)
                else:
                    b = seed[0, : 2 + i] if bias == "vector" else seed[: rows.shape[0], : 2 + i] + 1
                    outs.append(torch.addmm(b, rows, B))
            also = {"wait": wait, "joined": joined, "rows": rows, "product": outs[0].sin()}
            return (*outs, *([also[extra]] if extra else []))

        x, seed = torch.randn(shape), torch.randn(600, 4)
        seen = applied(traced(fn, x, seed))
        event(f"fused: {seen.fused != [None]}")
        check_same(seen, world)
        if (plain or right) and join != 0 and rows_shape[0] == -1 and extra != "wait":
            assert seen.fused == [AG], seen.reasons


@SETTINGS
@given(st.data())
def test_scatters(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([2, 3]), "world")
    dim = data.draw(st.integers(0, 2), "dim")
    shape = [data.draw(st.integers(1, 4)) * (world if i == dim else 1) for i in range(3)]
    spelling, bounds, right = data.draw(cuts(shape[dim], world), "cuts")
    extra = data.draw(st.sampled_from(["", "", "", "product", "part"]), "also used")
    terms = data.draw(st.integers(1, 3), "terms")
    bias = data.draw(st.sampled_from([None, None, "vector", "matrix"]), "bias")
    join = data.draw(st.sampled_from([0, 0, 0, 1]), "join")
    regrouped = data.draw(st.integers(0, 4), "regrouped") == 4 and shape[0] % world == 0
    op = data.draw(st.sampled_from(["sum", "avg"]), "op")

    with fake_ranks(world) as group:

        def fn(seed: Tensor) -> tuple[Any, ...]:
            rows = shape[0] * shape[1]
            y = seed[:rows, :4] @ seed[:4, : shape[2]]
            for i in range(1, terms):
                B = seed[4 : 5 + i, : shape[2]]
                y = torch.addmm(y, seed[:rows, : 1 + i], B) if i == 1 else y + seed[:rows, : 1 + i] @ B
            if bias is not None:
                y = y + (seed[7, : shape[2]] if bias == "vector" else seed[9 : 9 + rows, : shape[2]])
            whole = y.reshape([shape[2], shape[0], shape[1]] if regrouped else shape)
            parts = cut(whole, dim, spelling, bounds) if not regrouped else list(whole.chunk(world, 1))
            z = torch.cat(parts, join) if dim or regrouped else whole
            if z.shape[0] % world:
                z = z.reshape(-1)[: z.numel() // world * world]
            out = c10d.wait_tensor(c10d.reduce_scatter_tensor(z, op, world, group))
            also = {"product": y, "part": parts[0]}
            return (out, *([also[extra]] if extra else []))

        seen = applied(traced(fn, torch.randn(200, 40)))
        event(f"fused: {seen.fused != [None]}")
        check_same(seen, world)
        known_form = right and not regrouped and join == 0 and not extra and bias in (None, "vector")
        if known_form and dim and not (bias == "vector" and dim == 2):
            assert seen.fused == [RS], seen.reasons
