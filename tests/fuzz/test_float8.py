"""Any arguments to the float8 products: the right result and gradients, or an error that names the argument."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from opcommon import gather, world
from ranks import run_ranks
from torch import Tensor
from weft.fused_ops import float8_all_gather_matmul, float8_matmul_reduce_scatter, one_shot_all_reduce

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
GATHERS, SCATTERS = "float8_all_gather_matmul", "float8_matmul_reduce_scatter"
NAMES = {
    GATHERS: r"A_shard|Bs(\[0\])?|gather_dim|group|return_A",
    SCATTERS: "A|B|reduce_op|scatter_dim|group",
}
_layouts = st.sampled_from(("contiguous", "transposed", "strided", "offset", "grad"))
_sixteens = st.integers(1, 3).map(lambda i: 16 * i)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[Any]]:
    """A function and its arguments; a dimension is a multiple of 16 times the ranks where it is cut."""
    name, dtype = draw(st.sampled_from((GATHERS, SCATTERS))), draw(v.dtypes)
    lead = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dim, k, n = draw(st.integers(0, len(lead) - 1)), draw(_sixteens), draw(_sixteens)
    lead[dim] *= RANKS * draw(st.sampled_from((1, 16)))
    A = v.Tensor((*lead, k), dtype, draw(_layouts), draw(v.seeds))
    B = v.Tensor((k, n), dtype, draw(_layouts), draw(v.seeds))
    last = st.booleans() if name == GATHERS else st.sampled_from(("sum", "avg"))
    args = [A, B, dim - draw(st.sampled_from((0, len(lead) + 1))), draw(v.groups), draw(last)]
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.integers(0, 4))
        bad = {0: v.bad_tensors, 1: v.bad_tensors, 2: v.numbers, 3: v.bad_groups, 4: v.numbers}[which]
        args[which] = draw(st.one_of(bad, v.junk))
    return name, args


def off(got: Tensor, want: Tensor, casts: float) -> bool:
    """Two casts and what becomes of their errors in a sum: of random ones a part of the norm. NaN is off."""
    return not bool((got.double() - want).norm() <= casts * want.norm() + 1e-6)


def invoke(name: str, args: list[Any], rank: int, size: int) -> None:
    A, B, dim, group, last = args
    if name == GATHERS:
        whole, (y,) = float8_all_gather_matmul(A, [B], dim, group, return_A=last)
        assert (whole is not None) == last
    else:
        y = float8_matmul_reduce_scatter(A, B, last, dim, group)
    share = size if last == "avg" else 1
    if A.device.type == "meta":
        return
    if name == GATHERS:
        want = torch.cat(gather(A), dim) @ B.detach().double()
    else:
        total = A.detach().double() @ B.detach().double()
        dist.all_reduce(total)
        want = total.chunk(size, dim)[rank] / share
    assert y.shape == want.shape and y.dtype == A.dtype
    assert not off(y.detach(), want, 0.15), "wrong result"
    if not y.requires_grad:
        return
    y.backward(torch.ones_like(y))
    ones = torch.ones_like(want) / share
    if B.grad is not None:
        rows = torch.cat(gather(A), dim) if name == GATHERS else A.detach().double()
        every = ones if name == GATHERS else torch.cat([ones] * size, dim)
        want_B = rows.flatten(0, -2).t() @ every.flatten(0, -2)
        assert B.grad.shape == B.shape and not off(B.grad, want_B, 0.3), "wrong gradient of B"
    if A.grad is not None:
        grad = ones @ B.detach().double().t()
        if name == GATHERS:
            dist.all_reduce(grad)
            grad = grad.chunk(size, dim)[rank]
        else:
            grad = torch.cat([grad] * size, dim)
        assert A.grad.shape == A.shape and not off(A.grad, grad, 0.3), "wrong gradient of A"


def attempt(rank: int, size: int, name: str, args: list[Any]) -> tuple[str, str]:
    said = v.said_by(lambda: invoke(name, v.build(args, rank), rank, size))
    assert one_shot_all_reduce(torch.ones(3), "sum", world()).tolist() == [size] * 3
    return said


@v.SETTINGS
@given(cases())
def test_any_arguments_to_float8(case: tuple[str, list[Any]]) -> None:
    v.check_said(run_ranks(attempt, RANKS, *case, env=ENV), NAMES[case[0]])
