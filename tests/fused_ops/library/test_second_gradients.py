"""Gradients of gradients, against those of the whole computation in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opcommon import DEVICES, check, gather, world
from ranks import run_ranks
from weft import fused_ops

EPS = 0.1
Ranks = list[list[torch.Tensor]]  # what each rank gives, or gets


def second(results: Ranks, weights: Ranks, given: Ranks) -> list[torch.Tensor]:
    """The gradients, with respect to all that is given, of the squares of the gradients of a loss."""
    flat = [x for rank in given for x in rank]
    loss = sum(
        (x.sin() * w).sum()
        for xs, ws in zip(results, weights, strict=True)
        for x, w in zip(xs, ws, strict=True)
    )
    first = torch.autograd.grad(loss, flat, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), flat))


def compare(
    name: str,
    call: Callable[..., list[torch.Tensor]],
    whole: Callable[[Ranks], Ranks],
    shapes: list[tuple[int, ...]],
) -> None:
    """``whole``: from what all ranks give to what all of them get."""
    rank, size = world().rank(), world().size()
    mine = [torch.randn(shape).requires_grad_() for shape in shapes]
    results = call(*mine)
    weights = [torch.randn_like(x) for x in results]
    got = second([results], [weights], [mine])
    given = [[x.requires_grad_() for x in xs] for xs in zip(*map(gather, mine), strict=True)]
    all_weights = list(zip(*map(gather, weights), strict=True))
    wanted = second(whole(given), all_weights, given)
    for i, x in enumerate(got):
        check(f"{name}, argument {i} of {size} ranks", x, wanted[rank * len(mine) + i], 2e-5)


def gathers(rank: int, world_size: int) -> None:
    for dim in (0, 1):
        for return_A in (False, True):

            def call(A: torch.Tensor, B: torch.Tensor, dim: int = dim, keep: bool = return_A) -> Any:
                gathered, outs = fused_ops.fused_all_gather_matmul(A, [B], dim, world(), return_A=keep)
                return outs if gathered is None else [gathered, *outs]

            def whole(given: Ranks, dim: int = dim, keep: bool = return_A) -> Ranks:
                A = torch.cat([xs[0] for xs in given], dim)
                return [[A, A @ B] if keep else [A @ B] for _, B in given]

            rows = 3 * world_size if dim else 3
            compare(f"dim {dim}, return_A={return_A}", call, whole, [(4, 3), (rows, 5)])


def scatters(rank: int, world_size: int) -> None:
    # A bias of columns that are cut. One that all ranks hold alike is that of a row-parallel layer.
    def call(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> Any:
        return [fused_ops.fused_matmul_reduce_scatter(A, B, "avg", 1, world(), bias=bias, residual=residual)]

    def whole(given: Ranks) -> Ranks:
        parts = (sum(xs[0] @ xs[1] for xs in given) / world_size).chunk(world_size, 1)
        return [[part + xs[2] + xs[3]] for part, xs in zip(parts, given, strict=True)]

    compare("matmul_reduce_scatter", call, whole, [(4, 3), (3, 5 * world_size), (5,), (4, 5)])
    A = torch.randn(4, 3 * world_size, 3)  # a constant
    everybody = gather(A)
    compare(
        "of B alone",
        lambda B: [fused_ops.fused_matmul_reduce_scatter(A, B, "sum", 1, world())],
        lambda given: list(
            zip(
                sum(a @ B for a, (B,) in zip(everybody, given, strict=True)).chunk(world_size, 1), strict=True
            )
        ),
        [(3, 5)],
    )


def reduces(rank: int, world_size: int) -> None:
    def normed(given: Ranks) -> Ranks:
        sums = [sum(xs[0] for xs in given) + xs[1] for xs in given]
        scales = [(s.square().mean(-1, keepdim=True) + EPS).rsqrt() for s in sums]
        return [[s * t * xs[2], s] for s, t, xs in zip(sums, scales, given, strict=True)]

    def layer_normed(given: Ranks) -> Ranks:
        sums = [sum(xs[0] for xs in given) + xs[1] for xs in given]
        away = [s - s.mean(-1, keepdim=True) for s in sums]
        scales = [(a.square().mean(-1, keepdim=True) + EPS).rsqrt() for a in away]
        return [[a * t * xs[2] + xs[3], s] for s, a, t, xs in zip(sums, away, scales, given, strict=True)]

    compare(
        "all_reduce",
        lambda x: [fused_ops.one_shot_all_reduce(x, "avg", world())],
        lambda given: [[sum(x for (x,) in given) / world_size]] * world_size,
        [(4, 3)],
    )
    compare(
        "all_gather",
        lambda x: [fused_ops.one_shot_all_gather(x, 1, world())],
        lambda given: [[torch.cat([x for (x,) in given], 1)]] * world_size,
        [(4, 3)],
    )
    compare(
        "reduce_scatter",
        lambda x: [fused_ops.one_shot_reduce_scatter(x, "avg", 1, world())],
        lambda given: [[part] for part in (sum(x for (x,) in given) / world_size).chunk(world_size, 1)],
        [(4, 3 * world_size)],
    )
    compare(
        "all_to_all",
        lambda x: [fused_ops.one_shot_all_to_all(x, 1, 0, world())],
        lambda given: [[torch.cat([x.chunk(world_size, 1)[r] for (x,) in given])] for r in range(world_size)],
        [(4, 3 * world_size)],
    )
    compare(
        "matmul_all_reduce",
        lambda A, B: [fused_ops.fused_matmul_all_reduce(A, B, "sum", world())],
        lambda given: [[sum(A @ B for A, B in given)]] * world_size,
        [(4, 3), (3, 5)],
    )
    compare(
        "all_reduce_rms_norm",
        lambda *xs: list(fused_ops.fused_all_reduce_rms_norm(*xs, EPS, world())),
        normed,
        [(4, 6), (4, 6), (6,)],
    )
    compare(
        "all_reduce_layer_norm",
        lambda *xs: list(fused_ops.fused_all_reduce_layer_norm(*xs, EPS, world())),
        layer_normed,
        [(4, 6), (4, 6), (6,), (6,)],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [gathers, scatters, reduces])
def test_second_gradients(function: Callable[..., None], device: str) -> None:
    run_ranks(function, 2, device=device)
