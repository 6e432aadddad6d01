"""The CUDA all-gather and reduce-scatter and their launcher on the CPU, threads as fibers: slots, epochs of one launch,
corrections of data, dimensions, addresses, deadlines."""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, TORCH, Library, Ranks, build, defines_of, inputs, mistakes, same
from test_all_reduce_protocol import reference
from weft.kernels.all_gather import cuda_kernel as all_gather_kernel
from weft.kernels.device.collective.launch import CollectiveLauncher, CollectiveParams, SlicesProblem
from weft.kernels.device.collective.rounds import (
    RoundsConfig,
    choose_rounds,
    epoch_of,
    rounds_launch,
    rounds_layout,
)
from weft.kernels.device.comm.ll_exchange import BLOCKS, VECTOR, ExchangeLayout, at_once, workers
from weft.kernels.reduce_scatter import cuda_kernel as reduce_scatter_kernel
from weft.symm_mem.failure.fault import Fault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = ("one_shot", "one_shot_any", "rounds", "rounds_any")
DOUBTFUL = (-1, -2)  # words that LL data does not tell apart


def compiled(
    folder: Path,
    world_size: int,
    gathers: bool,
    instead: tuple[str, str] | None = None,
    dtype: str = "bfloat16",
    reduce_op: str = "sum",
) -> Library:
    if gathers:
        program = all_gather_kernel.all_gather_program(world_size, 0)
    else:
        program = reduce_scatter_kernel.reduce_scatter_program(world_size, 0, TORCH[dtype], reduce_op)
    return build(folder, program.path, KERNELS, CollectiveParams, defines_of(program), instead=instead)


@dataclass
class Case:
    """Parts [rows, n] of every rank, for a tensor [rows, W, n]."""

    ranks: Ranks
    rows: int
    n: int
    dtype: torch.dtype
    config: RoundsConfig
    polls: int = PATIENT

    def launch(self, rank: int, x: torch.Tensor, out: torch.Tensor, gathers: bool) -> None:
        row = self.n * self.dtype.itemsize
        problem = SlicesProblem(self.rows * row, *((None, row) if gathers else (row, None)))
        place = self.ranks.places[rank]
        kernel = CollectiveLauncher(place, problem, self.ranks.function, self.config)
        kernel.launch(0, (x.data_ptr(),), (out.data_ptr(),), self.polls, rank)


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


def small(world_size: int, choice: random.Random, exact: bool) -> RoundsConfig:
    return RoundsConfig(choice.choice([32, 64, 200]), choice.choice([1, 3]), choice.choice([32, 64]), exact)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 9])
