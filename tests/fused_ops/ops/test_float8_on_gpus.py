"""The layer functions of fp8 on GPUs: the bits of the casts, and whole layers, as between CPU ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_row
from test_float8_products import ROUND, cast_bits, column_wise, row_wise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("of", ROUND)
def test_casts_are_torchaos(of: torch.dtype) -> None:
    run_row(cast_bits, 2, of, device="cuda")


@pytest.mark.parametrize("fn", [column_wise, row_wise])
def test_a_layer(fn: Callable[..., None]) -> None:
    run_row(fn, 2, (16,), 0, torch.bfloat16, device="cuda")
