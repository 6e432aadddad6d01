"""Vocabularies that ranks share in unequal parts, and float64 references of what is computed of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from opcommon import assert_fused, check, gather, poison, same_on_all, world
from torch import Tensor
from torch.nn.functional import cross_entropy
from weft.fused_ops import fused_linear_cross_entropy

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

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, bias and logits in float64, of which gradients are taken."""
        x, weight, bias = (t.double().requires_grad_() for t in (self.x, self.weight, self.bias))
        return x, weight, bias, x @ weight.t() + bias

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        w, b = self.weight[self.mine].clone(), self.bias[self.mine].clone()
        return self.x.clone().requires_grad_(), w.requires_grad_(), b.requires_grad_()


def problem(shape: tuple[int, ...], columns: int, dtype: torch.dtype, hidden: int = 24) -> Problem:
    """Columns cut at random, so that some ranks may have none; targets of every rank, some ignored."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = same_on_all(*shape, hidden)
    # Logits seldom reach 4: from there on their rounding to bfloat16 alone changes a probability by the bound.
    weight, bias = same_on_all(columns, hidden) / (2 * hidden**0.5), same_on_all(columns) / 2
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
    """The loss, and the gradients of x, weight and bias; ``want`` has that of the logits, too. The last two are sums
    over rows, which may cancel out: what 16 bits round is held against their norms."""
    loss, of_x, of_weight, of_bias, of_logits = want
    rows = of_logits[..., case.mine].flatten(0, -2)
    of_rows = rows.norm(dim=1) * case.x.flatten(0, -2).double().norm(dim=1)
    rounded = case.x.dtype != torch.float32
    check(f"{name}, loss", got[0], loss, bound)
    check(f"{name}, x", got[1], of_x, bound)
    check(f"{name}, weight", got[2], of_weight[case.mine], bound, [of_rows] if rounded else None)
    check(f"{name}, bias", got[3], of_bias[case.mine], bound, [rows] if rounded else None)


def losses(
    rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], columns: int, fused: bool = True
) -> None:
    for how in HOWS:
        poison(rank)
        case = problem(shape, columns, dtype)
        operands = case.whole()
        want = reference(operands[3], case.targets, how)
        factor = factor_of(want)
        wanted = (want.detach(), *torch.autograd.grad((want * factor).sum(), operands))
        for start in (None, case.mine.start):
            x, w, b = case.parts()
            loss = fused_linear_cross_entropy(x, w, case.targets, world(), bias=b, vocab_start=start, **how)
            if size > 1 and fused:
                assert_fused()
            assert loss.dtype == torch.float32
            (loss * factor.float()).sum().backward()
            got = loss.detach(), x.grad, w.grad, b.grad
            compare(f"{how}", got, wanted, case, BOUND[dtype])  # type: ignore[arg-type]
            with torch.no_grad():
                again = fused_linear_cross_entropy(
                    x, w, case.targets, world(), bias=b, vocab_start=start, **how
                )
            check(f"{how}, without gradients", again, wanted[0], BOUND[dtype])  # in other chunks
            every = gather(loss)
            assert all(torch.equal(each, every[0]) for each in every), "ranks have other bits"
