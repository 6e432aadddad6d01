"""Whether fusing is profitable: not where the op itself would run unfused; always between CPU ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weft.fused_ops.dispatch import profitability
from weft.fused_ops.dispatch.profitability import (
    OPS,
    FusionCandidate,
    expected_gain,
    gain_of_joining,
    hidden_us,
    predicted_us,
    why_not_profitable,
)
from weft.fused_ops.library.communicating import COMMUNICATING
from weft.fused_ops.passes.graph.nodes import c10d
from weft.fused_ops.passes.patterns.pattern import word_of
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.all_reduce.configs import estimate_all_reduce_us
from weft.kernels.device import capability
from weft.kernels.device.device_spec import H100, H200, DeviceSpec
from weft.kernels.device.gemm import gemm_tiles
from weft.kernels.device.gemm.scaling import ScaledProducts, ScaleKind
from weft.kernels.matmul_reduce_scatter import configs as scatter

SIZES = st.integers(1, 1 << 15)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@given(st.sampled_from(OPS), SIZES, SIZES, SIZES, st.integers(2, 8), st.booleans())
def test_cpu_ranks_always_fuse(op: str, m: int, n: int, k: int, world: int, last: bool) -> None:
    assert (
        why_not_profitable(FusionCandidate(op, m, n, k, world, torch.float32, "cpu", last_dim=last)) is None
    )


def scaled(kind: ScaleKind, out_dtype: torch.dtype = BF16, *, travels: bool = False) -> ScaledProducts:
    return ScaledProducts((E4M3, E4M3), kind, out_dtype, kind is ScaleKind.BLOCKS, travels)


@pytest.mark.parametrize("kind", ScaleKind)
@pytest.mark.parametrize("m", [64, 1024, 8192])
def test_scaled_matmuls_ask_the_kernels_rule(m: int, kind: ScaleKind) -> None:
    """Two numbers of fp8 are one of theirs."""
    k, n = 4096, 6144
    of_gather = scaled(kind, travels=kind is not ScaleKind.TENSOR)
    reason = why_not_profitable(
        FusionCandidate("all_gather_scaled_matmul", m, n, k, 2, E4M3, "cuda", scaled=of_gather)
    )
    problem = gather.AllGatherMatmulProblem(m // 2, (n,), k // 2, 2, 132, scaled=of_gather)
    assert (reason is None) is gather.gather_is_profitable(problem)
    of_scatter = scaled(kind)
    reason = why_not_profitable(
        FusionCandidate("scaled_matmul_reduce_scatter", m, n, k, 2, BF16, "cuda", scaled=of_scatter)
    )
    parts = scatter.MatmulReduceScatterProblem(m // 2, n, k // 2, 2, 132, scaled=of_scatter)
    assert (reason is None) is scatter.scatter_is_profitable(parts)


def test_what_the_kernels_of_fp8_do_not_take() -> None:
    def why(op: str, how: ScaledProducts, *, last: bool = False, m: int = 8192, n: int = 4096) -> str:
        given = FusionCandidate(op, m, n, 4096, 2, E4M3, "cuda", last_dim=last, scaled=how)
        return why_not_profitable(given) or ""

    assert "the last dimension with row-wise" in why(
        "all_gather_scaled_matmul", scaled(ScaleKind.ROWS), last=True
    )
    assert not why("all_gather_scaled_matmul", scaled(ScaleKind.TENSOR), last=True)
    # Partial results of float32 are sent as they are, by the op and so in what the pass takes.
    assert not why("scaled_matmul_reduce_scatter", scaled(ScaleKind.TENSOR, torch.float32))
    blocks = scaled(ScaleKind.BLOCKS)
    assert "no whole blocks" in why("scaled_matmul_reduce_scatter", blocks, last=True, n=2 * 64)
    assert not why("scaled_matmul_reduce_scatter", blocks, last=True)
    assert not why("scaled_matmul_reduce_scatter", scaled(ScaleKind.TENSOR))
    for op in ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"):
        assert "one is empty" in why(op, scaled(ScaleKind.TENSOR), m=0)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("m", [64, 1024, 8192])
@pytest.mark.parametrize("n", [1024, 28672])
def test_all_gather_matmul_asks_the_kernels_rule(world: int, m: int, n: int) -> None:
    reason = why_not_profitable(FusionCandidate("all_gather_matmul", m, n, 4096, world, BF16, "cuda"))
    assert (reason is None) is gather.gather_is_profitable(
        gather.AllGatherMatmulProblem(m // world, (n,), 4096, world, 132)
    )
    if reason is not None:
        assert f"({m} x 4096 @ 4096 x {n})" in reason
    with_A = why_not_profitable(
        FusionCandidate("all_gather_matmul", m, n, 4096, world, BF16, "cuda", return_A=True)
    )
    assert (with_A is None) is gather.gather_is_profitable(
        gather.AllGatherMatmulProblem(m // world, (n,), 4096, world, 132, return_A=True)
    )
    assert with_A is not None or reason is None, "never more than where A is not wanted"
    aside = why_not_profitable(
        FusionCandidate("all_gather_matmul", m, n, 4096, world, BF16, "cuda", last_dim=True)
    )
    assert (aside is None) is gather.gather_is_profitable(
        gather.AllGatherMatmulProblem(m, (n,), 4096 // world, world, 132, split_k=True)
    )
    exact = why_not_profitable(FusionCandidate("all_gather_matmul", m, n, 4096, world, torch.float32, "cuda"))
    assert (exact is None) is gather.gather_is_profitable(
        gather.AllGatherMatmulProblem(m // world, (n,), 4096, world, 132, itemsize=4)
    )


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("m", [64, 1024, 8192])
def test_matmul_reduce_scatter_asks_the_kernels_rule(world: int, m: int) -> None:
    reason = why_not_profitable(FusionCandidate("matmul_reduce_scatter", m, 4096, 4096, world, BF16, "cuda"))
    assert (reason is None) is scatter.scatter_is_profitable(
        scatter.MatmulReduceScatterProblem(m // world, 4096, 4096, world, 132)
    )


def test_what_the_kernels_do_not_take() -> None:
    big = (8192, 28672, 4096, 4, BF16, "cuda")
    assert why_not_profitable(FusionCandidate("all_gather_matmul", *big)) is None
    assert why_not_profitable(FusionCandidate("matmul_reduce_scatter", *big)) is None
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert "multiple of 16 bytes" in str(
            why_not_profitable(FusionCandidate(op, 8192, 28672, 4097, 4, BF16, "cuda"))
        )
    exact = (*big[:4], torch.float32, "cuda")
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert why_not_profitable(FusionCandidate(op, *big, last_dim=True)) is None
        assert why_not_profitable(FusionCandidate(op, *exact, last_dim=True)) is None
    # The gathered rows would do, those of a rank's shard do not.
    narrow = (8192, 28672, 4 * 1028, 4, BF16, "cuda")
    assert why_not_profitable(FusionCandidate("all_gather_matmul", *narrow)) is None
    assert "rows of 1028" in str(
        why_not_profitable(FusionCandidate("all_gather_matmul", *narrow, last_dim=True))
    )
    # The columns of all ranks would do, those of one do not.
    narrow = (8192, 4 * 1028, 4096, 4, BF16, "cuda")
    assert why_not_profitable(FusionCandidate("matmul_reduce_scatter", *narrow)) is None
    assert "rows of 1028" in str(
        why_not_profitable(FusionCandidate("matmul_reduce_scatter", *narrow, last_dim=True))
    )
    assert why_not_profitable(FusionCandidate("matmul_reduce_scatter", *exact)) is None
    assert why_not_profitable(FusionCandidate("matmul_reduce_scatter", 256, 4096, *exact[2:])) is None


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_empty_matrices_are_not_fused(op: str, dtype: torch.dtype, last: bool) -> None:
    """Three rows, say, of which four ranks have none each."""
    for m, n, k in ((0, 4096, 4096), (3, 4096, 4096), (4096, 0, 4096), (4096, 4096, 0)):
        if m != 3 or not last:
            candidate = FusionCandidate(op, m, n, k, 4, dtype, "cuda", last_dim=last)
            assert why_not_profitable(candidate) is not None


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_no_kernel_is_profitable_for_empty_matrices(m: int, n: int, k: int, aside: bool) -> None:
    assert not gather.gather_is_profitable(gather.AllGatherMatmulProblem(m, (n,), k, 4, 132, aside))
    assert not scatter.scatter_is_profitable(
        scatter.MatmulReduceScatterProblem(m, n, k, 4, 132, split_n=aside)
    )


def test_large_all_reduces_are_left_to_the_backend() -> None:
    for world_size, most in [(3, 128), (4, 128), (5, 64), (8, 64)]:
        rows = most * 128  # of 8 KiB

        def why(rows: int, world_size: int = world_size) -> str | None:
            return why_not_profitable(FusionCandidate("all_reduce", rows, 4096, 0, world_size, BF16, "cuda"))

        assert why(rows) is None and f"{most} MiB" in str(why(rows + 1))
        assert why(rows + 1, 2) is None
    # In one kernel with its matmul it may be profitable, of 16 bits.
    assert (
        why_not_profitable(FusionCandidate("matmul_all_reduce", 16384, 4096, 4096, 4, BF16, "cuda")) is None
    )
    assert "128 MiB" in str(
        why_not_profitable(FusionCandidate("matmul_all_reduce", 16384, 4096, 4096, 4, torch.float32, "cuda"))
    )


def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "capability_of", lambda device: (7, 5))
    for op in OPS:
        assert "its kernels are for GPUs of compute capability 8." in str(
            why_not_profitable(FusionCandidate(op, 8192, 8192, 4096, 4, BF16, "cuda"))
        )


def test_an_unknown_op() -> None:
    with pytest.raises(ValueError, match="op: is 'matmul', must be one of all_gather_matmul, "):
        why_not_profitable(FusionCandidate("matmul", 1, 1, 1, 2, BF16, "cpu"))


def test_every_op_that_the_pass_puts_in_has_a_word() -> None:
    others = {"fused_linear_cross_entropy", "fused_linear_log_probs", "cross_entropy_of_sharded_logits"}
    others |= {f"fused_{what}" for what in ("all_gather_grouped_matmul", "grouped_matmul_all_reduce")}
    others |= {"fused_grouped_matmul_reduce_scatter", "moe_dispatch", "moe_dispatch_again", "moe_combine"}
    others |= {"one_shot_gather", "fused_matmul_all_to_all", "fused_all_to_all_matmul"}
    others |= {
        f"fused_moe_combine_{what}" for what in ("all_reduce", "all_reduce_rms_norm", "reduce_scatter")
    }
    for op in COMMUNICATING:
        name = op._schema.name.removeprefix("weft::")
        # The pass puts in none that writes in place, none of a vocabulary, of experts or of fp8 yet.
        if not (op._schema.is_mutable or "scaled" in name or name.endswith("_wait") or name in others):
            assert word_of(op) in OPS
    assert word_of(c10d.all_reduce.default) == "all_reduce"


def test_collectives_alone_up_to_what_was_measured() -> None:
    for op in ("all_gather", "reduce_scatter"):
        for world, most in ((2, 128), (4, 128), (5, 1), (8, 1)):
            whole = FusionCandidate(op, 1, most << 19, 0, world, BF16, "cuda")
            assert why_not_profitable(whole) is None
            larger = FusionCandidate(op, 2, most << 19, 0, world, BF16, "cuda", last_dim=True)
            assert why_not_profitable(larger) == (
                f"{2 * most} MiB are sent between {world} ranks: beyond {most} MiB that is left to the backend"
            )
            assert expected_gain(whole) == 0
    # All-to-alls were timed between 2.
    for world, most in ((2, 256), (3, 1), (4, 1)):
        for mib, why in ((most, None), (2 * most, f"beyond {most} MiB that is left to the backend")):
            exchange = FusionCandidate("all_to_all", 1, mib << 19, 0, world, BF16, "cuda")
            found = why_not_profitable(exchange)
            assert (found is None) == (why is None) and str(found).endswith(str(why))


@given(SIZES, SIZES, SIZES, st.integers(2, 8))
def test_what_is_hidden_is_at_most_either_part(m: int, n: int, k: int, world: int) -> None:
    link, rate = profitability._RATES["cuda"]
    gain = hidden_us(FusionCandidate("all_gather_matmul", m, n, k, world, BF16, "cuda"))
    received = m * k * 2 * (world - 1) / world
    assert gain == min(received / link, m * n * k / rate) > 0
    # A reduce_scatter sends what a gather of its result would.
    assert hidden_us(FusionCandidate("matmul_reduce_scatter", m, k, n, world, BF16, "cuda")) == gain
    assert hidden_us(FusionCandidate("all_reduce", m, n, 0, world, BF16, "cuda")) == 0
    assert expected_gain(FusionCandidate("all_reduce", m, n, 0, world, BF16, "cuda")) == 0


def test_the_gain_of_a_known_layer() -> None:
    """Llama 8B's up and gate on 4 H200: 48 MiB come in, which takes 138 us, less than the products."""
    gain = hidden_us(FusionCandidate("all_gather_matmul", 8192, 7168, 4096, 4, BF16, "cuda"))
    assert 130 < gain < 145