def test_all_gathers_of_changing_size(tmp_path: Path, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    choice = random.Random(seed)
    ranks = Ranks(compiled(tmp_path, world_size, True), ExchangeLayout(world_size, 256))
    calls = []
    for call in range(60 // world_size + 6):
        dtype = choice.choice([torch.uint8, torch.int16, torch.int32, torch.int64])
        rows = choice.choice([1, 1, 2, 5])
        n = choice.choice([1, 3, 16, 31, 100, 16 * choice.randrange(1, 9), 1600 // rows])
        shift = choice.randrange(2)
        config = small(world_size, choice, True)
        if call < 4:  # each kernel at least once
            rows, dtype, shift = 1, torch.uint8, 0
            n = (16, 31, 16 * 70, 16 * 70 + 1)[call]
            config = RoundsConfig(32, 1, 32, True)
        xs = [any_bits(rows * n, dtype) for _ in range(world_size)]
        want = torch.stack([x.view(rows, n) for x in xs], 1)
        outs = []
        for rank in range(world_size):
            out = shifted(torch.zeros(want.numel(), dtype=dtype), shift)
            x = shifted(xs[rank], choice.randrange(2) if call >= 4 else 0)
            if rows == 1 and call >= 4 and call % 3 == 0:  # x is the part of the result that becomes x
                x = out.view(world_size, n)[rank]
                x.copy_(xs[rank])
            Case(ranks, rows, n, dtype, config).launch(rank, x, out, True)
            outs.append((out, x))
        calls.append((want, outs))
    ranks.run(seed)
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for call, (want, outs) in enumerate(calls):
        for rank, (out, _) in enumerate(outs):
            assert torch.equal(out.view_as(want), want), (call, rank, want.shape, want.dtype)
            assert is_guarded(out), "written past the end"
    assert ranks.slots_are_empty()


@pytest.mark.parametrize(
    ("world_size", "dtype", "reduce_op"),
    [
        (2, "bfloat16", "avg"),
        (3, "float32", "sum"),
        (4, "bfloat16", "max"),
        (4, "float32", "min"),
        (8, "bfloat16", "sum"),
        (9, "bfloat16", "sum"),
    ],
)
def test_reduce_scatters_of_changing_size(
    tmp_path: Path, world_size: int, dtype: str, reduce_op: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    choice, kind = random.Random(seed), TORCH[dtype]
    library = compiled(tmp_path, world_size, False, dtype=dtype, reduce_op=reduce_op)
    ranks = Ranks(library, ExchangeLayout(world_size, 256))
    calls = []
    for call in range(60 // world_size + 6):
        rows, shift = choice.choice([1, 1, 2, 5]), choice.randrange(2)
        n = choice.choice([1, 3, 16, 31, 100, 16 * choice.randrange(1, 9), 800 // rows])
        config = small(world_size, choice, False)
        if call < 4:
            rows, shift = 1, 0
            n, config = (16, 31, 16 * 70, 16 * 70 + 1)[call], RoundsConfig(32, 1, 32)
        numel = rows * world_size * n
        if reduce_op in ("sum", "avg"):
            xs = inputs(numel, kind, world_size)
        else:  # of zeros with both signs either is the larger one
            xs = [torch.randn(numel).to(kind) for _ in range(world_size)]
        xs = [x.view(rows, world_size, n) for x in xs]
        want = reference(xs, reduce_op)
        outs = []
        for rank in range(world_size):
            x = shifted(xs[rank], choice.randrange(2) if call >= 4 else 0)
            out = shifted(torch.zeros(rows * n, dtype=kind), shift)
            if rows == 1 and call >= 4 and call % 3 == 0:  # the result takes the place of this rank's part
                out = x.view(world_size, n)[rank]
            Case(ranks, rows, n, kind, config).launch(rank, x, out, False)
            outs.append((out, x))
        calls.append((want, outs))
    ranks.run(seed)
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for call, (want, outs) in enumerate(calls):
        for rank, (out, x) in enumerate(outs):
            expected = want[:, rank]
            assert same(out.view_as(expected), expected), (call, rank, want.shape)
            assert is_guarded(x) and (
                out.data_ptr() in range(x.data_ptr(), x.data_ptr() + x.nbytes) or is_guarded(out)
            )
    assert ranks.slots_are_empty()


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
    library = compiled(tmp_path, 2, True, MISTAKES.get(mistake or ""))
    wrong = 0
    for seed in range(30):
        torch.manual_seed(seed)
        choice, ranks, calls, epochs = random.Random(seed), Ranks(library, ExchangeLayout(2, 128)), [], 0
        for _ in range(5):
            config = RoundsConfig(
                choice.choice([32, 64, 90]), choice.choice([1, 2]), choice.choice([32, 64]), True
            )
            n = 16 * choice.choice([config.epoch, choice.randrange(1, 4 * config.epoch)])
            xs = [any_bits(n, torch.uint8) for _ in range(2)]
            outs = [torch.zeros(2 * n, dtype=torch.uint8) for _ in xs]
            for rank in range(2):
                Case(ranks, 1, n, torch.uint8, config, 2000).launch(rank, xs[rank], outs[rank], True)
            calls.append((xs, outs))
            epochs += rounds_launch(n // VECTOR, ranks.layout, config).epochs
        ended = ranks.ends(seed)
        right = ended and all(torch.equal(out, torch.cat(xs)) for xs, outs in calls for out in outs)
        right &= ranks.epochs_of_the_first_block() == [epochs] * 2
        wrong += not right or bool(ranks.records.any()) or not ranks.slots_are_empty()
        if wrong and mistake is not None:
            break
    assert bool(wrong) == (mistake is not None), f"{wrong} of 30 went wrong"


@pytest.mark.parametrize("gathers", [True, False])
def test_nothing_is_sent_to_slots_that_are_not_known_to_be_empty(tmp_path: Path, gathers: bool) -> None:
    layout = ExchangeLayout(2, 128)
    ranks = Ranks(compiled(tmp_path, 2, gathers, dtype="float32"), layout)
    config = RoundsConfig(64, 1, 32, gathers)
    part = 4 * 64  # elements, in an epoch
    x = torch.cat([torch.full((part,), float(epoch)) for epoch in (10, 20, 30)])
    case = Case(ranks, 1, 3 * part, torch.float32, config, 50)
    given, out = (x if gathers else x.repeat(2)), x.new_empty(6 * part)
    case.launch(0, given, out, gathers)
    ranks.check_that_two_epochs_are_sent()


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, gathers: bool, rounds: bool) -> None:
    ranks = Ranks(compiled(tmp_path, 3, gathers, dtype="float32"), ExchangeLayout(3, 128))
    n = 900 if rounds else 64
    xs = [torch.randn(n if gathers else 3 * n) for _ in range(3)]
    outs = [torch.empty(3 * n if gathers else n) for _ in range(3)]
    case = Case(ranks, 1, n, torch.float32, RoundsConfig(64, 2, 32, gathers), 2000)
    for rank in range(3):
        case.launch(rank, xs[rank], outs[rank], gathers)
    ranks.check_that_rank_1_is_missed(CollectiveParams)


def test_a_correction_that_does_not_come_is_named(tmp_path: Path) -> None:
    layout = ExchangeLayout(2, 64)
    ranks = Ranks(compiled(tmp_path, 2, True), layout)
    x = torch.zeros(16, dtype=torch.uint8)
    out = torch.zeros(32, dtype=torch.uint8)
    Case(ranks, 1, 16, x.dtype, RoundsConfig(32, 1, 32, True), 50).launch(0, x, out, True)
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
            config = choose_rounds(world_size, num_sms, exact=exact)
            assert config.blocks == min(num_sms, BLOCKS)
            count = -(-nbytes // VECTOR)
            layout = rounds_layout(count, world_size, config)
            launch = rounds_launch(count, layout, config)
            assert launch.blocks <= num_sms and (launch.blocks - 1) * 32 < count
            assert launch.room + (launch.room // 4 if config.exact else 0) <= layout.slots
            chunk = at_once(world_size) * config.blocks * workers(world_size)
            assert (launch.kernel == "rounds") == (count > 2 * chunk)
            if config.blocks == BLOCKS:
                assert launch.epochs <= -(-count // epoch_of(world_size)), (
                    "an epoch takes what it is made for"
                )
            assert launch.kernel == "rounds" or launch.epochs == 1
            # A workspace that others have made larger is used alike.
            larger = ExchangeLayout(world_size, 4 * layout.slots, BLOCKS)
            assert rounds_launch(count, larger, config) == launch


def test_too_few_slots_are_refused() -> None:
    """A layout that no call asks for."""
    config = RoundsConfig(32, 1, 32, exact=True)
    with pytest.raises(ValueError, match="room: is 32 slots, must be 64 or more to go by rounds"):
        rounds_launch(100, ExchangeLayout(2, 64, 1), config)
