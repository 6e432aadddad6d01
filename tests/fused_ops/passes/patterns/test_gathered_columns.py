"""A product whose columns are gathered: what the pass fuses, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import applied, check_same, traced
from spelled import ag
from torch import Tensor
from weft.fused_ops import FusionPass
from weft.fused_ops.dispatch.profitability import FusionCandidate, expected_gain, why_not_profitable

pytestmark = pytest.mark.usefixtures("two")
OP, ALONE = "weft::fused_matmul_all_gather", "weft::one_shot_all_gather"
X, W, B = (4, 8), (8, 6), (2, 2, 8)


def columns(y: Tensor) -> Tensor:
    """All ranks' y along its last dimension."""
    whole = ag(y.reshape(-1, y.shape[-1]))
    return torch.cat(whole.chunk(2), -1).view(*y.shape[:-1], -1)


def twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return columns(y), y + 1


# Why nothing but the gather is taken.
REASONS = {
    "padding_cut_off": "only slice_1 (slice.Tensor) takes it, no other product; columns are cut off that some ranks",
    "taken_by_another": "no other product; mm (mm.default) is used by view (view.default), add ",
    "with_bias": "no other product; addmm (addmm.default) is no product alone",
    "multiplied": "no other product; mul (mul.Tensor) is no product alone",
    "rows": "no other product; columns are not gathered side by side",
}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "matrix": (lambda x, w: columns(x @ w), (X, W), OP),
    "batch": (lambda x, w: columns(x @ w), (B, W), OP),
    "weight_in_columns": (lambda x, w: columns(x @ w.t()), (X, (6, 8)), OP),
    "sum_after_it": (lambda x, w: columns(x @ w).sum(-1), (X, W), OP),
    # Where ranks have 6 and 5 columns, the second one pads them.
    "padding_cut_off": (lambda x, w: columns(x @ w)[..., :11], (X, W), ALONE),
    "padding_cut_off_the_cast": (lambda x, w: columns(x @ w).bfloat16()[..., :11], (X, W), ALONE),
    "others_cut_off": (lambda x, w: columns(x @ w)[..., :9], (X, W), OP),
    "taken_by_another": (twice, (X, W), ALONE),
    "with_bias": (lambda x, w, b: columns(torch.addmm(b, x, w)), (X, W, (6,)), ALONE),
    "multiplied": (lambda x, w: columns((x @ w) * 2), (X, W), ALONE),
    "rows": (lambda x, w: ag(x @ w), (X, W), ALONE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_fused(name: str) -> None:
    fn, shapes, into = CASES[name]
    seen = applied(
        traced(fn, *map(torch.randn, shapes)), FusionPass(fuse="always", agree=False, collectives=True)
    )
    assert seen.fused == [into], seen.reasons
    assert REASONS.get(name, "") in seen.entries[0].detail, seen.entries
    check_same(seen, 2)


def test_what_is_profitable() -> None:
    for m, n, pays in ((4096, 75968, True), (1024, 64128, True), (64, 75968, False), (2048, 1024, False)):
        candidate = FusionCandidate("matmul_all_gather", m, n, 4096, 2, torch.bfloat16, "cuda")
        why = why_not_profitable(candidate)
        assert (why is None) == pays == (expected_gain(candidate) > 0), (m, n, why)
        assert pays or why == f"too little is multiplied and gathered ({m} x 4096 @ 4096 x {n})"
