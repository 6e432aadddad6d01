"""The CUDA all-reduce + RMSNorm that writes fp8, on the CPU, threads as fibers: the bits of steps after the norm."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fibers import PATIENT, TORCH, Ranks, build, drawn_seed, same
from quantised import E4M3, E5M2, by_steps, same_bits
from weft.kernels.all_reduce_rms_norm import configs, cuda_kernel
from weft.kernels.all_reduce_rms_norm.configs import FORMS, AllReduceRmsNormConfig, shape
from weft.kernels.all_reduce_rms_norm.quant import QuantKind
from weft.kernels.all_reduce_rms_norm.reference import NormKind
from weft.kernels.device.comm.ll_exchange import ExchangeLayout

EPS = 0.1
SMALLEST = 1e-3
QUANTS = {
    "vLLM, static": QuantKind(E4M3, "reciprocal"),
    "vLLM": QuantKind(E4M3, "reciprocal", SMALLEST),
    "divided, static": QuantKind(E4M3, "divide"),
    "divided": QuantKind(E4M3, "divide", SMALLEST),
    "multiplied, static": QuantKind(E5M2, "multiply"),
    "multiplied": QuantKind(E4M3, "multiply", SMALLEST),
    "e5m2": QuantKind(E5M2, "reciprocal", 0.0),
}
UNROUNDED = NormKind(EPS, weight_offset=1.0, round_sum=False, wide_weight=True)


class Kernels:
    """A stand-in for a loaded program."""

    def __init__(self, ranks: Ranks) -> None:
        self.function = ranks.function


class Case(NamedTuple):
    """``shares``: blocks of a cluster, and chunks of a row that a block has, about. ``in_turn``: to one peer after the
    other."""

    world: int
    dtype: str
    shares: tuple[int, int]
    kind: NormKind
    in_turn: bool = False


class Launches:
    """Calls of one kernel on ranks of its own."""

    def __init__(
        self, folder: Path, case: Case, kind: NormKind, instead: tuple[str, str] | None = None
    ) -> None:
        world, dtype, (self.cluster, chunks), _, in_turn = case
        self.kind, self.dtype, self.threads = kind, TORCH[dtype], 32
        self.vectors = 32 * (chunks * self.cluster - 1) - 5 if chunks * self.cluster > 2 else 40
        of_one = AllReduceRmsNormConfig("one_shot", self.cluster, threads=self.threads)
        per_thread = shape(1, self.vectors, world, of_one).per_thread
        defines = cuda_kernel.norm_defines(world, self.dtype, (self.cluster, per_thread), kind)
        defines["IN_TURN"] = int(in_turn)
        library = build(folder, cuda_kernel.SOURCE, FORMS, cuda_kernel._Params, defines, instead=instead)
        self.ranks = Ranks(library, ExchangeLayout(world, 64 * 20 * per_thread))

    @property
    def hidden(self) -> int:
        return self.vectors * 16 // self.dtype.itemsize

    def launch(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, form: str, tensors: list[list[torch.Tensor]]
    ) -> None:
        monkeypatch.setattr(cuda_kernel, "norm_program", lambda *a: Kernels(self.ranks))
        given, results = ([t.data_ptr() for t in ts] for ts in tensors)
        rows = tensors[0][0].shape[0]
        config = AllReduceRmsNormConfig(form, self.cluster, 2 * self.cluster, threads=self.threads)
        kernel = cuda_kernel.AllReduceRmsNormLauncher(
            self.ranks.places[rank], rows, self.hidden, self.dtype, self.kind, config
        )
        kernel.launch(0, given, results, PATIENT, rank)


def rows_of_all_kinds(rows: int, hidden: int, dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """Some add up to zeros, to a NaN or to something infinite."""
    xs = [torch.randn(rows, hidden).to(dtype) for _ in range(world)]
    for row in range(rows):
        kind = random.choice(("plain", "plain", "zero", "NaN", "infinite"))
        if kind == "zero":
            for x in xs:
                x[row] = 0
        elif kind != "plain":
            xs[-1][row, random.randrange(hidden)] = float("nan" if kind == "NaN" else "-inf")
    return xs


CASES = [
    Case(2, "bfloat16", (4, 3), NormKind(EPS)),
    Case(3, "float32", (1, 2), NormKind(EPS, residual=False)),
    Case(4, "bfloat16", (2, 3), UNROUNDED),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "case"),
    [(name, CASES[(i + j) % 3]) for i, name in enumerate(QUANTS) for j in range(2)],
    ids=lambda x: f"{x.world}-{x.dtype}" if isinstance(x, Case) else x,
)
def test_the_bits_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: Case
) -> None:
    check_bits(tmp_path, monkeypatch, case, QUANTS[name])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_team_that_does_not_wait_for_the_largest_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited = "wait(barriers + round % 2, round / 2 % 2);"
    mistake = awaited, f"if (round % 2 == 0) {awaited}"

    def calls() -> None:
        for i in range(20):
            check_bits(tmp_path / str(i), monkeypatch, CASES[0], QUANTS["vLLM"], mistake)

    with pytest.raises(AssertionError, match="the bits of"):
        calls()


def check_bits(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    quant: QuantKind,
    instead: tuple[str, str] | None = None,
) -> None:
    """Calls of the kernel, and of the one that stores the norm, with the same numbers."""
    seed = drawn_seed()
    world, kind = case.world, case.kind
    plain = Launches(folder / "plain", case, kind)
    fused = Launches(folder / "fused", case, kind._replace(quant=quant), instead)
    calls = []
    for _ in range(6):
        rows, form = random.randrange(1, 9), random.choice(FORMS)
        # In one launch, or in several of up to three rows or a group.
        monkeypatch.setattr(configs, "MAX_BYTES", random.choice((16 << 20, 3 * 16 * plain.vectors)))
        xs = rows_of_all_kinds(rows, plain.hidden, plain.dtype, world)
        weight = torch.randn(plain.hidden).to(torch.float32 if kind.wide_weight else plain.dtype)
        for rank, x in enumerate(xs):
            zero = (x == 0).all(-1, keepdim=True)
            residual = torch.where(zero, 0, torch.randn_like(x))
            read = [x, residual, weight] if kind.residual else [x, weight]
            # By this one some numbers are too large for fp8.
            scale = torch.tensor([300.0 if quant.scale_op == "multiply" else 1 / 300])
            normed, sums = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
            of_fused = torch.full_like(x, 7.0)
            room = torch.full((rows + 1, plain.hidden), 7.0).to(quant.out_dtype)
            scales = torch.full((rows + 1,), 7.0)
            plain.launch(monkeypatch, rank, form, [read, [normed, sums]])
            written = [scales] if quant.dynamic else []
            given = read if quant.dynamic else [*read, scale]
            fused.launch(monkeypatch, rank, form, [given, [room, *written, of_fused]])
            calls.append((form, normed, sums, of_fused, room, scales, scale, read))
    for launches in (plain, fused):
        launches.ranks.run(seed)
        assert not launches.ranks.records.any(), f"a wait has expired: {launches.ranks.records.tolist()}"
        assert launches.ranks.slots_are_empty()
    for form, normed, sums, of_fused, room, scales, scale, _ in calls:
        rows = len(normed)
        assert same(of_fused, sums), form
        given = None if quant.dynamic else scale
        want, want_scales = by_steps(normed, given, quant.out_dtype, quant.scale_op, quant.smallest or 0.0)
        assert same_bits(room[:rows], want), f"the bits of {form}"
        if quant.dynamic:
            assert same_bits(scales[:rows, None], want_scales), f"the bits of {form}, scales"
        assert bool(
            (room[rows:].float() == 7).all() and (scales[rows if quant.dynamic else 0 :] == 7).all()
        ), "past the end"
