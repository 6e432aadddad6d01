"""The CUDA all-to-all and its launcher on the CPU, threads as fibers: any two dimensions, data bit by bit, addresses,
epochs of one launch, and a rank that does not come."""

from __future__ import annotations

import random
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, Library, Ranks, build, defines_of
from test_collective_protocols import KERNELS, any_bits, is_guarded, shifted, small
from weft.kernels.all_to_all.cuda_kernel import SOURCE, all_to_all_program
from weft.kernels.device.collective.launch import CollectiveLauncher, CollectiveParams, SlicesProblem
from weft.kernels.device.collective.rounds import RoundsConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MISTAKES = {
    "correction of another peer": (
        "correct(peer, index, v);\n    }\n\n    //",
        "correct(peer_of(1), index, v);\n    }\n\n    //",
    ),
    "part of another peer": ("send(peer, AHEAD ? of[AHEAD ? i : 0]", "send(peer, AHEAD ? of[AHEAD ? 1 : 0]"),
    "own part is not stored": (".store(RANK, load_part(RANK, s.at));", ".offset(0);"),
}


def compiled(folder: Path, world_size: int, instead: tuple[str, str] | None = None) -> Library:
    return build(
        folder,
        SOURCE,
        KERNELS,
        CollectiveParams,
        defines_of(all_to_all_program(world_size, 0)),
        instead=instead,
    )


def launch(
    ranks: Ranks,
    rank: int,
    x: torch.Tensor,
    out: torch.Tensor,
    how: tuple[SlicesProblem, RoundsConfig],
    polls: int,
) -> None:
    kernel = CollectiveLauncher(ranks.places[rank], how[0], ranks.function, how[1])
    kernel.launch(0, (x.data_ptr(),), (out.data_ptr(),), polls, rank)


def right(library: Library, world_size: int, seed: int, calls: int) -> bool:
    """Whether calls of all kernels, one after the other, give what they must and leave their slots empty."""
    torch.manual_seed(seed)
    choice, ranks, made = random.Random(seed), Ranks(library, ExchangeLayout(world_size, 256)), []
    for call in range(calls):
        dtype = choice.choice([torch.uint8, torch.int16, torch.int32, torch.int64])
        part = [choice.choice([1, 2, 3, 8]), choice.choice([1, 5, 16]), choice.choice([1, 3, 16, 40])]
        dims = choice.choice([*product(range(3), range(3))])
        config, shift = small(world_size, choice, True), choice.randrange(2)
        if call < 4:  # each kernel at least once
            dtype, dims, shift, config = torch.uint8, (1, 0), 0, RoundsConfig(32, 1, 32, True)
            part = [[1, 1, 16], [1, 1, 31], [10, 7, 16], [9, 1, 125]][call]
        shape = [size * world_size if dim == dims[0] else size for dim, size in enumerate(part)]
        xs = [any_bits(torch.Size(shape).numel(), dtype).view(shape) for _ in range(world_size)]
        rows = [torch.Size(part[dim:]).numel() * dtype.itemsize for dim in dims]
        problem = SlicesProblem(torch.Size(part).numel() * dtype.itemsize, *rows)
        outs = []
        for rank in range(world_size):
            out = shifted(torch.zeros(xs[0].numel(), dtype=dtype), shift)
            x = shifted(xs[rank], choice.randrange(2) if call >= 4 else 0)
            launch(ranks, rank, x, out, (problem, config), PATIENT if calls > 8 else 500)
            outs.append((out, x))
        made.append((xs, dims, outs))
    if not ranks.ends(seed) or ranks.records.any() or not ranks.slots_are_empty():
        return False
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for xs, (scatter_dim, gather_dim), outs in made:
        for rank, (out, x) in enumerate(outs):
            want = torch.cat([each.chunk(world_size, scatter_dim)[rank] for each in xs], gather_dim)
            assert is_guarded(out) and is_guarded(x), "written past the end"
            if not torch.equal(out.view_as(want), want):
                return False
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 9])
def test_any_two_dimensions(tmp_path: Path, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    assert right(compiled(tmp_path, world_size), world_size, seed, 60 // world_size + 6), f"seed {seed}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, mistake: str) -> None:
    library = compiled(tmp_path, 3, MISTAKES[mistake])
    assert not right(library, 3, 0, 4)


@pytest.mark.parametrize("n", [64, 900])  # in one epoch, and by rounds
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, n: int) -> None:
    ranks = Ranks(compiled(tmp_path, 3), ExchangeLayout(3, 128))
    how = SlicesProblem(4 * n, 4 * n, 4 * n), RoundsConfig(64, 2, 32, True)
    kept = [(torch.randn(3 * n), torch.empty(3 * n)) for _ in range(3)]
    for rank in range(3):
        launch(ranks, rank, *kept[rank], how, 500)
    ranks.check_that_rank_1_is_missed(CollectiveParams)
