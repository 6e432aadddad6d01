"""Rows of logits whose columns the ranks share: statistics of a rank's columns, of all of them, and their gradient.

In plain torch, float32. CPU ranks run it; on CUDA ``triton_kernel.py`` has what reads every logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: A third statistic of a row, besides the logarithm of its sum of exponentials and its target's score.
EXTRAS = ("", "mean", "entropy")


@dataclass(frozen=True)
class Scores:
    """What is exponentiated: ``softcap * tanh(logits / softcap) / temperature``, in float32, or float64 of such."""

    softcap: float | None
    temperature: float

    def of(self, logits: Tensor) -> Tensor:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores / self.temperature

    def slopes(self, scores: Tensor) -> Tensor | float:
        """Their derivatives by the logits."""
        if self.softcap is None:
            return 1 / self.temperature
        return (1 - (scores * (self.temperature / self.softcap)).square()) / self.temperature


class Columns(NamedTuple):
    """What is known of a rank's logits besides their values.

    Attributes:
        targets: [M], int64: columns of the whole vocabulary; those of other ranks, or of none, are no columns here.
        start: [1], int64: the first column of this rank.
        scores: how logits are scored.
        extra: one of EXTRAS.
        first: how many of this rank's columns are before these logits'.
    """

    targets: Tensor
    start: Tensor
    scores: Scores
    extra: str
    first: int = 0

    def rows(self, some: slice) -> Columns:
        return self._replace(targets=self.targets[some])


def count_statistics(extra: str) -> int:
    """Of a row: as many of a rank's columns as of all of them."""
    return 2 + {"": 0, "mean": 2, "entropy": 1}[extra]


def reference_statistics(logits: Tensor, columns: Columns) -> Tensor:
    """Of logits [M, V of this rank], [K, M] in float32.

    The logarithm of the sum of exponentials; the target's score, -inf where the target is not here; for "mean" the
    sum of scores and their count, for "entropy" that of this rank's columns alone.
    """
    count = logits.shape[1]
    scores = columns.scores.of(logits)
    if not count:
        scores = scores.new_full((logits.shape[0], 1), -torch.inf)
    log_sum = scores.logsumexp(1)
    at = columns.targets - columns.start - columns.first
    here = (at >= 0) & (at < count)
    target = scores.gather(1, torch.where(here, at, 0).unsqueeze(1)).squeeze(1).where(here, -torch.inf)
    sent = [log_sum, target]
    if columns.extra == "mean":
        sent += [scores[:, :count].sum(1), torch.full_like(log_sum, count)]
    elif columns.extra == "entropy":
        weights = (scores - log_sum.unsqueeze(1)).exp()
        weighted = (weights * scores).where(weights > 0, 0).sum(1)
        sent.append((log_sum - weighted).where(log_sum > -torch.inf, 0))
    return torch.stack(sent)


def combine(gathered: Tensor, extra: str) -> Tensor:
    """All ranks' statistics [W, K, M] as those of all columns, [K, M]: the same bits on every rank.

    The logarithm of the sum of exponentials; the target's score, -inf where no rank has it; for "mean" the mean of
    all scores and their count, for "entropy" that of the row.
    """
    log_sums = gathered[:, 0]
    log_sum = log_sums.logsumexp(0)
    values = [log_sum, gathered[:, 1].amax(0)]
    if extra == "mean":
        count = gathered[:, 3].sum(0)
        values += [gathered[:, 2].sum(0) / count, count]
    elif extra == "entropy":
        shares = log_sums - log_sum  # logarithms of each rank's part of the probability
        weights = shares.exp()
        values.append((weights * (gathered[:, 2] - shares)).where(weights > 0, 0).sum(0))
    return torch.stack(values)


def gradient_terms(values: Tensor, gradients: Tensor, extra: str) -> Tensor:
    """[5, M]: of rows with these statistics and gradients of them, what the gradient of each score is made of.

    log_sum, a, b, c, d: a score's gradient is ``p * (a - b * score) + c``, and the target's ``+ d``, where p is
    ``exp(score - log_sum)``.
    """
    none = torch.zeros_like(values[0])
    a, b, c = gradients[0], none, none
    if extra == "mean":
        c = gradients[2] / values[3]
    elif extra == "entropy":
        b = gradients[2]
        a = a + b * (values[0] - values[2])
    return torch.stack([values[0], a, b, c, gradients[1]])


def reference_gradient(logits: Tensor, columns: Columns, terms: Tensor, out: Tensor) -> None:
    """The gradient of logits [M, V of this rank] into ``out``, which they may be."""
    scores = columns.scores.of(logits)
    log_sum, a, b, c, d = terms.unsqueeze(2)
    p = (scores - log_sum).exp()
    gradient = (p * (a - b * scores) if columns.extra == "entropy" else p * a).where(p != 0, 0) + c
    at = columns.targets - columns.start - columns.first
    here = torch.arange(logits.shape[1], device=logits.device) == at.unsqueeze(1)
    out.copy_((gradient + here * d) * columns.scores.slopes(scores))


@dataclass(frozen=True)
class Loss:
    """Cross entropy of rows, by their statistics: ``log_sum - target`` where nothing is smoothed.

    Attributes:
        ignore_index: a target whose rows count nothing.
        label_smoothing: the part of the target's weight that all columns share.
        z_loss: what the square of log_sum is weighed with.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def target_weight(self) -> float:
        """Above 0, so that a target of no rank, of score -inf, makes a loss infinite, not NaN."""
        return max(1 - self.label_smoothing, torch.finfo(torch.float32).tiny)

    def rows(self, values: Tensor, targets: Tensor) -> Tensor:
        """[M], 0 where a row is ignored. Differentiable."""
        loss = values[0] - self.target_weight * values[1]
        if self.label_smoothing:
            loss = loss - self.label_smoothing * values[2]
        if self.z_loss:
            loss = loss + self.z_loss * values[0].square()
        return loss.where(targets != self.ignore_index, 0)

    def gradients(self, values: Tensor, targets: Tensor) -> Tensor:
        """Those of the sum of ``rows`` by ``values``."""
        of = torch.zeros_like(values)
        of[0] = 1 + 2 * self.z_loss * values[0]
        of[1] = self.label_smoothing - 1
        if self.label_smoothing:
            of[2] = -self.label_smoothing
        return of.where(targets != self.ignore_index, 0)


def losses_and_terms(
    gathered: Tensor, targets: Tensor, loss: Loss, count: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of all ranks' statistics [W, K, M], each row's loss [M], and ``gradient_terms`` [5, M] of the sum of these.

    Args:
        count: by which the gradients are divided, if there is one, 1 at least.
    """
    extra = "mean" if loss.label_smoothing else ""
    values = combine(gathered, extra)
    of_values = loss.gradients(values, targets)
    if count is not None:
        of_values = of_values / count.clamp(min=1)
    return loss.rows(values, targets), gradient_terms(values, of_values, extra)
