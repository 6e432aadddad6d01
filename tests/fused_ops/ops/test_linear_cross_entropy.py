"""fused_linear_cross_entropy and its siblings on ranks of unequal parts, against float64 of the whole vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from opcommon import DEVICES, assert_fused, check, gather, poison, same_on_all, world
from ranks import run_ranks, run_row
from torch import Tensor
from torch.nn.functional import cross_entropy
from weft.fused_ops import (
    cross_entropy_of_sharded_logits,
    fused_linear_cross_entropy,
    fused_linear_log_probs,
)
from weft.fused_ops.ops.vocabulary import chunks

# Logits, their gradients, products of these and a sum over ranks are each rounded to 16 bits.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
IGNORED = -100


class Problem(NamedTuple):
    """What all ranks have alike, but for ``mine``: this rank's columns."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    mine: slice

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        w, b = self.weight.double(), self.bias.double()
        return self.x.double().requires_grad_(), w.requires_grad_(), b.requires_grad_()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        w, b = self.weight[self.mine].clone(), self.bias[self.mine].clone()
        return self.x.clone().requires_grad_(), w.requires_grad_(), b.requires_grad_()


def problem(shape: tuple[int, ...], columns: int, dtype: torch.dtype, hidden: int = 24) -> Problem:
    """Columns cut at random, so that some ranks may have none; targets of every rank, some ignored."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = same_on_all(*shape, hidden)
    weight, bias = same_on_all(columns, hidden) / hidden**0.5, same_on_all(columns)
    cuts = same_on_all(size - 1).abs().mul(columns / 2).long().clamp(max=columns).sort().values.tolist()
    first, last = [0, *cuts][rank], [*cuts, columns][rank]
    targets = same_on_all(*shape).abs().mul(columns / 3).long() % columns
    targets = targets.where(same_on_all(*shape) < 1, IGNORED)
    targets.view(-1)[:1] = columns // 2  # a mean has something to count
    return Problem(x.to(dtype), weight.to(dtype), bias.to(dtype), targets, slice(first, last))


def scored(logits: Tensor, how: dict[str, Any]) -> Tensor:
    if how.get("softcap") is not None:
        logits = how["softcap"] * (logits / how["softcap"]).tanh()
    return logits / how.get("temperature", 1.0)


def reference(logits: Tensor, targets: Tensor, how: dict[str, Any]) -> Tensor:
    """In float64, of all columns."""
    flat = scored(logits, how).flatten(0, -2)
    rows = cross_entropy(
        flat, targets.reshape(-1), label_smoothing=how.get("label_smoothing", 0.0), reduction="none"
    )
    counts = targets.reshape(-1) != IGNORED
    rows = rows + (how.get("z_loss", 0.0) * flat.logsumexp(1).square()).where(counts, 0)
    reduction = how.get("reduction", "mean")
    if reduction == "none":
        return rows.view(targets.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / counts.sum()


def factor_of(loss: Tensor) -> Tensor:
    """A gradient from above."""
    return same_on_all(max(loss.numel(), 1)).view(loss.shape)


HOWS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1, "softcap": 2.0},
    {"reduction": "none", "label_smoothing": 0.2, "z_loss": 0.01},
    {"reduction": "mean", "z_loss": 0.02, "temperature": 0.7},
    {"reduction": "none", "softcap": 1.5, "temperature": 2.0},
]


def compare(
    name: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...], case: Problem, bound: float
) -> None:
    """The loss, and the gradients of x, weight and bias."""
    mine = want[0], want[1], want[2][case.mine], want[3][case.mine]
    for of, value, wanted in zip(("loss", "x", "weight", "bias"), got, mine, strict=True):
        check(f"{name}, {of}", value, wanted, bound)


def losses(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], columns: int) -> None:
    for how in HOWS:
        poison(rank)
        case = problem(shape, columns, dtype)
        operands = case.whole()
        want = reference(operands[0] @ operands[1].t() + operands[2], case.targets, how)
        factor = factor_of(want)
        wanted = (want.detach(), *torch.autograd.grad((want * factor).sum(), operands))
        for start in (None, case.mine.start):
            x, w, b = case.parts()
            loss = fused_linear_cross_entropy(x, w, case.targets, world(), bias=b, vocab_start=start, **how)
            if size > 1:
                assert_fused()
            assert loss.dtype == torch.float32
            (loss * factor.float()).sum().backward()
            got = loss.detach(), x.grad, w.grad, b.grad
            compare(f"{how}", got, wanted, case, BOUND[dtype])  # type: ignore[arg-type]
            with torch.no_grad():
                again = fused_linear_cross_entropy(
                    x, w, case.targets, world(), bias=b, vocab_start=start, **how
                )
            assert torch.equal(again, loss)
            every = gather(loss)
            assert all(torch.equal(each, every[0]) for each in every), "ranks have other bits"


SHAPES = [((1,), 1000), ((7,), 33), ((2, 5), 257)]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_gradients(world_size: int, device: str, dtype: torch.dtype) -> None:
    for shape, columns in SHAPES:
        run_row(losses, world_size, dtype, shape, columns, device=device)


def in_chunks(rank: int, size: int) -> None:
    chunks.ROWS = 5
    for rows in (4, 5, 6, 23):
        losses(rank, size, torch.float32, (rows,), 65)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_come_in_chunks(world_size: int) -> None:
    run_ranks(in_chunks, world_size, fresh=True)


def log_probs(rank: int, size: int, dtype: torch.dtype) -> None:
    for how in ({}, {"softcap": 2.0, "temperature": 0.6}):
        case = problem((3, 4), 300, dtype)
        counts = case.targets != IGNORED
        operands = case.whole()
        logs = scored(operands[0] @ operands[1].t() + operands[2], how).log_softmax(-1)
        of_target = logs.gather(-1, case.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(counts, 0)
        entropy = -(logs.exp() * logs).sum(-1).where(counts, 0)
        factors = same_on_all(3, 4), same_on_all(3, 4)
        total = (of_target * factors[0] + entropy * factors[1]).sum()
        wanted = torch.autograd.grad(total, operands)
        x, w, b = case.parts()
        got, of_rows = fused_linear_log_probs(x, w, case.targets, world(), bias=b, return_entropy=True, **how)
        check("entropy", of_rows.detach(), entropy.detach(), BOUND[dtype])
        (got * factors[0].float() + of_rows * factors[1].float()).sum().backward()
        found = got.detach(), x.grad, w.grad, b.grad
        compare(f"{how}", found, (of_target.detach(), *wanted), case, BOUND[dtype])  # type: ignore[arg-type]
        alone = fused_linear_log_probs(x, w, case.targets, world(), bias=b, **how)
        assert torch.equal(alone, got)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_log_probs_and_entropy(world_size: int, device: str, dtype: torch.dtype) -> None:
    run_row(log_probs, world_size, dtype, device=device)


def of_logits(rank: int, size: int, dtype: torch.dtype) -> None:
    for how in HOWS:
        case = problem((6, 3), 130, dtype)
        logits = same_on_all(6, 3, 130, dtype=dtype)
        logits[2, 1, 5:90] = -torch.inf if not how.get("label_smoothing") else -9  # masked columns
        case.targets[2, 1] = 100
        whole = logits.double().requires_grad_()
        want = reference(whole, case.targets, how)
        factor = factor_of(want)
        (wanted,) = torch.autograd.grad((want * factor).sum(), whole)
        mine = logits[..., case.mine].detach().requires_grad_()  # columns of a larger tensor
        loss = cross_entropy_of_sharded_logits(mine, case.targets, world(), **how)
        (loss * factor.float()).sum().backward()
        check(f"{how}", loss.detach(), want.detach(), 2e-6)
        check(f"{how}, gradient", mine.grad, wanted[..., case.mine], BOUND[dtype])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_of_logits(world_size: int, device: str, dtype: torch.dtype) -> None:
    run_row(of_logits, world_size, dtype, device=device)
