"""The exchanges in one shot and their launchers on the CPU, threads as fibers: special bits, slots, epochs, deadlines.

Calls of both ops, of changing size, follow each other on one workspace.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fibers import PATIENT, Library, Ranks, build, defines_of, drawn_seed, inputs, mistakes, same
from weft.kernels.all_gather_matmul import one_shot_kernel as gather
from weft.kernels.all_gather_matmul.configs import GatherKernelCall
from weft.kernels.device.comm.ll_exchange import VECTOR, ExchangeLayout
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.kernels.device.jit import program
from weft.kernels.matmul_reduce_scatter import one_shot_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from weft.symm_mem.failure.fault import Fault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
ROUNDED = Epilogue(BF16)
OPS = ("gather", "scatter")
KERNELS = ("all_gather_one_shot", "reduce_scatter_one_shot")


def compiled(
    folder: Path,
    size: int,
    epilogue: Epilogue = ROUNDED,
    instead: tuple[str, str] | None = None,
    dtype: torch.dtype = BF16,
) -> Library:
    defines = defines_of(scatter.MatmulReduceScatterOneShot.program(dtype, epilogue, (size, 0)))
    of_gather = defines_of(gather.AllGatherMatmulOneShot.program(size, 0))
    assert dtype != BF16 or of_gather.items() <= defines.items()
    first = gather.SOURCE, KERNELS[:1], gather._Params
    return build(folder, *first, defines, [(scatter.SOURCE, KERNELS[1:], scatter._Params)], instead)


def bits(size: int, *shape: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """For each rank numbers of any bits, where a kernel may take whole vectors of them."""
    count = 1
    for n in shape:
        count *= n
    return [x.reshape(shape).clone() for x in inputs(count, dtype, size)]


@dataclass
class Calls:
    """What all ranks launch on one workspace of each, what comes of it, and what should."""

    monkeypatch: pytest.MonkeyPatch
    library: Library
    layout: ExchangeLayout
    epilogue: Epilogue = ROUNDED
    dtype: torch.dtype = BF16  # of what is scattered
    done: list[list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.layout.world_size
        self.ranks = Ranks(self.library, self.layout)
        loaded = SimpleNamespace(function=self.ranks.function)
        self.monkeypatch.setattr(program, "program_of", lambda *_, **__: loaded)

    def launch(
        self, op: str, m: int, columns: int, grid: tuple[int, int], polls: int = PATIENT, apart: int = 0
    ) -> None:
        itemsize = (BF16 if op == "gather" else self.dtype).itemsize
        config = OneShotConfig(m * columns * itemsize // VECTOR, *grid)
        self.done.append(
            self._gather(m, columns, config, polls, apart)
            if op == "gather"
            else self._scatter(m, columns, config, polls)
        )

    def _gather(
        self, m: int, k: int, config: OneShotConfig, polls: int, apart: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``apart``: elements between two rows of a shard."""
        shards = [x[:, apart:] for x in bits(self.size, m, k + apart)]
        self.kept += shards
        done = []
        for rank, place in enumerate(self.ranks.places):
            out = torch.full((self.size + 1, m, k), float("nan")).to(BF16)
            out[-1] = 1.5
            beside = apart > 0  # shards lie side by side then
            example = GatherKernelCall(shards[rank], [], 1, split_k=beside)
            kernel = gather.AllGatherMatmulOneShot(place, example, config)
            kernel.launch((shards[rank].data_ptr(), out.data_ptr()), polls, rank)
            want = torch.stack([*shards, out[-1].clone()]).view(torch.int32)
            sent = want.clone()
            sent[want == -1] = -2  # what stands for empty, on its way from a peer
            sent[rank] = want[rank]
            if beside:
                sent[:-1] = sent[:-1].movedim(0, 1).reshape(self.size, m, -1).clone()
            done.append((out.view(torch.int32), sent))
        return done

    def _scatter(
        self, m: int, n: int, config: OneShotConfig, polls: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        a, b = (torch.empty(shape, dtype=self.dtype) for shape in ((1, self.size, m, 8), (8, n)))
        partial, epilogue = bits(self.size, self.size, m, n, dtype=self.dtype), self.epilogue
        biases, residuals = (bits(self.size, *shape, dtype=self.dtype) for shape in ((n,), (m, n)))
        self.kept += [*partial, *biases, *residuals]
        done = []
        for rank, place in enumerate(self.ranks.places):
            total = partial[0][rank].float()
            for other in partial[1:]:
                total = total + other[rank].float()
            if epilogue.average:
                total = total * (torch.tensor(1.0) / self.size)
            terms = [biases[rank]] * epilogue.bias + [residuals[rank]] * epilogue.residual
            for term in terms:
                total = total + term.float()
            out = torch.full((m + 1, n), float("nan"), dtype=epilogue.out_dtype)
            out[-1] = 1.5
            example = ScatterKernelCall(a, b, 1, epilogue)
            kernel = scatter.MatmulReduceScatterOneShot(place, example, config)
            kernel.launch([x.data_ptr() for x in (partial[rank], out, *terms)], polls, rank)
            done.append((out, torch.cat([total.to(epilogue.out_dtype), out[-1:]])))
        return done

    def wrong(self) -> str:
        """What is wrong once all have run; empty if nothing is."""
        if self.ranks.records.any():
            return f"a wait has expired: {self.ranks.records.tolist()}"
        bad = [
            (call, rank)
            for call, done in enumerate(self.done)
            for rank, (got, want) in enumerate(done)
            if not right(got, want)
        ]
        if bad:
            return f"of (call, rank), these are wrong: {bad}"
        return "" if self.ranks.slots_are_empty() else "slots are not empty"


def right(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got, want) if got.dtype == torch.int32 else same(got, want)


def random_calls(calls: Calls, seed: int, count: int) -> Calls:
    torch.manual_seed(seed)
    choice = random.Random(seed)
    for call in range(count):
        op = OPS[call % 2] if call < 2 else choice.choice(OPS)
        blocks, threads = choice.choice([1, 2, 3]), choice.choice([32, 64])
        m, columns = choice.choice([1, 2, 7, 19]), 8 * choice.choice([1, 3, 5, 11])
        calls.launch(op, m, columns, (blocks, threads), apart=choice.choice([0, 8]))
    calls.ranks.run(seed)
    return calls


@pytest.mark.parametrize(
    ("size", "epilogue"),
    [
        (2, Epilogue(torch.float32, bias=True, residual=True)),
        (3, Epilogue(BF16, average=True, bias=True)),
        (4, Epilogue(BF16, residual=True)),
        (8, ROUNDED),
        (9, Epilogue(torch.float32, average=True)),  # one sender's vector after the other
    ],
    ids=["2", "3", "4", "8", "9"],
)
def test_calls_of_both_ops_of_changing_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, epilogue: Epilogue
) -> None:
    seed = drawn_seed()
    library = compiled(tmp_path, size, epilogue)
    calls = Calls(monkeypatch, library, ExchangeLayout(size, 256), epilogue)
    random_calls(calls, seed, 80 // size)
    assert not calls.wrong()
    assert {n.kernel for place in calls.ranks.places for n in place.launches} == {0, 1}


@pytest.mark.parametrize(("size", "average"), [(2, True), (3, False)])
def test_parts_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, average: bool) -> None:
    """Of fp8 products with such results: sent and stored as they are."""
    seed = drawn_seed()
    epilogue = Epilogue(torch.float32, average=average)
    library = compiled(tmp_path, size, epilogue, dtype=torch.float32)
    calls = Calls(monkeypatch, library, ExchangeLayout(size, 512), epilogue, torch.float32)
    assert not random_calls(calls, seed, 20).wrong()


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    calls = Calls(monkeypatch, compiled(tmp_path, 3), ExchangeLayout(3, 64))
    calls.launch(op, 5, 72, (2, 32), polls=2000)
    calls.ranks.check_that_rank_1_is_missed((gather._Params, scatter._Params)[OPS.index(op)])
    assert calls.ranks.records[0, 4:7].tolist() == [1, 0, 1], "expected, seen, kind"


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_has_given_up_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    calls = Calls(monkeypatch, compiled(tmp_path, 3), ExchangeLayout(3, 64))
    for _ in range(2):
        calls.launch(op, 5, 72, (2, 32), polls=100)
    ranks = calls.ranks
    own, *others = ranks.memory
    for i, launch in enumerate(ranks.places[0].launches):
        before = [x.clone() for x in others]
        ranks.library.library.run_one(ctypes.byref(launch), 0)
        changed = [not torch.equal(x, y) for x, y in zip(others, before, strict=True)]
        assert changed == [not i] * 2, "the first one waits in vain for what its peers should have sent"
        assert ranks.records[0, 0] == 1 and ranks.faults[0, Fault.BROKEN] > 0
    assert own.view(torch.int32)[:2].tolist() == [2, 2], "it leaves its epochs all the same"


