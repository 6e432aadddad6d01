"""The Triton kernels of linear_cross_entropy in the interpreter, against plain torch in float64."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import aot
import interpreter
import pytest
import torch
from ranks import run_ranks
from weft.kernels.device.capability import ALL, HOPPER
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
    from weft.kernels.linear_cross_entropy.triton_kernel import LogitTile

    interpreter.install()
    triton_kernel._STATISTICS = LogitTile(1, 8, 1), LogitTile(2, 4, 1)
    triton_kernel._GRADIENT = LogitTile(1, 64, 1), LogitTile(4, 16, 1)
    triton_kernel._SPAN, triton_kernel._FEW = (128, 128), 6
    # Scores and cuts by turns: each of them meets each size, extra and order.
    for i, (count, extra, turned) in enumerate(product((1, 5, 64, 130, 0), EXTRAS, (False, True))):
        how = (Scores(None, 1.0), Scores(3.0, 0.7))[(i + i // 2 + i // 6) % 2]
        logits = torch.randn(5, count + 3).to(dtype)[:, 1 : count + 1]  # a part of a larger tensor
        if turned:
            logits = torch.randn(count, 8).to(dtype)[:, 1:6].t()
        logits[2, : count // 2] = -9e9 if extra == "mean" else -torch.inf
        targets = torch.tensor([10, 9 + count, 11 + count, -100, 10 + count // 3])
        columns = Columns(targets, torch.tensor([10]), how, extra)
        exact, cut = logits.double(), count // 3
        want = reference_statistics(exact, columns)
        for at in {cut, (0, count)[i // 2 % 2]}:
            got = triton_kernel.launch_statistics([logits[:, :at], logits[:, at:]], columns)
            close(got, want, 2e-6 * (1 + 100 * (extra != "")))
        terms = torch.randn(5, 5)
        terms[0] = want[0].float().clamp(-50, 50)
        wanted = torch.empty_like(exact)
        reference_gradient(exact, columns, terms.double(), wanted)
        for part, first in ((logits[:, :cut], 0), (logits[:, cut:], cut)):
            triton_kernel.launch_gradient(part, columns._replace(first=first), terms, part)
        close(logits, wanted, BOUND[dtype])
    triton_kernel._MULTIPLY_BLOCK, triton_kernel._MULTIPLY_PROGRAMS = 64, 3
    for factor in (1.0, 0.3, torch.inf):
        x = torch.randn(7, 33).to(dtype).t()
        x[5] = 0
        wanted = (x.double() * factor).where(x != 0, 0)
        triton_kernel.launch_multiply(x, torch.tensor(factor))
        close(x, wanted, BOUND[dtype])


def losses(rank: int, size: int, ranks: int) -> None:
    from weft.kernels.linear_cross_entropy import triton_kernel

    interpreter.install()
    triton_kernel._LOSS_BLOCK = 16
    for rows in (1, 16, 37):
        for loss in (Loss(-100, 0.0, 0.0), Loss(3, 0.2, 0.0), Loss(-100, 0.3, 0.01), Loss(-100, 1.0, 0.0)):
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


def test_losses_of_rows() -> None:
    run_ranks(losses, 1, 3, env=ENV)


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

    sizes = dict.fromkeys(("rows", "columns", "first", "row_stride", "column_stride"), "i32")
    given = {"logits": "*bf16", "targets": "*i64", "start": "*i64"}
    constants = {"CAP": cap, "TEMPERATURE": 0.5, "ENTROPY": extra == "entropy"}
    both = []
    for along, one in enumerate(("column_stride", "row_stride")):

        def compiled(kernel: Any, signature: dict[str, str], tile: Any, **named: Any) -> aot.Compiled:
            aligned = tuple(name for name in signature if not name.endswith(one))  # noqa: B023
            ones = {name: 1 for name in signature if name not in aligned}
            named |= {**constants, **ones, "ROWS": tile.rows, "COLUMNS": tile.columns}
            return aot.compile_kernel(kernel, signature, named, aligned, tile.warps, 3)

        named = {
            "MEAN": extra == "mean",
            "LOADS": triton_kernel._LOADS[along],
            "SPAN": triton_kernel._SPAN[along],
        }
        tile = triton_kernel._STATISTICS[along]
        both.append(
            compiled(triton_kernel.statistics_kernel, {**given, "out": "*fp32", **sizes}, tile, **named)
        )
        signature = {**given, "terms": "*fp32", "out": "*bf16", **sizes}
        signature |= dict.fromkeys(("out_row_stride", "out_column_stride"), "i32")
        both.append(compiled(triton_kernel.gradient_kernel, signature, triton_kernel._GRADIENT[along]))
    named = {"MEAN": extra == "mean", "ENTROPY": extra == "entropy", "PROGRAMS": 256}
    named["BLOCK"] = triton_kernel._COMBINE_BLOCK
    signature = {"found": "*fp32", "out": "*fp32", "rows": "i32", "columns": "i32", "programs": "i32"}
    assert (
        aot.compile_kernel(triton_kernel.combine_kernel, signature, named, tuple(signature), 4, 3).spilled
        == 0
    )
    signature = {"gathered": "*fp32", "targets": "*i64", "count": "*i64", "losses": "*fp32", "terms": "*fp32"}
    signature |= {"rows": "i32", "ignore_index": "i32"}
    smoothing, statistics = (0.1, 4) if extra == "mean" else (0.0, 2)
    more = {
        "SMOOTHING": smoothing,
        "TARGET_WEIGHT": 1 - smoothing,
        "Z_LOSS": 0.01,
        "RANKS": 2,
        "STATISTICS": statistics,
    }
    more["BLOCK"] = triton_kernel._LOSS_BLOCK
    between = aot.compile_kernel(triton_kernel.loss_kernel, signature, more, tuple(signature), 4, 3)
    assert between.spilled == 0
    for kernel in both:
        print(f"{kernel.registers} registers, {kernel.shared} bytes of shared memory")
        assert kernel.spilled == 0
        assert "ld.global.v4" in kernel.ptx  # 16 bytes at a time


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"
)
@pytest.mark.parametrize("arch", [10 * major + minor for major, minor in ALL if (major, minor) != HOPPER])
def test_they_compile_for_other_gpus(arch: int) -> None:
    with aot.compiled_for(arch):
        test_they_compile_for_hopper("entropy", 30.0)
