"""The CUDA all-gather, gather to one rank, reduce-scatter and all-to-all and their launcher on the CPU, threads as
fibers: dimensions, addresses, slots, epochs of one launch, corrections of data, ranks that are late or do not come."""

from __future__ import annotations

import ctypes
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, TORCH, Library, Ranks, build, defines_of, inputs, mistakes, same
from test_all_reduce_protocol import reference
from weft.kernels.all_gather.cuda_kernel import all_gather_program
from weft.kernels.all_to_all.cuda_kernel import all_to_all_program
from weft.kernels.device.collective import rounds
from weft.kernels.device.collective.launch import CollectiveLauncher, CollectiveParams, SlicesProblem
from weft.kernels.device.comm.ll_exchange import BLOCKS, VECTOR, ExchangeLayout, at_once, workers
from weft.kernels.device.jit.program import Program
from weft.kernels.reduce_scatter.cuda_kernel import reduce_scatter_program
from weft.symm_mem.failure.fault import Fault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = ("one_shot", "one_shot_any", "rounds", "rounds_any")
DOUBTFUL = (-1, -2)  # words that LL data does not tell apart
Dims = tuple[int | None, int | None]  # along which x has the parts of all ranks, and along which out has


@dataclass(frozen=True)
class Collective:
    """Between ``size`` ranks. ``dtype`` and ``reduce_op`` of a reduce-scatter, ``root`` who alone receives."""

    op: str
    size: int
    dtype: str = "bfloat16"
    reduce_op: str = "sum"
    root: int | None = None

    @property
    def program(self) -> Program:
        if self.op == "reduce_scatter":
            return reduce_scatter_program(self.size, 0, TORCH[self.dtype], self.reduce_op)
        if self.op == "all_to_all":
            return all_to_all_program(self.size, 0)
        return all_gather_program(self.size, 0, self.root)

    def compiled(
        self,
        folder: Path,
        instead: tuple[str, str] | None = None,
        way: Callable[[Program], Program] = lambda program: program,
    ) -> Library:
        program = way(self.program)
        return build(folder, program.path, KERNELS, CollectiveParams, defines_of(program), instead=instead)

    @property
    def exact(self) -> bool:
        return self.op != "reduce_scatter"

    def problem(self, nbytes: int) -> SlicesProblem:
        """Of parts in one piece."""
        return SlicesProblem(nbytes, *(None if dim is None else nbytes for dim in self.dims))

    @property
    def dims(self) -> Dims:
        return {"all_gather": (None, 1), "reduce_scatter": (1, None), "all_to_all": (1, 1)}[self.op]

    def drawn(self, choice: random.Random, call: int) -> tuple[torch.dtype, list[int], Dims]:
        """A part's dtype and sizes. The first four calls are one of each kernel."""
        dtype, dims = choice.choice([torch.uint8, torch.int16, torch.int32, torch.int64]), self.dims
        rows = choice.choice([1, 1, 2, 5])
        part = [rows, choice.choice([1, 3, 16, 31, 100, 16 * choice.randrange(1, 9), 1600 // rows])]
        if self.op == "all_to_all":
            part = [choice.choice([1, 2, 3, 8]), choice.choice([1, 5, 16]), choice.choice([1, 3, 16, 40])]
            dims = choice.choice([*product(range(3), range(3))])
        if call < 4:
            dtype, part = torch.uint8, [1, (16, 31, 16 * 70, 16 * 70 + 1)[call]]
            if self.op == "all_to_all":
                dims, part = (1, 0), [[1, 1, 16], [1, 1, 31], [10, 7, 16], [9, 1, 125]][call]
        return (TORCH[self.dtype] if self.op == "reduce_scatter" else dtype), part, dims

    def numbers(self, shape: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
        if self.exact:
            return [any_bits(prod(shape), dtype).view(shape) for _ in range(self.size)]
        if self.reduce_op in ("sum", "avg"):
            return [x.view(shape) for x in inputs(prod(shape), dtype, self.size)]
        return [torch.randn(shape).to(dtype) for _ in range(self.size)]  # of zeros either is the larger one

    def wanted(self, xs: list[torch.Tensor], dims: Dims, rank: int) -> torch.Tensor:
        scattered, gathered = dims
        if not self.exact:
            return reference(xs, self.reduce_op).chunk(self.size, scattered or 0)[rank]
        parts = xs if scattered is None else [x.chunk(self.size, scattered)[rank] for x in xs]
        out = torch.cat(parts, gathered or 0)
        return out if self.root in (None, rank) else torch.zeros_like(out)


def launch(
    ranks: Ranks,
    rank: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    problem: SlicesProblem,
    config: rounds.RoundsConfig,
    polls: int = PATIENT,
) -> None:
    """From x to out."""
    kernel = CollectiveLauncher(ranks.places[rank], problem, ranks.function, config)
    x, out = tensors
    kernel.launch(0, (x.data_ptr(),), (out.data_ptr(),), polls, rank)


def shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy that begins so many elements after an aligned address, and guards after it."""
    memory = torch.full((x.numel() + shift + 1,), 77, dtype=x.dtype)
    memory[shift:-1] = x.reshape(-1)
    return memory[shift:-1]


def is_guarded(x: torch.Tensor) -> bool:
    return bool(x.as_strided((1,), (1,), x.storage_offset() + x.numel()) == 77)


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (2 * numel + 4,), dtype=torch.int32)
    doubtful = torch.rand(len(words)) < 0.1
    words[doubtful] = torch.tensor(DOUBTFUL, dtype=torch.int32)[torch.randint(2, (int(doubtful.sum()),))]
    return words.view(torch.uint8)[: numel * dtype.itemsize].view(dtype).clone()


def wrong(of: Collective, library: Library, seed: int, count: int, polls: int = PATIENT) -> str:
    """What is wrong with calls of all kernels, one after the other; empty if nothing is."""
    torch.manual_seed(seed)
    choice, ranks, calls = random.Random(seed), Ranks(library, ExchangeLayout(of.size, 256)), []
    for call in range(count):
        dtype, part, dims = of.drawn(choice, call)
        shift = choice.randrange(2)
        config = rounds.RoundsConfig(
            choice.choice([32, 64, 200]), choice.choice([1, 3]), choice.choice([32, 64]), of.exact
        )
        if call < 4:
            shift, config = 0, rounds.RoundsConfig(32, 1, 32, of.exact)
        shape = [n * of.size if dim == dims[0] else n for dim, n in enumerate(part)]
        xs, outs = of.numbers(shape, dtype), []
        wants = [of.wanted(xs, dims, rank) for rank in range(of.size)]
        rows = [None if dim is None else prod(part[dim:]) * dtype.itemsize for dim in dims]
        for rank, want in enumerate(wants):
            x = shifted(xs[rank], choice.randrange(2) if call >= 4 else 0)
            out = shifted(torch.zeros(want.numel(), dtype=dtype), shift)
            guarded = [x, out]
            if part[0] == 1 and call >= 4 and call % 3 == 0 and of.root is None:
                if dims[0] is None:  # x is the part of the result that becomes x
                    x, guarded = out.view(of.size, -1)[rank], [out]
                    x.copy_(xs[rank].flatten())
                elif dims[1] is None:  # the result takes the place of this rank's part
                    out, guarded = x.view(of.size, -1)[rank], [x]
            problem = SlicesProblem(prod(part) * dtype.itemsize, *rows)
            launch(ranks, rank, (x, out), problem, config, polls)
            outs.append((x, out, guarded))
        calls.append((wants, outs))
    if not ranks.ends(seed):
        return "a launch does not end"
    if ranks.records.any():
        return f"a wait has expired: {ranks.records.tolist()}"
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for call, (wants, outs) in enumerate(calls):
        for rank, (want, (_, out, guarded)) in enumerate(zip(wants, outs, strict=True)):
            assert all(map(is_guarded, guarded)), "written past the end"
            if not (torch.equal if of.exact else same)(out.view_as(want), want):
                return f"call {call} of rank {rank}: {tuple(want.shape)}, {want.dtype}"
    return "" if ranks.slots_are_empty() else "slots are not empty"


SIZES = (2, 3, 4, 8, 9)
REDUCTIONS = [
    (2, "bfloat16", "avg"),
    (3, "float32", "sum"),
    (4, "bfloat16", "max"),
    (4, "float32", "min"),
    (8, "bfloat16", "sum"),
    (9, "bfloat16", "sum"),
]
EVERY = [
    *(Collective(op, size) for op in ("all_gather", "all_to_all") for size in SIZES),
    *(Collective("reduce_scatter", *how) for how in REDUCTIONS),
    *(Collective("all_gather", size, root=random.randrange(size)) for size in SIZES),
]
OF_ONE = Collective("all_gather", 3, root=1)
GATHER = Collective("all_gather", 2)


def name_of(of: Collective) -> str:
    reduced = f"-{of.dtype}-{of.reduce_op}" if of.op == "reduce_scatter" else ""
    return f"{of.op}-{of.size}{reduced}" if of.root is None else f"gather-{of.size}"


@pytest.mark.parametrize("of", EVERY, ids=name_of)
def test_calls_of_changing_size(tmp_path: Path, of: Collective) -> None:
    seed = random.randrange(1 << 30)
    said = wrong(of, of.compiled(tmp_path), seed, 60 // of.size + 6)
    assert not said, f"seed {seed}, {of}: {said}"


# Of the gather to one rank and of the all-to-all.
MISTAKES_OF_PEERS = {
    "nobody waits for the others": (OF_ONE, ("if (threadIdx.x != 0) return;", "return;")),
    "words of others are not taken": (OF_ONE, ("} else if (threadIdx.x == 0) {", "} else if (false) {")),
    "another rank receives": (
        OF_ONE,
        ("exact.send(ROOT, index, next);", "exact.send((ROOT + 1) % WORLD_SIZE, index, next);"),
    ),
    "correction of another peer": (
        Collective("all_to_all", 3),
        ("correct(peer, index, v);\n    }\n\n    //", "correct(peer_of(1), index, v);\n    }\n\n    //"),
    ),
    "part of another peer": (
        Collective("all_to_all", 3),
        ("send(peer, AHEAD ? of[AHEAD ? i : 0]", "send(peer, AHEAD ? of[AHEAD ? 1 : 0]"),
    ),
    "own part is not stored": (
        Collective("all_to_all", 3),
        (".store(RANK, load_part(RANK, s.at));", ".offset(0);"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_PEERS)
def test_mistakes_are_found(tmp_path: Path, mistake: str) -> None:
    of, instead = MISTAKES_OF_PEERS[mistake]
    library = of.compiled(tmp_path, instead)
    assert any(wrong(of, library, seed, 8, polls=500) for seed in range(6))


MISTAKES = {
    "buffer": ("++epoch;\n", "epoch += 2;\n"),
    "slots-not-from-the-first": ("share.index -= chunks.of_epoch * chunks.slots;", ""),
    "beginning-unsaid": ("say(epoch - 1);\n        for", "for"),
    "not-heard": ("hear(epoch - 1);\n            barrier_sync", "barrier_sync"),
    "said-early": (
        "barrier_sync(EMPTY, receivers);\n            say(epoch);",
        "say(epoch);\n            barrier_sync(EMPTY, receivers);",
    ),
    "no-fence": ("__threadfence_system();\n        if (is_broken", "if (is_broken"),
    "end-not-heard": ("hear(epoch - 1);\n    }", "}"),
    "correction-not-reset": ("reset_payload_word(word);", ""),
    "correction-not-sent": ("< DOUBTFUL || epoch.lost", "<= DOUBTFUL || epoch.lost"),
    "corrections-among-data": ("epoch.place(sender, room)", "epoch.place(sender, 0)"),
}


@pytest.mark.parametrize("mistake", [None, *mistakes(MISTAKES, 5)])
def test_many_epochs_in_a_launch(tmp_path: Path, mistake: str | None) -> None:
    """Launches of one and of several epochs, one after the other, by blocks of changing sizes."""
    library = GATHER.compiled(tmp_path, MISTAKES.get(mistake or ""))
    bad = 0
    for seed in range(30):
        torch.manual_seed(seed)
        choice, ranks, calls, epochs = random.Random(seed), Ranks(library, ExchangeLayout(2, 128)), [], 0
        for _ in range(5):
            config = rounds.RoundsConfig(
                choice.choice([32, 64, 90]), choice.choice([1, 2]), choice.choice([32, 64]), True
            )
            n = 16 * choice.choice([config.epoch, choice.randrange(1, 4 * config.epoch)])
            xs = [any_bits(n, torch.uint8) for _ in range(2)]
            outs = [torch.zeros(2 * n, dtype=torch.uint8) for _ in xs]
            for rank in range(2):
                launch(ranks, rank, (xs[rank], outs[rank]), GATHER.problem(n), config, 2000)
            calls.append((xs, outs))
            epochs += rounds.rounds_launch(n // VECTOR, ranks.layout, config).epochs
        ended = ranks.ends(seed)
        right = ended and all(torch.equal(out, torch.cat(xs)) for xs, outs in calls for out in outs)
        right &= ranks.epochs_of_the_first_block() == [epochs] * 2
        bad += not right or bool(ranks.records.any()) or not ranks.slots_are_empty()
        if bad and mistake is not None:
            break
    assert bool(bad) == (mistake is not None), f"{bad} of 30 went wrong"


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_nothing_is_sent_to_slots_that_are_not_known_to_be_empty(tmp_path: Path, op: str) -> None:
    of = Collective(op, 2, "float32")
    ranks = Ranks(of.compiled(tmp_path), ExchangeLayout(2, 128))
    part = 4 * 64  # elements, in an epoch
    x = torch.cat([torch.full((part,), float(epoch)) for epoch in (10, 20, 30)])
    given, out = (x if of.exact else x.repeat(2)), x.new_empty(6 * part)
    launch(ranks, 0, (given, out), of.problem(x.nbytes), rounds.RoundsConfig(64, 1, 32, of.exact), 50)
    ranks.check_that_two_epochs_are_sent()


@pytest.mark.parametrize("n", [64, 900])  # in one epoch, and by rounds
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, op: str, n: int) -> None:
    of = Collective(op, 3, "float32")
    ranks = Ranks(of.compiled(tmp_path), ExchangeLayout(3, 128))
    kept = [(torch.randn(3 * n), torch.empty(3 * n)) for _ in range(3)]
    for rank, tensors in enumerate(kept):
        launch(ranks, rank, tensors, of.problem(4 * n), rounds.RoundsConfig(64, 2, 32, of.exact), 2000)
    ranks.check_that_rank_1_is_missed(CollectiveParams)


def test_a_correction_that_does_not_come_is_named(tmp_path: Path) -> None:
    layout = ExchangeLayout(2, 64)
    ranks = Ranks(GATHER.compiled(tmp_path), layout)
    x, out = torch.zeros(16, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    launch(ranks, 0, (x, out), GATHER.problem(16), rounds.RoundsConfig(32, 1, 32, True), 50)
    slots = ranks.memory.view(torch.int32)[:, ExchangeLayout.FIRST : layout.emptied]
    slots[0] = 0
    slots[0].view(BLOCKS, 2, 2, 64, 4)[0, 1, 1, 0] = 1  # its first epoch, from rank 1: doubtful words
    ranks.library.library.run_one(ctypes.byref(ranks.places[0].launches[0]), 0)
    assert ranks.faults[0, Fault.BROKEN] == 1 + 1
    assert layout.describe(int(ranks.records[0, 3])) == "epoch of the data of rank 1 for block 0 (buffer 1)"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_sms", [2, 64, 132, 144])
def test_the_layout_takes_what_it_was_made_for(exact: bool, num_sms: int) -> None:
    for nbytes in (1, 16, 4096, 1 << 20, 7 << 20, 1 << 27):
        for world_size in (2, 4, 8, 12):
            config = rounds.choose_rounds(world_size, num_sms, exact=exact)
            assert config.blocks == min(num_sms, BLOCKS)
            count = -(-nbytes // VECTOR)
            layout = rounds.rounds_layout(count, world_size, config)
            launch = rounds.rounds_launch(count, layout, config)
            assert launch.blocks <= num_sms and (launch.blocks - 1) * 32 < count
            assert launch.room + (launch.room // 4 if config.exact else 0) <= layout.slots
            chunk = at_once(world_size) * config.blocks * workers(world_size)
            assert (launch.kernel == "rounds") == (count > 2 * chunk)
            if config.blocks == BLOCKS:
                assert launch.epochs <= -(-count // rounds.epoch_of(world_size)), (
                    "an epoch takes what it is made for"
                )
            assert launch.kernel == "rounds" or launch.epochs == 1
            # A workspace that others have made larger is used alike.
            larger = ExchangeLayout(world_size, 4 * layout.slots, BLOCKS)
            assert rounds.rounds_launch(count, larger, config) == launch


def test_too_few_slots_are_refused() -> None:
    """A layout that no call asks for."""
    config = rounds.RoundsConfig(32, 1, 32, exact=True)
    with pytest.raises(ValueError, match="room: is 32 slots, must be 64 or more to go by rounds"):
        rounds.rounds_launch(100, ExchangeLayout(2, 64, 1), config)
