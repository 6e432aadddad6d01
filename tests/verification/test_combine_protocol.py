"""Experts' outputs that the CUDA all-reduce, its norm and the reduce-scatter put together while they load them: kernels
and launchers on the CPU, threads as fibers."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from combines import Routed, routed
from fibers import PATIENT, TORCH, Ranks, build, defines_of, drawn_seed, same
from opcommon import BOUND, check
from weft.kernels.all_reduce import cuda_kernel as all_reduce_kernel
from weft.kernels.all_reduce.configs import AllReduceConfig
from weft.kernels.all_reduce_rms_norm import cuda_kernel as norm_kernel
from weft.kernels.all_reduce_rms_norm.configs import FORMS, AllReduceRmsNormConfig, shape
from weft.kernels.all_reduce_rms_norm.reference import NormKind, rms_norm
from weft.kernels.device.collective.combine import CombinedSum, CombineShape
from weft.kernels.device.collective.rounds import RoundsConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.kernels.reduce_scatter import cuda_kernel as reduce_scatter_kernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

EPS = 0.1
CASES = [  # ranks, dtype, choices, float32 weights, shared
    (2, "bfloat16", 8, True, True),
    (3, "float32", 1, False, False),
    (4, "bfloat16", 10, False, True),
    (3, "bfloat16", 2, True, False),
]


class Kernels:
    """A stand-in for a loaded program."""

    def __init__(self, ranks: Ranks) -> None:
        self.function = ranks.function


class Call:
    """What every rank gives, and what it must add up to, to the bit: choices in their order in float32, rounded, then
    the ranks."""

    def __init__(
        self,
        size: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        of: CombineShape,
        reduce_op: str = "sum",
    ) -> None:
        self.tokens, self.hidden, self.dtype = sizes[0], sizes[2], dtype
        kinds = random.choice(["random", "random", "one", "none"])
        self.given = [routed((*sizes, 8), dtype, of.wide, kinds) for _ in range(size)]
        self.of = of._replace(rows=sizes[0] * sizes[1])
        self.wanted = CombinedSum(self.tokens, self.hidden, dtype, self.of, reduce_op)
        total = torch.zeros(())
        for i, rank in enumerate(self.given):
            own = self._own(rank).float()
            total = own if i == 0 else total + own
        self.total = (total / size if reduce_op == "avg" else total).to(dtype)

    def _own(self, given: Routed) -> torch.Tensor:
        rows = torch.zeros(self.tokens, self.hidden)
        for t in range(self.tokens):
            for slot, weight in zip(given.slots[t].tolist(), given.weights[t].float(), strict=True):
                if slot >= 0:
                    rows[t] += weight * given.y[slot].float()
        return (rows + given.shared.float() if self.of.shared else rows).to(self.dtype)

    def operands(self, rank: int) -> list[int]:
        return [t.data_ptr() for t in self.given[rank][: 3 + self.of.shared]]


def begin(case: tuple[int, str, int, bool, bool]) -> tuple[int, torch.dtype, CombineShape]:
    drawn_seed()
    size, dtype, choices, wide, shared = case
    return size, TORCH[dtype], CombineShape(0, choices, wide, shared)


def reduced_by(of: CombineShape) -> str:
    return "avg" if of.choices == 1 else "sum"


def end(ranks: Ranks) -> None:
    ranks.run(random.randrange(1 << 30))
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"


@pytest.mark.parametrize("case", CASES)
def test_all_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    size, dtype, of = begin(case)
    kernels = tuple(form + suffix for form in (*FORMS, "two_shot_rounds") for suffix in ("", "_any"))
    defines = defines_of(all_reduce_kernel.all_reduce_program(size, 0, dtype, reduced_by(of), of[1:]))
    library = build(tmp_path, all_reduce_kernel.SOURCE, kernels, all_reduce_kernel._CombineParams, defines)
    ranks = Ranks(library, ExchangeLayout(size, 512))
    monkeypatch.setattr(all_reduce_kernel, "all_reduce_program", lambda *a: Kernels(ranks))
    calls = []
    for form in ("one_shot", "two_shot", "two_shot", "two_shot", "one_shot"):
        sizes = random.choice([1, size, 5, 2 * size, 7 * size]), of.choices, 8 * random.choice([1, 3, 17])
        call = Call(size, sizes, dtype, of, reduced_by(of))
        outs = []
        for rank in range(size):
            out = torch.full((call.tokens + 1, call.hidden), 7.0, dtype=dtype)
            config = AllReduceConfig(form, 3 if form == "one_shot" else 1, 64 if form == "one_shot" else 32)
            kernel = all_reduce_kernel.combine_all_reduce_launcher(ranks.places[rank], call.wanted, config)
            kernel.launch(0, call.operands(rank), [out.data_ptr()], PATIENT, rank)
            outs.append(out)
        calls.append((call, outs))
    end(ranks)
    for call, outs in calls:
        for out in outs:
            assert same(out[:-1], call.total) and bool((out[-1] == 7).all())


@pytest.mark.parametrize(("case", "residual"), [*zip(CASES, (True, True, False, False), strict=True)])
def test_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Any, residual: bool) -> None:
    size, dtype, of = begin(case)
    cluster, vectors = 2, 70
    kind = NormKind(EPS, round_sum=residual, residual=residual, combine=of)
    of_one = AllReduceRmsNormConfig("one_shot", cluster, threads=32)
    per_thread = shape(1, vectors, size, of_one).per_thread
    defines = norm_kernel.norm_defines(size, dtype, (cluster, per_thread), kind)
    library = build(tmp_path, norm_kernel.SOURCE, FORMS, norm_kernel._CombineParams, defines)
    ranks = Ranks(library, ExchangeLayout(size, 64 * 20 * per_thread))
    monkeypatch.setattr(norm_kernel, "norm_program", lambda *a: Kernels(ranks))
    hidden, calls = vectors * 16 // dtype.itemsize, []
    for form in (*FORMS, *FORMS):
        call = Call(size, (random.randrange(1, 9), of.choices, hidden), dtype, of)
        weight, outs = torch.randn(hidden).to(dtype), []
        residuals = torch.randn(size, call.tokens, hidden).to(dtype)
        for rank in range(size):
            normed, sums = (torch.full((call.tokens + 1, hidden), 7.0, dtype=dtype) for _ in range(2))
            config = AllReduceRmsNormConfig(form, cluster, 2 * cluster, threads=32)
            place, kinds = ranks.places[rank], kind._replace(combine=call.of)
            kernel = norm_kernel.AllReduceRmsNormLauncher(place, call.tokens, hidden, dtype, kinds, config)
            read = [residuals[rank], weight] if residual else [weight]
            parts, shared = call.operands(rank)[:3], call.operands(rank)[3:]
            operands = [*parts, *(t.data_ptr() for t in read), *shared]
            kernel.launch(0, operands, [normed.data_ptr(), sums.data_ptr()], PATIENT, rank)
            outs.append((normed, sums))
        calls.append((call, residuals, weight, outs))
    end(ranks)
    for call, residuals, weight, outs in calls:
        for rank, (normed, sums) in enumerate(outs):
            want = call.total + residuals[rank] if residual else call.total
            assert same(sums[:-1], want), case
            check("normed", normed[:-1], rms_norm(want.double(), weight.double(), EPS), BOUND[dtype])
            assert bool((normed[-1] == 7).all()) and bool((sums[-1] == 7).all()), "written past the end"
    assert ranks.slots_are_empty()


@pytest.mark.parametrize("case", CASES)
def test_reduce_scatters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    size, dtype, of = begin(case)
    kernels = ("one_shot", "one_shot_any", "rounds", "rounds_any")
    defines = defines_of(reduce_scatter_kernel.reduce_scatter_program(size, 0, dtype, reduced_by(of), of[1:]))
    library = build(
        tmp_path, reduce_scatter_kernel.SOURCE, kernels, reduce_scatter_kernel._CombineParams, defines
    )
    ranks = Ranks(library, ExchangeLayout(size, 256))
    monkeypatch.setattr(reduce_scatter_kernel, "reduce_scatter_program", lambda *a: Kernels(ranks))
    calls = []
    for dim, tokens, hidden in (
        (0, size, 8),
        (0, 3 * size, 56),
        (1, 5, 8),
        (1, 1, 24),
        (0, 20 * size, 64),
        (1, 40, 32),
    ):
        sizes = tokens, of.choices, hidden * size if dim else hidden
        call = Call(size, sizes, dtype, of, reduced_by(of))
        outs = []
        for rank in range(size):
            part = call.total.chunk(size, dim)[rank]
            out = torch.full((part.numel() + 1,), 7.0, dtype=dtype)
            config = RoundsConfig(64, 1, 32)
            kernel = reduce_scatter_kernel.combine_reduce_scatter_launcher(
                ranks.places[rank], call.wanted, dim, config
            )
            kernel.launch(0, call.operands(rank), [out.data_ptr()], PATIENT, rank)
            outs.append((out, part))
        calls.append((call, outs))
    end(ranks)
    assert {kernels[n.kernel] for place in ranks.places for n in place.launches} == {"one_shot", "rounds"}
    for _, outs in calls:
        for out, part in outs:
            assert same(out[:-1], part.flatten()) and out[-1] == 7
