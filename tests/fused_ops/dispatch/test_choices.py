"""One choice for all who ask: the run of a call, ``plan()``, the graph pass and what compiles kernels ahead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import Gpu
from first_runs import loaded_at_first_run
from graphs import fake_ranks
from torch._subclasses import FakeTensorMode
from weft.fused_ops import plan
from weft.fused_ops.dispatch.choice import choice_of_call
from weft.fused_ops.dispatch.plan import forced, num_sms
from weft.fused_ops.dispatch.profitability import FusionCandidate, predicted_us, why_not_profitable
from weft.kernels.device.gemm.scaling import ScaledProducts, ScaleKind
from weft.symm_mem.backends import cuda_state

sys.path.append(str(Path(__file__).parents[3] / "bench"))
from registry import ALONE, LAST_DIMENSION, LAYER_NORM, OPS, SCALED_OPS, SPLITS, Row, select_rows

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EVERY = (*OPS, LAYER_NORM, *SCALED_OPS)
LEFT_TO_BACKEND = "left to the backend"
weft = torch.ops.weft

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of GPUs that are none")


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of ranks that are not there."""
    with fake_ranks(request.param):
        yield request.param


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def scales(how: str, rows: int, k: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of A [rows, k] and B [k, columns]."""
    f32 = torch.float32
    if how == "tensor":
        return tensor(1, dtype=f32), tensor(1, dtype=f32)
    if how == "rows":
        return tensor(rows, 1, dtype=f32), tensor(1, columns, dtype=f32)
    return tensor(k // 128, rows, dtype=f32).t(), tensor(k // 128, columns // 128, dtype=f32)


def call_of(row: Row, size: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of a row of the bench, of fake tensors."""
    m, k, n, last = row.M, row.K or 0, row.N, row.name in LAST_DIMENSION
    if row.op == "all_reduce":
        return weft.one_shot_all_reduce, (tensor(m, n), "sum", "0"), {}
    if row.op in ALONE:
        dim = int(row.name.endswith(".last"))
        if row.op == "all_gather":
            return (
                weft.one_shot_all_gather,
                (tensor(m, n // size) if dim else tensor(n // size), dim, "0"),
                {},
            )
        x = tensor(m, n) if dim else tensor(n)
        if row.op == "all_to_all":
            return weft.one_shot_all_to_all, (x, dim, 0, "0"), {}
        return weft.one_shot_reduce_scatter, (x, "sum", dim, "0"), {}
    if row.op == "all_reduce_rms_norm":
        return weft.fused_all_reduce_rms_norm, (tensor(m, n), tensor(m, n), tensor(n), 1e-5, "0"), {}
    if row.op == LAYER_NORM:
        given = tensor(m, n), tensor(m, n), tensor(n), tensor(n), 1e-5, "0"
        return weft.fused_all_reduce_layer_norm, given, {}
    if row.op == "matmul_all_reduce":
        return weft.fused_matmul_all_reduce, (tensor(m, k // size), tensor(k // size, n), "sum", "0"), {}
    if row.op == "all_gather_matmul":
        split = SPLITS.get(row.name, (1,))
        Bs = [tensor(k, n // size * share // sum(split)) for share in split]
        shard = tensor(m, k // size) if last else tensor(m // size, k)
        return weft.fused_all_gather_matmul, (shard, Bs, int(last), "0"), {"return_A": False}
    if row.op == "matmul_reduce_scatter":
        given = tensor(m, k // size), tensor(k // size, n), "sum", int(last), "0"
        return weft.fused_matmul_reduce_scatter, given, {}
    how = row.name.rsplit(".", 1)[1]
    if row.op == "all_gather_scaled_matmul":
        columns = n // size
        of_A, of_B = scales(how, m // size, k, columns)
        A, B = tensor(m // size, k, dtype=FP8), tensor(columns, k, dtype=FP8).t()
        given = A, [B], of_A, [of_B], 0, "0", [None], [None], [BF16], [True]
        return weft.fused_all_gather_scaled_matmul, given, {"return_A": False}
    k //= size
    A, B, (of_A, of_B) = tensor(m, k, dtype=FP8), tensor(n, k, dtype=FP8).t(), scales(how, m, k, n)
    given = A, B, of_A, of_B, "sum", 0, 0, "0", None
    return weft.fused_scaled_matmul_reduce_scatter, given, {"out_dtype": BF16, "use_fast_accum": True}


def candidate_of(row: Row, size: int) -> FusionCandidate:
    """As the pass asks about it."""
    m, k, n = row.M, row.K or 0, row.N
    if "gather" in row.op and k:
        n //= size
    elif k:
        k //= size
    scaled = None
    if row.op in SCALED_OPS:
        kind = {"tensor": ScaleKind.TENSOR, "rows": ScaleKind.ROWS, "blocks": ScaleKind.BLOCKS}[
            row.name.rsplit(".", 1)[1]
        ]
        scaled = ScaledProducts(
            types=(FP8, FP8),
            kind=kind,
            out_dtype=BF16,
            promote=kind is ScaleKind.BLOCKS,
            travels="gather" in row.op and kind is not ScaleKind.TENSOR,
        )
    dtype = FP8 if row.op == "all_gather_scaled_matmul" else BF16
    last = row.name in LAST_DIMENSION
    return FusionCandidate(row.op, m, n, k, size, dtype, "cuda", last, scaled=scaled)


@pytest.fixture(params=["not there", "fake"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    num_sms.cache_clear()
    if request.param == "fake":
        monkeypatch.setattr(cuda_state, "state", Gpu(sms=132))
    yield
    num_sms.cache_clear()


@pytest.mark.parametrize("op", EVERY)
def test_the_pass_and_the_plan_choose_alike(op: str, ranks: int, gpu: None) -> None:
    """For every row of the bench."""
    rows = select_rows("cuda", (op,), modes=("eager",))
    if op in ("all_gather_matmul", "matmul_reduce_scatter"):
        rows += select_rows("cuda", (op,), ("last",), modes=("eager",))
    assert rows
    for row in rows:
        with FakeTensorMode():
            called, given, named = call_of(row, ranks)
        found = plan(called, *given, **named)
        if op == LAYER_NORM:
            assert found.algorithm == "push", row
            continue
        candidate = candidate_of(row, ranks)
        if op != "all_reduce_rms_norm":
            why = why_not_profitable(candidate)
            if why is None or LEFT_TO_BACKEND in why:
                assert found.algorithm != "unfused", (row, found)
            else:
                assert found.algorithm == "unfused", (row, why, found)
        if (
            found.algorithm != "unfused" and row.name not in SPLITS
        ):  # of whose Bs the pass knows the sum of columns
            assert found.predicted_us == predicted_us(candidate), (row, found)


HOW = (None, "push", "one_shot", "copy_engine")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("op", EVERY)
def test_the_first_run_loads_the_programs_of_the_choice(op: str, how: str | None, ranks: int) -> None:
    rows = select_rows("cuda", (op,), ("8b",) if "matmul" in op else (), modes=("eager",))[::3]
    assert rows
    for row in rows:
        if row.name.endswith(".blocks"):  # fake scales are not to be cut where torch has no CUDA
            continue
        with FakeTensorMode(), nullcontext() if how is None else forced(how):
            called, given, named = call_of(row, ranks)
            found, choice = choice_of_call(called, given, named)
            assert found == plan(called, *given, **named)
            if found.algorithm == "two_kernels":  # of which cuBLAS has the first
                called, given = weft.one_shot_all_reduce, (tensor(row.M, row.N), "sum", "0")
            loaded = loaded_at_first_run(called.default, given, named)
        names = [*map(str, choice.programs())]
        assert set(names) == set(map(str, loaded)), (row, found)
        assert bool(names) == (found.algorithm != "unfused")


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_reduce_rms_norm", "all_gather", "reduce_scatter", "all_to_all"]
)
def test_over_pcie_collectives_send_in_turn(op: str, ranks: int) -> None:
    """Where there is more than one peer."""
    for row in select_rows("cuda", (op,), modes=("eager",))[::3]:
        with FakeTensorMode():
            called, given, named = call_of(row, ranks)
            loaded = loaded_at_first_run(called.default, given, named, over_pcie=True)
        assert loaded and all(("IN_TURN" in program.defines) == (ranks > 2) for program in loaded)


@pytest.mark.parametrize("ranks", [2, 4, 8], indirect=True)
def test_few_rows_are_gathered_in_one_shot(ranks: int) -> None:
    for n, k in ((3072, 4096), (14336, 4096), (28672, 8192)):
        for rows in (16, 64, 128, 2048):
            with FakeTensorMode():
                given = tensor(rows // ranks, k), [tensor(k, n)], 0, "0"
            found = plan(weft.fused_all_gather_matmul, *given, return_A=False)
            assert found.algorithm == ("one_shot" if rows <= 128 else "push"), (ranks, rows, n)
            kept = plan(weft.fused_all_gather_matmul, *given, return_A=True)
            assert kept.algorithm != "one_shot"
