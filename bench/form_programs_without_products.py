"""The forms for which the pass has other settings: collectives alone, and sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from form_programs import WORLD, Form, ag, ar, rs
from torch import Tensor
from torch.nn import functional as F

ALONE = "all-gather or reduce-scatter alone"
BY_ROWS = "all-reduce as reduce-scatter and all-gather (sequence_parallel)"


def logits(x: Tensor, w: Tensor) -> Tensor:
    return ag(x @ w, 1)


def queries(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(ag(x @ w, 1), (16,), weight)


def embedding(x: Tensor, w: Tensor) -> Tensor:
    return rs(torch.where(x > 0, x, 0) + w, 1)


def between_norms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(ag(F.rms_norm(x, (8,), w), 1).sin(), (8,), w)


def norm_and_product(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    y = residual + ar(x @ w)
    return F.rms_norm(y, y.shape[-1:], weight, 1e-6) @ v


def own_rows(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(ar(x @ w), (8,), weight, 1e-6).chunk(WORLD)[dist.get_rank()]


def two_layers(x: Tensor, w: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(2):
        x = x + ar(F.linear(x, w))
        x = x + ar(F.linear(F.silu(F.linear(F.rms_norm(x, (8,), weight, 1e-6), up)), down))
        x = F.rms_norm(x, (8,), weight, 1e-6)
    return F.linear(x, up)


def layer_norm(x: Tensor, w: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(ar(x @ w), (8,), weight, weight) @ v


def forms_without_products() -> Iterator[tuple[str, list[Form]]]:
    """The table's last parts."""
    x2, x3, square, row, w = (6, 8), (2, 6, 8), (8, 8), (8,), (8, 5)
    yield (
        ALONE,
        [
            Form("logits", logits, (x2, w)),
            Form("queries in front of their norm", queries, (x2, square, (16,))),
            Form("an embedding's rows", embedding, (x3, x3)),
            Form("between norms", between_norms, (x3, row)),
        ],
    )
    given = (12, 5), (5, 8)
    yield (
        BY_ROWS,
        [
            Form("residual, norm, product", norm_and_product, (*given, (12, 8), row, w), alike=True),
            Form("LayerNorm, product", layer_norm, (*given, row, w), alike=True),
            Form("norm, own rows", own_rows, (*given, row), alike=True),
            Form("two layers", two_layers, (x3, square, row, (12, 8), (8, 12)), alike=True),
        ],
    )
