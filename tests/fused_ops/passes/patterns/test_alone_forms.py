"""All-gathers and reduce-scatters that no product is beside: as ops of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from compiled import program
from graphs import AG, RS, Seen, applied, c10d, captured, check_same, gather, scatter, traced
from opcommon import check
from opcommon import gather as every_rank
from ranks import run_ranks
from torch import Tensor
from torch._inductor import config as inductor_config
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.patterns import pattern

GATHER, SCATTER = "weft::one_shot_all_gather", "weft::one_shot_reduce_scatter"
EXCHANGE = "weft::one_shot_all_to_all"
WORLD = 3
pytestmark = pytest.mark.usefixtures("three")


def fusion(**settings: Any) -> FusionPass:
    return FusionPass(agree=False, collectives=True, **settings)


def seen_of(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> list[Seen]:
    return captured(fn, *inputs, fusion=fusion(), dynamic=dynamic)


X = torch.randn(6, 9, 12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathers_and_scatters_along_each_dimension(dim: int, dynamic: bool) -> None:
    (seen,) = seen_of(lambda x: gather(x.sin(), dim).cos(), X, dynamic=dynamic)
    assert seen.fused == [GATHER] and [e.dim for e in seen.entries] == [dim]
    assert seen.count("aten::cat") == 0, "what torch joins is gathered where it belongs"
    check_same(seen, WORLD)
    for reduce_op in ("sum", "avg"):
        (seen,) = seen_of(lambda x, op=reduce_op: scatter(x.sin(), dim, op).cos(), X, dynamic=dynamic)
        assert seen.fused == [SCATTER] and [e.dim for e in seen.entries] == [dim]
        assert seen.count("aten::cat") == 0
        check_same(seen, WORLD)


@pytest.mark.parametrize("dim", [0, 1])
def test_backwards_are_fused_too(dim: int) -> None:
    x = X.clone().requires_grad_()
    seen = seen_of(lambda x: F.rms_norm(scatter(gather(x, dim).sin(), dim), (12,)).square().sum(), x)
    assert [s.fused for s in seen] == [[GATHER, SCATTER], [GATHER, SCATTER]]
    for each in seen:
        check_same(each, WORLD)


def exchange(x: Tensor, *splits: list[int] | None) -> Tensor:
    return functional.all_to_all_single(x, *(splits or (None, None)), torch.distributed.group.WORLD)


@pytest.mark.parametrize("dynamic", [False, True])
def test_exchanges_of_even_parts(dynamic: bool) -> None:
    (seen,) = seen_of(lambda x: exchange(x.sin()).cos(), X, dynamic=dynamic)
    assert seen.fused == [EXCHANGE] and seen.entries[0].form == "all_to_all alone"
    check_same(seen, WORLD)
    x = X.clone().requires_grad_()
    both = seen_of(lambda x: exchange(x.sin()).cos().sum(), x)
    assert [s.fused for s in both] == [[EXCHANGE], [EXCHANGE]]
    for each in both:
        check_same(each, WORLD)


def test_other_exchanges_are_left_alone() -> None:
    (seen,) = seen_of(lambda x: exchange(x, [2, 1, 2], [1, 2, 3]).sin(), X, dynamic=False)
    assert seen.fused == [None] and "its parts are uneven" in seen.reasons
    (seen,) = captured(lambda x: exchange(x).sin(), X, fusion=FusionPass(agree=False, collectives=False))
    assert seen.fused == [None] and "no product takes it" in seen.reasons


def test_a_product_takes_what_it_can_first() -> None:
    w, v = torch.randn(12, 5), torch.randn(5, 12)
    (seen,) = seen_of(lambda x, w, v: scatter(F.silu(gather(x) @ w) @ v), X[:, 0], w, v)
    assert seen.fused == [AG, RS]
    # One product between two collectives: one of them is alone.
    (seen,) = seen_of(lambda x, w: scatter(gather(x) @ w), X[:, 0], w)
    assert sorted(map(str, seen.fused)) in ([AG, SCATTER], sorted([GATHER, RS]))
    check_same(seen, WORLD)


def test_what_is_not_profitable_with_its_product_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    why = pattern.profitability.why_not_profitable
    monkeypatch.setattr(
        pattern.profitability, "why_not_profitable", lambda c: "too little" if "matmul" in c.op else why(c)
    )
    w = torch.randn(12, 5)
    (seen,) = seen_of(lambda x, w: gather(x) @ w, X[:, 0], w)
    assert seen.fused == [GATHER]
    check_same(seen, WORLD)
    (seen,) = captured(lambda x, w: gather(x) @ w, X[:, 0], w, fusion=fusion(fuse="always"))
    assert seen.fused == [AG]


def test_they_are_taken_unless_that_is_ruled_out() -> None:
    for fn, op in ((lambda x: gather(x.sin(), 1), GATHER), (lambda x: scatter(x.sin(), 1), SCATTER)):
        for setting in (False, True, "auto"):
            (seen,) = captured(fn, X, fusion=FusionPass(agree=False, collectives=setting))
            assert seen.fused == [op if setting else None]
        (seen,) = captured(fn, X, fusion=FusionPass(agree=False))
        assert seen.fused == [op]
        assert "with no product: " in seen.entries[0].detail


def test_only_what_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    large = "it is too large"
    monkeypatch.setattr(
        pattern.profitability, "why_not_profitable", lambda c: large if c.m * c.n > WORLD * 60 else None
    )
    for rows, op in ((6, GATHER), (7, None)):
        x = torch.randn(rows, 10)
        (seen,) = captured(lambda x: gather(x.sin()), x, fusion=FusionPass(agree=False))
        assert seen.fused == [op]
        if op is None:
            assert "no matrix product takes the gathered tensor" in seen.reasons
            assert "; alone: it is too large" in seen.reasons
        (seen,) = captured(lambda x: gather(x.sin()), x, fusion=fusion())
        assert seen.fused == [GATHER], "asked for, whatever its size"


def _coalesced(*xs: Tensor) -> list[Tensor]:
    name = torch.distributed.group.WORLD.group_name
    return [c10d.wait_tensor(p) for p in c10d.all_gather_into_tensor_coalesced([*xs], WORLD, name)]


def test_coalesced_ones_stay_together() -> None:
    """Each alone would be one more launch."""
    for given in (FusionPass(agree=False), fusion()):
        seen = applied(traced(_coalesced, X, X), given)
        assert seen.fused == [None] and "coalesced with others" in seen.reasons


def _ag(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, torch.distributed.group.WORLD.group_name))


def _stacked_too(x: Tensor) -> tuple[Tensor, Tensor]:
    stacked = _ag(x.sin())
    return torch.cat(stacked.chunk(WORLD), 1), stacked


def _reversed(x: Tensor) -> Tensor:
    return torch.cat(_ag(x.sin()).chunk(WORLD)[::-1], 1)


def _joined_too(x: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.cat(x.sin().chunk(WORLD, 1))
    name = torch.distributed.group.WORLD.group_name
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(joined, "sum", WORLD, name)), joined


def _part_too(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = _ag(x.sin()).chunk(WORLD)
    return torch.cat(parts, 1), parts[1].cos()


@pytest.mark.parametrize("fn", [_stacked_too, _reversed, _part_too])
def test_what_else_is_used_is_gathered_along_dimension_0(fn: Callable[..., Any]) -> None:
    """The parts, or what they are cut from, or they are joined in another order: torch joins them as before."""
    seen = applied(traced(fn, X), fusion())
    assert seen.fused == [GATHER] and [e.dim for e in seen.entries] == [0], seen.reasons
    assert seen.count("aten::cat") == 1
    check_same(seen, WORLD)


def test_what_is_joined_for_others_too_stays() -> None:
    seen = applied(traced(_joined_too, X), fusion())
    assert seen.fused == [SCATTER] and [e.dim for e in seen.entries] == [1]
    assert seen.count("aten::cat") == 1
    check_same(seen, WORLD)


def test_what_its_backend_runs_beside_something_is_left_alone() -> None:
    name = torch.distributed.group.WORLD.group_name

    def fn(x: Tensor) -> Tensor:
        pending = c10d.all_gather_into_tensor(x, WORLD, name)
        y = x.sin()
        return c10d.wait_tensor(pending).sum() + y.sum()

    seen = applied(traced(fn, X), fusion())
    assert seen.fused == [None]
    assert "it is waited for after sin (aten::sin)" in seen.reasons or "waited for after sin" in seen.reasons


def test_sizes_of_what_is_pending() -> None:
    name = torch.distributed.group.WORLD.group_name

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        pending = c10d.all_gather_into_tensor(x, WORLD, name)
        return c10d.wait_tensor(pending), pending

    seen = applied(traced(fn, X), fusion())
    assert seen.fused == [GATHER]
    check_same(seen, WORLD)


def test_numbers_and_other_dtypes_are_left_alone() -> None:
    seen = applied(traced(_ag, torch.tensor(1.0)), fusion())
    assert seen.fused == [None] and "its input is a number" in seen.reasons
    seen = applied(traced(_ag, torch.arange(6)), fusion())
    assert seen.fused == [None] and "its input is torch.int64" in seen.reasons


def model(x: Tensor) -> Tensor:
    return scatter(F.rms_norm(gather(x, -1).sin(), (2 * x.shape[-1],)), 0)


def compiled(rank: int, world_size: int) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with program(collectives=True) as under_pass:
        y = under_pass.compile(model, fullgraph=True)(x)
        (found,) = torch.autograd.grad(y.sin().sum(), x)
    report = under_pass.fusion.report()
    assert [e.fused_into for e in report.entries] == [GATHER, SCATTER, GATHER, SCATTER], report
    every = [part.requires_grad_() for part in every_rank(x)]
    parts = (F.rms_norm(torch.cat(every, 1).sin(), (12,)) * world_size).chunk(2)
    check("y", y.detach(), parts[rank].detach(), 1e-6)
    # Of all ranks' losses, which each of them takes alike.
    want = torch.autograd.grad(sum(part.sin().sum() for part in parts), every)
    check("gradient", found, want[rank], 1e-6)


def test_between_cpu_ranks() -> None:
    torch.distributed.destroy_process_group()
    try:
        run_ranks(compiled, 2)
    finally:
        torch.distributed.init_process_group(
            "fake", rank=0, world_size=WORLD, store=torch.distributed.HashStore()
        )


def test_what_is_to_be_hidden_is_left_to_be() -> None:
    """By default; whoever asks for the ops gets them."""

    def fused(**settings: Any) -> list[str | None]:
        found = FusionPass(agree=False, **settings)
        (seen,) = captured(lambda x: gather(x.sin(), 0).cos(), X, fusion=found, dynamic=False)
        return seen.fused

    assert fused() == fused(collectives=True, reorder=True) == [GATHER]
    assert fused(reorder=True) == fused(collectives=False) == [None]
    with inductor_config.patch(reorder_for_compute_comm_overlap=True):
        assert fused() == [None] and fused(collectives=True) == [GATHER]
