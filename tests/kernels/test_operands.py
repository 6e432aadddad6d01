"""Which factors of a product the kernels take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weft.kernels.device.gemm.operands import is_transposed, why_not


def matrices(m: int = 64, n: int = 64, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)


def test_what_is_supported() -> None:
    a, b = matrices()
    assert why_not(a, b) is None
    assert why_not(a, torch.empty(64, 64, dtype=torch.bfloat16).t()) is None
    assert why_not(torch.empty(64, 80, dtype=torch.bfloat16)[:, 8:72], b) is None
    assert why_not(*matrices(dtype=torch.float32, k=36, n=4)) is None
    assert why_not(torch.empty(1, 3, 64, 64, dtype=torch.bfloat16), b) is None
    assert why_not(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), b.to("meta")) is None


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (*matrices(dtype=torch.float64), "dtype"),
        (matrices()[0], matrices(dtype=torch.float16)[1], "must be the same"),
        (*matrices(k=36), "K: rows of 36"),
        (*matrices(n=36), "N: rows of 36"),
        (*matrices(m=0), "empty"),
        (torch.empty(64, 64, dtype=torch.bfloat16).t(), matrices()[1], "A: strides"),
        (torch.empty(64, 68, dtype=torch.bfloat16)[:, :64], matrices()[1], "A: strides"),
        (torch.empty(64, dtype=torch.bfloat16).expand(64, 64), matrices()[1], "A: strides"),
        (torch.empty(64, 72, dtype=torch.bfloat16)[:, 1:65], matrices()[1], "A: starts 2 bytes"),
        (matrices()[0], torch.empty(64, 128, dtype=torch.bfloat16)[:, ::2], "B: strides"),
    ],
)
def test_what_is_not_supported(a: torch.Tensor, b: torch.Tensor, words: str) -> None:
    assert words in (why_not(a, b) or "")


def test_how_a_matrix_lies() -> None:
    assert not is_transposed(torch.empty(8, 8))
    assert is_transposed(torch.empty(8, 8).t())
