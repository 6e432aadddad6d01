"""What copy engines send is an expression of the graph, and its memory is used again once it may be, on GPUs."""

from __future__ import annotations

import pytest
import torch
from derived import PROGRAMS, WIDTH, check_code, right
from memory_check.verified import verified
from ranks import on_ranks, run_ranks
from spelled import ag, rs
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass

pytestmark = pytest.mark.gpu


def each(rank: int, world: int) -> None:
    for fn in PROGRAMS:
        check_code(right(rank, fn, {}))


def test_operands_are_kept_until_they_are_waited_for() -> None:
    run_ranks(verified, 2, each, device="cuda")


def gathers(a: Tensor, x: Tensor, m: Tensor) -> Tensor:
    """Before it waits it makes values of the operand's size, which are NaN."""
    full = ag((a * 2).bfloat16())
    y = x @ m
    for _ in range(6):
        y = torch.sin(y) @ m
    return full.float() + torch.nan_to_num(y[:1, :1], nan=1.0)


def scatters(a: Tensor, x: Tensor, m: Tensor) -> Tensor:
    part = rs((a * 2).bfloat16())
    y = x @ m
    for _ in range(6):
        y = torch.sin(y) @ m
    return part.float() + torch.nan_to_num(y[:1, :1], nan=1.0)


@on_ranks(2, device="cuda")
def test_memory_that_is_poisoned_by_what_follows(rank: int, world: int) -> None:
    """One rank is late, so the other's parts are sent while its products write NaN."""
    size = 4 * WIDTH
    m = torch.full((size, size), torch.nan, dtype=torch.bfloat16)
    x = torch.ones(size, size, dtype=torch.bfloat16)
    for fn in (gathers, scatters):
        torch._dynamo.reset()
        program = torch.compile(fn, options=FusionPass(reorder=True).options)
        with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
            for turn in range(20):
                a = torch.randn(size, size)
                terms = torch.empty(world, size, size, dtype=torch.bfloat16)
                torch.distributed.all_gather_into_tensor(terms, (a * 2).bfloat16())
                if turn % world == rank:
                    torch.cuda._sleep(10_000_000)
                if turn == 0:
                    y, (code,) = run_and_get_code(program, a, x, m)
                    check_code(code)
                else:
                    y = program(a, x, m)
                if fn is gathers:
                    assert torch.equal(y, terms.flatten(0, 1).float() + 1)
                else:
                    want = terms.double().sum(0).chunk(world)[rank]
                    bound = 2**-8 * terms.double().abs().sum(0).chunk(world)[rank] + 1e-6
                    assert ((y.double() - 1 - want).abs() <= bound + 1e-6).all()