@pytest.mark.parametrize("op", OPS)
def test_a_late_rank_is_right_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Rank 1 begins in the midst of what the others do, one of which waits for longer than the other."""
    library, outcomes = compiled(tmp_path, 3), []
    for seed in range(12):
        choice = random.Random(seed)
        torch.manual_seed(seed)
        calls = Calls(monkeypatch, library, ExchangeLayout(3, 64))
        for _ in range(4):
            calls.launch(op, 5, 72, (2, 32), polls=choice.choice([20, 200]))
        told = calls.ranks.run_late(seed, late=1, turns=choice.randrange(20_000))
        for call, done in enumerate(calls.done):
            for rank, (got, want) in enumerate(done):
                outcomes.append(right(got, want))
                assert outcomes[-1] or told[rank][call], f"seed {seed}: call {call} of rank {rank} is wrong"
    assert not all(outcomes), "nobody was late"


# What must stand in the kernels' text or in ll_exchange.cuh, and what a mistake would look like there.
MISTAKES = {
    "one-buffer-alone": ("(2 * blockIdx.x + (number & 1))", "(2 * blockIdx.x)"),
    "slots-not-emptied": ("store_vector(place(src, slot), make_uint4(0, 0, 0, 0));", ""),
    "the-empty-word-sent": ("max(~v.x, 1u)", "~v.x"),
    "wrong-part-sent": ("p.c + static_cast<u64>(part) * p.vectors", "p.c"),
    "own-shard-not-stored": ("store(RANK, s.at, v);", ""),
    "slots-of-another-pass": (
        "weft::store_all(epoch, s.index,",
        "weft::store_all(epoch, s.index % blockDim.x,",
    ),
}


@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 3))
def test_mistakes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    library = compiled(tmp_path, 3, instead=MISTAKES[mistake])
    every = (Calls(monkeypatch, library, ExchangeLayout(3, 256)) for _ in range(10))
    assert any(random_calls(calls, seed, 20).wrong() for seed, calls in enumerate(every))


def test_a_workspace_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, Library(KERNELS, ctypes.CDLL(None)), ExchangeLayout(2, 64))
    words = r"workspace: is ExchangeLayout\(.* slots=64, .* must hold .* slots=128, .* for OneShotConfig"
    for op in OPS:
        with pytest.raises(ValueError, match=words):
            calls.launch(op, 72, 8, (1, 32))
    assert not calls.ranks.places[0].launches
