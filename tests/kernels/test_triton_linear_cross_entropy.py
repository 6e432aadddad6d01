"""The Triton kernels of linear_cross_entropy in the interpreter, against plain torch in float64."""

from __future__ import annotations

import interpreter
import pytest
import torch
from ranks import run_ranks
from weft.kernels.linear_cross_entropy.reference import (
    EXTRAS,
    Columns,
    Scores,
    reference_gradient,
    reference_statistics,
)

ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite], want[~finite])
    assert ((got.double() - want)[finite].abs() <= bound * (1 + want[finite].abs())).all()


def kernels(rank: int, size: int, dtype: torch.dtype) -> None:
    from weft.kernels.linear_cross_entropy import triton_kernel

    interpreter.install()
    triton_kernel._ROW_BLOCK = triton_kernel._BLOCK = 64
    for count in (1, 5, 64, 130, 0):
        for extra in EXTRAS:
            for how in (Scores(None, 1.0), Scores(3.0, 0.7)):
                logits = torch.randn(4, count + 3).to(dtype)[:, 1 : count + 1]  # rows of a larger tensor
                logits[2, : count // 2] = -9e9 if extra == "mean" else -torch.inf
                targets = torch.tensor([10, 9 + count, 11 + count, -100])
                columns = Columns(targets, torch.tensor([10]), how, extra)
                exact = logits.double()
                want = reference_statistics_of(exact, columns)
                close(triton_kernel.statistics(logits, columns), want, 2e-6 * (1 + 100 * (extra != "")))
                terms = torch.randn(5, 4)
                terms[0] = want[0].float().clamp(-50, 50)
                wanted = torch.empty_like(exact)
                reference_gradient(exact, columns, terms.double(), wanted)
                triton_kernel.gradient(logits, columns, terms, logits)
                close(logits, wanted, BOUND[dtype])


def reference_statistics_of(exact: torch.Tensor, columns: Columns) -> torch.Tensor:
    return reference_statistics(exact, columns).double()


@pytest.mark.parametrize("dtype", BOUND)
def test_statistics_and_gradient(dtype: torch.dtype) -> None:
    run_ranks(kernels, 1, dtype, env=ENV)