# Of M, N, K on 2 H100, microseconds: unfused, and fused with A returned or not (bench/results/h100-x2-gathered-a.txt).
MEASURED = {
    (1024, 3072, 4096): (76.4, 61.4, 53.1),
    (1024, 14336, 4096): (202.2, 175.1, 167.2),
    (2048, 3072, 4096): (124.9, 88.0, 76.5),
    (2048, 14336, 4096): (378.8, 333.1, 319.9),
    (2048, 2048, 4096): (101.2, 69.7, 59.3),
    (2048, 7168, 4096): (236.6, 178.4, 166.3),
    (8192, 3072, 4096): (430.8, 329.5, 284.4),
    (8192, 2048, 4096): (343.1, 239.2, 193.7),
    (8192, 7168, 4096): (819.5, 695.2, 642.1),
}


def test_the_gain_is_nearer_to_what_was_measured() -> None:
    """Than what is hidden would be: that leaves out launches, and what NCCL and cuBLAS take longer."""
    off = {}
    for estimate in (expected_gain, hidden_us):
        off[estimate] = 0.0
        for (m, n, k), (unfused, _, fused) in MEASURED.items():
            gain = estimate(FusionCandidate("all_gather_matmul", m, n, k, 2, BF16, "cuda"))
            off[estimate] += abs(gain - (unfused - fused))
    assert off[expected_gain] < 0.5 * off[hidden_us], off


