"""The CUDA all-reduce + RMSNorm or LayerNorm and its launcher on the CPU, threads as fibers."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import PATIENT, TORCH, Ranks, build, drawn_seed, inputs, mistakes, same
from opcommon import BOUND, check
from weft.kernels.all_reduce_rms_norm import configs, cuda_kernel
from weft.kernels.all_reduce_rms_norm.configs import (
    CLUSTERS,
    FORMS,
    AllReduceRmsNormConfig,
    all_reduce_rms_norm_layout,
    choose_all_reduce_rms_norm,
    shape,
)
from weft.kernels.all_reduce_rms_norm.reference import NormKind, rms_norm
from weft.kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout

EPS = 0.1  # so large that it shows in every dtype


class Kernels:
    """A stand-in for a loaded program."""

    def __init__(self, ranks: Ranks) -> None:
        self.function = ranks.function


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("world_size", "dtype", "cluster", "chunks"),
    [(2, "bfloat16", 2, 3), (3, "float32", 1, 2), (4, "bfloat16", 4, 5), (8, "bfloat16", 2, 1)],
)
def test_calls_of_changing_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, dtype: str, cluster: int, chunks: int
) -> None:
    calls_of_changing_size(tmp_path, monkeypatch, world_size, dtype, (cluster, chunks))


USUAL = NormKind(EPS)
KINDS = {
    "unrounded": NormKind(EPS, round_sum=False),
    "Gemma": NormKind(EPS, weight_offset=1.0),
    "wide weight": NormKind(EPS, wide_weight=True),
    "unrounded, wide, offset": NormKind(EPS, weight_offset=0.5, round_sum=False, wide_weight=True),
    "no residual": NormKind(EPS, residual=False),
    "no residual, wide, offset": NormKind(EPS, weight_offset=1.0, residual=False, wide_weight=True),
    "LayerNorm": NormKind(EPS, subtract_mean=True, bias=True),
    "LayerNorm, wide, offset": NormKind(
        EPS, weight_offset=1.0, wide_weight=True, subtract_mean=True, bias=True
    ),
    "LayerNorm, no residual, only a bias": NormKind(
        EPS, residual=False, subtract_mean=True, weight=False, bias=True
    ),
    "LayerNorm, neither": NormKind(EPS, subtract_mean=True, weight=False),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [
        (name, *((2, "bfloat16"), (3, "bfloat16"), (4, "float32"))[i % 3])
        for i, name in enumerate(KINDS)  # what is normed knows nothing of how it came
    ],
)
def test_norms_of_other_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, dtype: str
) -> None:
    calls_of_changing_size(tmp_path, monkeypatch, world_size, dtype, (2, 3), KINDS[name])


def of_a_kind(
    kind: NormKind, total: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum as it is stored, and what is normed, in float64."""
    stored = total.to(residual.dtype)
    if not kind.residual:
        return stored, stored.double()
    return stored + residual, (
        (stored + residual).double() if kind.round_sum else stored.double() + residual.double()
    )


