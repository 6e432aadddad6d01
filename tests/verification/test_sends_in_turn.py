"""Over PCIe a rank sends all to one peer before it sends to the next one: the kernels with IN_TURN on the CPU."""

from __future__ import annotations

import ctypes
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_all_reduce_protocol as sums
import test_all_reduce_rms_norm_protocol as norms
import test_collective_protocols as parts
import test_quantised_rows_protocol as quantised
import torch
from fibers import PATIENT, Library, Ranks, build
from weft.kernels.all_reduce.configs import FORMS, AllReduceConfig
from weft.kernels.all_reduce_rms_norm import cuda_kernel as all_reduce_rms_norm
from weft.kernels.all_reduce_rms_norm.configs import AllReduceRmsNormConfig
from weft.kernels.device.collective.rounds import RoundsConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout, in_turn
from weft.kernels.device.jit.program import compile_cubin

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def compiled(folder: Path, op: str, size: int, instead: tuple[str, str] | None = None) -> Library:
    if op == "all_reduce":
        return sums.compiled(folder, size, "float32", "sum", instead, in_turn)
    return parts.Collective(op, size, "float32").compiled(folder, instead, in_turn)


@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("op", OPS)
def test_results_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, size: int) -> None:
    library, seed = compiled(tmp_path, op, size), random.randrange(1 << 30)
    if op == "all_reduce":
        sums.calls_of_changing_size(monkeypatch, library, ExchangeLayout(size, 256), "float32", "sum")
    else:
        of = parts.Collective(op, size, "float32")
        assert not (said := parts.wrong(of, library, seed, 60 // size + 6)), f"seed {seed}: {said}"


def sent(folder: Path, monkeypatch: pytest.MonkeyPatch, op: str, how: Any, turns: int) -> list[torch.Tensor]:
    """By peer, what rank 0 of 4 sends in so many turns, where all that it takes is there."""
    folder.mkdir()
    # In three turns it sends to all: as the kernel is, which other tests have compiled.
    fewer = "if (lost) return;", f"if (lost || turn > {turns}) return;"
    library = compiled(folder, op, 4, fewer if turns < 3 else None)
    layout = ExchangeLayout(4, 256)
    ranks = Ranks(library, layout)
    x = torch.arange(1.0, 401 if op == "all_gather" else 1601)
    if op == "all_reduce":
        out = torch.zeros_like(x)
        sums.launch(monkeypatch, ranks, 0, x, out, "sum", how)
    else:
        out = torch.zeros({"all_gather": 4 * x.numel(), "reduce_scatter": x.numel() // 4}.get(op, x.numel()))
        problem = parts.Collective(op, 4).problem(
            min(x.nbytes, out.nbytes) // (4 if op == "all_to_all" else 1)
        )
        parts.launch(ranks, 0, (x, out), problem, how)
    slots = ranks.memory.view(torch.int32)[:, ExchangeLayout.FIRST : layout.emptied]
    slots[0] = ~torch.tensor(1.0).view(torch.int32)
    library.library.run_one(ctypes.byref(ranks.places[0].launches[0]), 0)
    assert not ranks.faults.any() and out.any()
    return [slots[peer].clone() for peer in range(1, 4)]


@pytest.mark.parametrize("op", OPS)
def test_one_peer_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    for i, how in enumerate(
        [AllReduceConfig("one_shot", 3, 64), AllReduceConfig("two_shot", 3, 64)]
        if op == "all_reduce"
        else [RoundsConfig(200, 3, 64, op != "reduce_scatter")]
    ):
        whole = sent(tmp_path / f"{i}-all", monkeypatch, op, how, 3)
        first = sent(tmp_path / f"{i}-2", monkeypatch, op, how, 2)
        assert all(slots.any() for slots in whole)
        assert torch.equal(first[0], whole[0]) and torch.equal(first[1], whole[1]), "the first two have all"
        assert not first[2].any(), "the last one has nothing yet"


def test_what_one_rank_gets_alone_takes_no_turns() -> None:
    program = parts.all_gather_program(4, 1, root=2)
    ptx = [compile_cubin(p.path, "compute_80", p.defines) for p in (program, in_turn(program))]
    assert ptx[0] == ptx[1]


NORMS = [(3, "bfloat16", "unrounded"), (4, "float32", "Gemma"), (5, "bfloat16", "no residual")]


@pytest.mark.parametrize(("size", "dtype", "name"), NORMS)
def test_norms_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, dtype: str, name: str
) -> None:
    norms.calls_of_changing_size(tmp_path, monkeypatch, size, dtype, (2, 3), norms.KINDS[name], IN_TURN=1)


@pytest.mark.parametrize(
    "kind", [quantised.NormKind(quantised.EPS), quantised.UNROUNDED], ids=["rounded", "unrounded"]
)
def test_quantised_norms_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: quantised.NormKind
) -> None:
    case = quantised.Case(4, "bfloat16", (2, 3), kind, in_turn=True)
    quantised.check_bits(tmp_path, monkeypatch, case, quantised.QUANTS["vLLM"])


def sent_of_norm(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str, turns: int) -> list[torch.Tensor]:
    """By peer, what rank 0 of 4 sends in so many turns, where all that it takes is there."""
    folder.mkdir()
    defines = all_reduce_rms_norm.norm_defines(4, torch.float32, (1, 2), norms.USUAL) | {"IN_TURN": 1}
    instead = "if (lost) return;", f"if (lost || turn > {turns}) return;"
    library = build(
        folder, all_reduce_rms_norm.SOURCE, FORMS, all_reduce_rms_norm._Params, defines, instead=instead
    )
    layout = ExchangeLayout(4, 64 * 20)
    ranks = Ranks(library, layout)
    monkeypatch.setattr(all_reduce_rms_norm, "norm_program", lambda *a: norms.Kernels(ranks))
    x, residual, normed, out = torch.ones(4, 8, 160)
    kernel = all_reduce_rms_norm.AllReduceRmsNormLauncher(
        ranks.places[0], 8, 160, x.dtype, norms.USUAL, AllReduceRmsNormConfig(form, 1, 2, threads=32)
    )
    given, results = [t.data_ptr() for t in (x, residual, x)], [normed.data_ptr(), out.data_ptr()]
    kernel.launch(0, given, results, PATIENT, 0)
    slots = ranks.memory.view(torch.int32)[:, ExchangeLayout.FIRST : layout.emptied]
    slots[0] = ~torch.tensor(1.0).view(torch.int32)
    library.library.run_one(ctypes.byref(ranks.places[0].launches[0]), 0)
    assert not ranks.faults.any() and (out[::4] == 5).all()
    return [slots[peer].clone() for peer in range(1, 4)]


@pytest.mark.parametrize("form", FORMS)
def test_norms_to_one_peer_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    whole, first = (sent_of_norm(tmp_path / str(turns), monkeypatch, form, turns) for turns in (3, 2))
    assert all(slots.any() for slots in whole)
    assert torch.equal(first[0], whole[0]) and torch.equal(first[1], whole[1]), "the first two have all"
    assert not first[2].any(), "the last one has nothing yet"