def measured_sums(file: str) -> list[dict[str, Any]]:
    """Rows of matmul_all_reduce in CUDA graphs, of 2 H200 those that the model's constants were fitted to."""
    name = f"{file}-matmul_all_reduce{'-2026-11-23' if file == 'h200-x2' else ''}.json"
    path = Path(__file__).parents[3] / "bench" / "results" / name
    return [row for row in json.loads(path.read_text())["rows"] if row["mode"] == "graph"]


def test_the_gain_of_a_summed_product_is_nearer_to_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than what is hidden would be. Of 1 MiB and more, from where on the pass takes them; of calls longer than 0.6 ms
    the gain is less than runs differ by."""
    off, promised, measured = {expected_gain: 0.0, hidden_us: 0.0}, 0.0, 0.0
    for file, world, spec in (("h100-x2", 2, H100), ("h200-x2", 2, H200), ("h200-x4", 4, H200)):
        monkeypatch.setattr(profitability, "_spec", lambda spec=spec, **_: spec)
        for row in measured_sums(file):
            if row["M"] * row["N"] < 1 << 19 or row["unfused_us"] > 600:
                continue
            sizes = row["M"], row["N"], row["K"] // world
            candidate = FusionCandidate("matmul_all_reduce", *sizes, world, BF16, "cuda")
            for estimate in off:
                off[estimate] += abs(estimate(candidate) - (row["unfused_us"] - row["weft_us"]))
            promised, measured = (
                promised + expected_gain(candidate),
                measured + row["unfused_us"] - row["weft_us"],
            )
    assert off[expected_gain] < 0.85 * off[hidden_us], off
    assert 0.9 < promised / measured < 1.25, (promised, measured)


def test_joined_products_are_launched_once() -> None:
    """One product of all depths sends no less, so that what is gained is little where nothing is hidden."""
    few, many = (FusionCandidate("matmul_all_reduce", m, 4096, 4104, 2, BF16, "cuda") for m in (128, 4096))
    assert 0 < gain_of_joining(few, [4096, 8]) < 8
    assert gain_of_joining(many, [4096, 8]) > 0.4 * estimate_all_reduce_us(4096 * 4096 * 2, 2)
    of_float32 = FusionCandidate("matmul_all_reduce", 128, 4096, 4104, 2, torch.float32, "cuda")
    assert gain_of_joining(of_float32, [4096, 8]) == hidden_us(of_float32)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 1024, 1024), (8192, 3072, 4096), (8192, 4096, 2048)])
def test_the_gain_is_what_the_plan_predicts(op: str, m: int, n: int, k: int) -> None:
    candidate = FusionCandidate(op, m, n, k, 2, BF16, "cuda")
    gain = expected_gain(candidate)
    assert (gain > 0) == (why_not_profitable(candidate) is None)
    if op == "all_gather_matmul":
        of_gather = gather.AllGatherMatmulProblem(m // 2, (n,), k, 2, 132)
        fused, moved = gather.rank_gather_kernels(of_gather)[0][0], of_gather.moved
    else:
        of_scatter = scatter.MatmulReduceScatterProblem(m // 2, n, k, 2, 132)
        fused, moved = scatter.rank_scatter_kernels(of_scatter)[0][0], of_scatter.moved
    assert gain == max(0.0, gemm_tiles.unfused_us(m, n, k, moved) - fused)


@pytest.mark.parametrize(
    ("file", "world", "spec"), [("h100-x2", 2, H100), ("h200-x2", 2, H200), ("h200-x4", 4, H200)]
)
def test_products_and_all_reduces_take_what_was_measured(file: str, world: int, spec: DeviceSpec) -> None:
    """Of CUDA graphs; few rows only where the file is as new as their kernel."""
    off = []
    for row in measured_sums(file):
        if row["M"] > 16 or row["algorithm"] != "push":
            sizes = row["M"], row["N"], row["K"] // world
            us = predicted_us(FusionCandidate("matmul_all_reduce", *sizes, world, BF16, "cuda"), spec)
            assert us is not None
            off.append(math.log(us / row["weft_us"]))
    assert len(off) >= 20
    assert fmean(map(abs, off)) < 0.08, off
    assert max(map(abs, off)) < math.log(1.28), off