def normed_by(kind: NormKind, wide: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not kind.subtract_mean:
        return rms_norm(wide, weight, EPS, kind.weight_offset)
    affine = weight if kind.weight else None, EPS, kind.weight_offset, bias if kind.bias else None
    return rms_norm(wide, *affine, subtract_mean=True)


# In cluster_reduce.cuh, and what the calls above must then show.
MISTAKES = {
    "terms not awaited": ("wait(barriers + round % 2, round / 2 % 2);", ""),
    "terms awaited by a thread": (
        "wait(barriers + round % 2",
        "if (threadIdx.x == 0) wait(barriers + round % 2",
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 2))
def test_a_team_that_does_not_wait_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    def calls() -> None:
        for i in range(20):
            calls_of_changing_size(
                tmp_path / str(i), monkeypatch, 2, "bfloat16", (4, 3), instead=MISTAKES[mistake]
            )

    with pytest.raises(AssertionError, match=r"Config\("):  # of a result, not of a text that is not there
        calls()


def calls_of_changing_size(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    dtype: str,
    shares: tuple[int, int],
    kind: NormKind = USUAL,
    **how: Any,
) -> None:
    """``how``: what is compiled in besides, or ``instead``."""
    instead = how.pop("instead", None)
    cluster, chunks = shares
    seed = drawn_seed()
    choice = random.Random(seed)
    # A team takes several rows, and a thread two vectors of each.
    vectors = 32 * (chunks * cluster - 1) - 5 if chunks * cluster > 2 else 40
    of_one = AllReduceRmsNormConfig("one_shot", cluster, threads=32)
    per_thread = shape(1, vectors, world_size, of_one).per_thread
    defines = {**cuda_kernel.norm_defines(world_size, TORCH[dtype], (cluster, per_thread), kind), **how}
    library = build(folder, cuda_kernel.SOURCE, FORMS, cuda_kernel._Params, defines, instead=instead)
    ranks = Ranks(library, ExchangeLayout(world_size, 64 * 20 * per_thread))
    monkeypatch.setattr(cuda_kernel, "norm_program", lambda *a: Kernels(ranks))
    hidden = vectors * 16 // TORCH[dtype].itemsize
    calls = []
    for _ in range(8):
        rows, config = (
            choice.randrange(1, 9),
            AllReduceRmsNormConfig(choice.choice(FORMS), cluster, 2 * cluster, threads=32),
        )
        xs = inputs(rows * hidden, TORCH[dtype], world_size)
        if choice.random() < 0.7:
            xs = [torch.randn(rows * hidden).to(TORCH[dtype]) for _ in xs]
        xs = [x.view(rows, hidden).contiguous() for x in xs]
        residuals = [torch.randn(rows, hidden).to(xs[0].dtype) for _ in xs]
        columns = torch.float32 if kind.wide_weight else xs[0].dtype
        weight, bias = (torch.randn(hidden).to(columns) for _ in range(2))
        outs = []
        for rank, residual in enumerate(residuals):
            sevens = torch.full_like(residual, 7.0)
            # After each lie rows that must stay.
            rooms = [
                torch.cat([t, sevens[:1].expand(world_size, -1)])
                for t in (sevens, sevens, xs[rank], residual)
            ]
            normed, sums, *mine = (room[:rows] for room in rooms)
            kernel = cuda_kernel.AllReduceRmsNormLauncher(
                ranks.places[rank], rows, hidden, TORCH[dtype], kind, config
            )
            # The sums may take the place of the residual or of x.
            sums = choice.choice((sums, *mine))
            read = [*mine] if kind.residual else mine[:1]
            read += [t for t, there in ((weight, kind.weight), (bias, kind.bias)) if there]
            given, to = [[t.data_ptr() for t in ts] for ts in (read, (normed, sums))]
            kernel.launch(0, given, to, PATIENT, rank)
            outs.append((normed, sums, rooms))
        calls.append((xs, residuals, (weight, bias), outs, config))
    ranks.run(seed)
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"
    for xs, residuals, affine, outs, config in calls:
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        for residual, (normed, sums, rooms) in zip(residuals, outs, strict=True):
            assert all(bool((room[len(sums) :] == 7).all()) for room in rooms), "written past the end"
            want, wide = of_a_kind(kind, total, residual)
            assert same(sums, want), config
            finite = wide.isfinite().all(-1)
            reference = normed_by(kind, wide[finite], *(t.double() for t in affine))
            if bool(reference.isfinite().all()):
                check(str(config), normed[finite], reference, BOUND[residual.dtype])
    assert ranks.slots_are_empty()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, KINDS["LayerNorm"]), (3, USUAL), (3, KINDS["LayerNorm"]), (5, USUAL)]
)
def test_the_forms_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, kind: NormKind
) -> None:
    """Of one_shot, where a warp makes one sum at a time, and of two_shot, where it makes those of a group of rows. The
    rows are far from zero: a mean is that exact, and the variance as exact as around it."""
    torch.manual_seed(random.randrange(1 << 30))
    rows, vectors = 7, 70
    xs = [torch.randn(rows, vectors * 4) + 4096 / world_size for _ in range(world_size)]
    residual, *columns = torch.randn(rows, vectors * 4), torch.randn(vectors * 4), torch.randn(vectors * 4)
    results = []
    for cluster in (1, 2):
        of_one = AllReduceRmsNormConfig("one_shot", cluster, threads=32)
        per_thread = shape(1, vectors, world_size, of_one).per_thread
        defines = cuda_kernel.norm_defines(world_size, torch.float32, (cluster, per_thread), kind)
        library = build(tmp_path / str(cluster), cuda_kernel.SOURCE, FORMS, cuda_kernel._Params, defines)
        for form in FORMS:
            ranks = Ranks(library, ExchangeLayout(world_size, 64 * 20 * per_thread))
            monkeypatch.setattr(cuda_kernel, "norm_program", lambda *a, found=ranks: Kernels(found))
            outs = []
            for rank, x in enumerate(xs):
                config = AllReduceRmsNormConfig(form, cluster, 2 * cluster, threads=32)
                kernel = cuda_kernel.AllReduceRmsNormLauncher(
                    ranks.places[rank], rows, vectors * 4, x.dtype, kind, config
                )
                normed, sums = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
                given = [t.data_ptr() for t in (x, residual, *columns[: 1 + kind.bias])]
                kernel.launch(0, given, [normed.data_ptr(), sums.data_ptr()], PATIENT, rank)
                outs += [normed, sums]
            ranks.run(random.randrange(1 << 30))
            results.append(outs)
    want = normed_by(kind, results[0][1].double(), *(t.double() for t in columns))
    check("normed", results[0][0], want, 1e-3)
    for i, first in enumerate(results[0]):
        assert same(first, results[0][i % 2]), "ranks differ"
        assert all(same(first, outs[i]) for outs in results), "forms differ"


def test_every_block_hears_from_every_rank_and_has_room() -> None:
    for world_size in (2, 3, 4, 8):
        for rows in (1, 3, 16, 131, 133, 512, 5000):
            for vectors in (1, 31, 33, 360, 512, 1024, 4000):
                config = choose_all_reduce_rms_norm(rows, vectors, world_size)
                got = shape(rows, vectors, world_size, config)
                chunks = -(-vectors // 32)
                assert config.cluster in CLUSTERS and config.cluster <= chunks, "a block without a vector"
                assert got.threads * got.per_thread * config.cluster >= chunks * 32
                assert got.threads <= configs.THREADS and got.blocks <= BLOCKS
                assert got.per_thread <= configs.most_per_thread(world_size)
                units = min(rows, got.rows)
                units = units if config.form == "one_shot" else -(-units // world_size)
                teams = got.blocks // config.cluster
                assert 1 <= teams <= units, "a team without a row"
                room = got.slots // (2 if config.form == "two_shot" else 1)
                assert -(-units // teams) * got.per_thread * got.threads <= room
                assert all_reduce_rms_norm_layout(rows, vectors, world_size, config).slots == got.slots
