"""A rank that comes after the others have given up on it: it computes right numbers, or it is told.

The kernels that push, on the CPU (pushes.cpp). One rank begins late, in the midst of what the others do: their waits
for it expire, they go on with what was launched already, as a graph's replays do, and what they work on then is worth
nothing.
"""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, Library, Ranks, build
from test_all_reduce_protocol import FORMS, compiled, launch, reference
from weft.kernels.all_reduce.configs import AllReduceConfig
from weft.kernels.all_reduce_rms_norm import configs, cuda_kernel
from weft.kernels.all_reduce_rms_norm.reference import NormKind
from weft.kernels.device.comm.ll_exchange import ExchangeLayout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LATE = 1
IMPATIENT = 30  # polls: the others' deadline, long before the late rank comes


def right_or_told(
    told: list[list[bool]], chains: list[list[torch.Tensor]], want: list[torch.Tensor], seed: int
) -> list[bool]:
    """Each result of each rank is right, or its rank has been told when the call ends. Returns which are right."""
    outcomes = []
    for rank, chain in enumerate(chains):
        for call, (out, expected) in enumerate(zip(chain[1:], want, strict=True)):
            outcomes.append(torch.equal(out, expected))
            assert outcomes[-1] or told[rank][call], f"seed {seed}: call {call} of rank {rank} is wrong"
    return outcomes


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (AllReduceConfig("one_shot"), (64, 200)),
        (AllReduceConfig("two_shot"), (64, 200)),
        (AllReduceConfig("two_shot", blocks=1, threads=32), (500, 900)),
    ],
    ids=["one_shot", "two_shot", "two_shot_rounds"],
)
def test_a_chain_of_all_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: AllReduceConfig, sizes: tuple[int, int]
) -> None:
    """Each call takes what the one before has given: a wrong number would travel on."""
    library = compiled(tmp_path, 3, "float32", "sum")
    outcomes = []
    for seed in range(12):
        choice = random.Random(seed)
        ranks = Ranks(library, ExchangeLayout(3, 128))
        numel, calls = choice.choice(sizes), 5
        xs = [torch.randint(1, 9, (numel,)).float() for _ in range(3)]
        want = [reference(xs, "sum") * 3**call for call in range(calls)]
        chains = [[x, *(torch.full_like(x, float("nan")) for _ in range(calls))] for x in xs]
        for rank, chain in enumerate(chains):
            for x, out in pairwise(chain):
                # One of the others is patient: what reaches it must be right, too.
                polls = IMPATIENT if rank == 0 else 20 * IMPATIENT
                launch(monkeypatch, ranks, rank, x, out, "sum", config, polls)
        told = ranks.run_late(seed, LATE, turns=choice.randrange(4000))
        outcomes += right_or_told(told, chains, want, seed)
    assert not all(outcomes), "nobody was late"


def chains_of_two_workspaces(
    monkeypatch: pytest.MonkeyPatch, library: Library, *, one_group: bool
) -> list[bool]:
    return [
        outcome
        for seed in range(20)
        for outcome in chain_of_two_workspaces(monkeypatch, library, seed, one_group=one_group)
    ]


def chain_of_two_workspaces(
    monkeypatch: pytest.MonkeyPatch, library: Library, seed: int, *, one_group: bool
) -> list[bool]:
    """All-reduces, each of what the one before has given, alternately in two workspaces: those of two ops, say."""
    choice = random.Random(seed)
    first = Ranks(library, ExchangeLayout(3, 128))
    spaces = [first, Ranks(library, ExchangeLayout(3, 128), beside=first if one_group else None)]
    calls, xs = 6, [torch.randint(1, 9, (100,)).float() for _ in range(3)]
    want = [reference(xs, "sum") * 3**call for call in range(calls)]
    chains = [[x, *(torch.full_like(x, float("nan")) for _ in range(calls))] for x in xs]
    turns = [(choice.randrange(2), AllReduceConfig(choice.choice(FORMS))) for _ in range(calls)]
    for rank, chain in enumerate(chains):
        for (turn, config), (x, out) in zip(turns, pairwise(chain), strict=True):
            polls = IMPATIENT if rank == 0 else 20 * IMPATIENT
            launch(monkeypatch, spaces[turn], rank, x, out, "sum", config, polls)
            if turn:  # one stream for both
                first.places[rank].launches.append(spaces[turn].places[rank].launches.pop())
    told = first.run_late(seed, LATE, turns=choice.randrange(4000))
    return right_or_told(told, chains, want, seed)


def test_what_one_workspace_has_lost_is_not_sent_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(tmp_path, 3, "float32", "sum")
    assert not all(chains_of_two_workspaces(monkeypatch, library, one_group=True)), "nobody was late"
    with pytest.raises(AssertionError, match="is wrong"):  # were each to break by itself
        chains_of_two_workspaces(monkeypatch, library, one_group=False)


def norms(folder: Path) -> Library:
    defines = cuda_kernel.norm_defines(3, torch.float32, (1, 1), NormKind(1e-6))
    return build(folder, cuda_kernel.SOURCE, configs.FORMS, cuda_kernel._Params, defines)


@pytest.mark.parametrize("form", configs.FORMS)
def test_a_chain_of_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """As above: the new residual of a call is the input of the next one."""
    library = norms(tmp_path)
    rows, hidden, calls = 5, 128, 4
    zeros, ones = torch.zeros(rows, hidden), torch.ones(hidden)
    outcomes = []
    for seed in range(12):
        ranks = Ranks(library, ExchangeLayout(3, 64 * 20))
        functions = type("Kernels", (), {"function": staticmethod(ranks.function)})
        monkeypatch.setattr(cuda_kernel, "norm_program", lambda *a, found=functions: found)
        xs = [torch.randint(1, 9, (rows, hidden)).float() for _ in range(3)]
        want = [reference(xs, "sum") * 3**call for call in range(calls)]
        chains = [[x, *(torch.full_like(x, float("nan")) for _ in range(calls))] for x in xs]
        normed = torch.empty_like(zeros)
        for rank, chain in enumerate(chains):
            kernel = cuda_kernel.AllReduceRmsNormLauncher(
                ranks.places[rank],
                rows,
                hidden,
                torch.float32,
                NormKind(1e-5),
                configs.AllReduceRmsNormConfig(form, 1, 2, threads=32),
            )
            for x, sums in pairwise(chain):
                given = [t.data_ptr() for t in (x, zeros, ones)]
                to = [normed.data_ptr(), sums.data_ptr()]
                kernel.launch(0, given, to, IMPATIENT if rank == 0 else 20 * IMPATIENT, rank)
        told = ranks.run_late(seed, LATE, turns=random.Random(seed).randrange(4000))
        outcomes += right_or_told(told, chains, want, seed)
    assert not all(outcomes), "nobody was late"


def test_nobody_is_told_where_all_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(tmp_path, 3, "float32", "sum")
    ranks = Ranks(library, ExchangeLayout(3, 128))
    xs = [torch.ones(100) for _ in range(3)]
    outs = [torch.empty(100) for _ in range(3)]
    for rank in range(3):
        launch(monkeypatch, ranks, rank, xs[rank], outs[rank], "sum", AllReduceConfig("two_shot"), PATIENT)
    ranks.run_late(5, LATE, turns=300)
    assert all((out == 3).all() for out in outs)
    assert not ranks.records.any()
