"""Gradients of gradients through a column-parallel layer and a row-parallel one, against nn.Linear in float64."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from opcommon import check
from ranks import run_ranks
from torch import Tensor, nn
from weft.fused_ops import ColumnParallelLinear, RowParallelLinear

IN, HIDDEN, OUT, SEQUENCE = 5, 3, 4, 2  # hidden features and the sequence: so much a rank
CUT = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": None}


def own(whole: Tensor, rank: int, size: int, dim: int | None) -> Tensor:
    return whole if dim is None else whole.chunk(size, dim)[rank]


def second(model: nn.Module, x: Tensor, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gradients of the squares of a loss's gradients."""
    names, given = zip(("x", x), *model.named_parameters(), strict=True)
    first = torch.autograd.grad((model(x).sin() * weight).sum(), given, create_graph=True)
    # Those that all ranks hold alike count once; all ranks square all that they hold, the parts of one whole.
    yield from zip(names, torch.autograd.grad(sum(g.square().sum() for g in first), given), strict=True)


def pairs(rank: int, size: int, seed: int) -> None:
    for up_sp, down_sp, bias, joined in product((True, False), (True, False), (True, False), (True, False)):
        torch.manual_seed(seed)
        plain = nn.Sequential(
            nn.Linear(IN, HIDDEN * size, bias), nn.Tanh(), nn.Linear(HIDDEN * size, OUT, bias)
        )
        whole = deepcopy(plain).double()
        up, _, down = plain
        assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
        layers = nn.Sequential(
            ColumnParallelLinear.from_linear(up, None, sequence_parallel=up_sp, gather_output=joined),
            nn.Tanh(),
            RowParallelLinear.from_linear(
                down, None, sequence_parallel=down_sp, input_is_parallel=not joined
            ),
        )
        x, weight = torch.randn(SEQUENCE * size, IN), torch.randn(SEQUENCE * size, OUT)
        wanted = dict(second(whole, x.double().requires_grad_(), weight.double()))
        cut: dict[str, Any] = {**CUT, "x": 0 if up_sp else None}
        mine = own(x, rank, size, cut["x"]).clone().requires_grad_()
        for name, got in second(layers, mine, own(weight, rank, size, 0 if down_sp else None)):
            where = f"sequence_parallel {up_sp}, {down_sp}, bias={bias}, gathered between={joined}: {name}"
            check(where, got, own(wanted[name], rank, size, cut[name]), 2e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pairs(size: int) -> None:
    run_ranks(pairs, size, secrets.randbits(32))
