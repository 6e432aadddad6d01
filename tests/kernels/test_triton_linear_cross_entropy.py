"""The Triton kernels of linear_cross_entropy in the interpreter, against plain torch in float64."""

from __future__ import annotations

import os

import aot
import interpreter
import pytest
import torch
from ranks import run_ranks
from weft.kernels.linear_cross_entropy.reference import (
    EXTRAS,
    Columns,
    Loss,
    Scores,
    losses_and_terms,
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
                want = reference_statistics(exact, columns)
                close(
                    triton_kernel.launch_statistics(logits, columns), want, 2e-6 * (1 + 100 * (extra != ""))
                )
                terms = torch.randn(5, 4)
                terms[0] = want[0].float().clamp(-50, 50)
                wanted = torch.empty_like(exact)
                reference_gradient(exact, columns, terms.double(), wanted)
                triton_kernel.launch_gradient(logits, columns, terms, logits)
                close(logits, wanted, BOUND[dtype])
    triton_kernel._MULTIPLY_BLOCK = 64
    for factor in (1.0, 0.3):
        x = torch.randn(7, 33).to(dtype).t()
        wanted = x.double() * factor
        triton_kernel.launch_multiply(x, torch.tensor(factor))
        close(x, wanted, BOUND[dtype])


def losses(rank: int, size: int, ranks: int) -> None:
    from weft.kernels.linear_cross_entropy import triton_kernel

    interpreter.install()
    triton_kernel._LOSS_BLOCK = 16
    for rows in (1, 16, 37):
        for loss in (Loss(-100, 0.0, 0.0), Loss(3, 0.2, 0.0), Loss(-100, 0.3, 0.01)):
            gathered = torch.randn(ranks, 4 if loss.label_smoothing else 2, rows)
            gathered[:, 3:] = torch.arange(5.0, 5 + ranks)[:, None, None]
            gathered[0, 0, 0] = -torch.inf  # a rank that has no columns
            gathered[1:, 1, : rows // 2] = -torch.inf
            targets = torch.randint(6, (rows,))
            targets[0] = loss.ignore_index
            for count in (None, torch.tensor(7), torch.tensor(0)):
                got = triton_kernel.launch_losses(gathered, targets, loss, count)
                for a, b in zip(got, losses_and_terms(gathered.double(), targets, loss, count), strict=True):
                    close(a, b, 1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_of_rows(ranks: int) -> None:
    run_ranks(losses, 1, ranks, env=ENV)


@pytest.mark.parametrize("dtype", BOUND)
def test_statistics_and_gradient(dtype: torch.dtype) -> None:
    run_ranks(kernels, 1, dtype, env=ENV)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"
)
@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("extra", EXTRAS)
def test_they_compile_for_hopper(extra: str, cap: float) -> None:
    """As the launches have it, nothing is spilled."""
    from weft.kernels.linear_cross_entropy import triton_kernel

    common = {"logits": "*bf16", "targets": "*i64", "start": "*i64"}
    sizes, constants = dict.fromkeys(("columns", "row_stride"), "i32"), {"CAP": cap, "TEMPERATURE": 0.5}
    constants["ENTROPY"] = extra == "entropy"
    signature = {**common, "out": "*fp32", **sizes}
    block, warps = triton_kernel._ROW_BLOCK, triton_kernel._ROW_WARPS
    more = {**constants, "MEAN": extra == "mean", "BLOCK": block}
    rows = aot.compile_kernel(triton_kernel.statistics_kernel, signature, more, tuple(signature), warps, 3)
    signature = {**common, "terms": "*fp32", "out": "*bf16", **sizes, "out_stride": "i32"}
    more = {**constants, "BLOCK": triton_kernel._BLOCK}
    warps = triton_kernel._WARPS
    elements = aot.compile_kernel(triton_kernel.gradient_kernel, signature, more, tuple(signature), warps, 3)
    signature = {"gathered": "*fp32", "targets": "*i64", "count": "*i64", "losses": "*fp32", "terms": "*fp32"}
    signature |= {"rows": "i32", "ignore_index": "i32"}
    smoothing, statistics = (0.1, 4) if extra == "mean" else (0.0, 2)
    more = {"SMOOTHING": smoothing, "Z_LOSS": 0.01, "RANKS": 2, "STATISTICS": statistics}
    more["BLOCK"] = triton_kernel._LOSS_BLOCK
    between = aot.compile_kernel(triton_kernel.loss_kernel, signature, more, tuple(signature), 4, 3)
    assert between.spilled == 0
    for kernel in (rows, elements):
        print(f"{kernel.registers} registers, {kernel.shared} bytes of shared memory")
        assert kernel.spilled == 0
        assert "ld.global.v4" in kernel.ptx  # 16 bytes at a time


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"
)
@pytest.mark.parametrize("arch", [80, 89, 120])
def test_they_compile_for_other_gpus(arch: int) -> None:
    with aot.compiled_for(arch):
        test_they_compile_for_hopper("entropy", 30.0)
