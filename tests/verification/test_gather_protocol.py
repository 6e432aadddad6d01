"""The CUDA gather on the CPU, threads as fibers: every bit comes to the root, nothing to others, however late ranks
are."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, Library, Ranks, build, defines_of
from test_collective_protocols import KERNELS, any_bits, is_guarded, shifted, small
from weft.kernels.all_gather.cuda_kernel import SOURCE, all_gather_program
from weft.kernels.device.collective.launch import CollectiveLauncher, CollectiveParams, SlicesProblem
from weft.kernels.device.collective.rounds import RoundsConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MISTAKES = {
    "nobody waits for the others": ("if (threadIdx.x != 0) return;", "return;"),
    "words of others are not taken": ("} else if (threadIdx.x == 0) {", "} else if (false) {"),
    "another rank receives": (
        "exact.send(ROOT, index, next);",
        "exact.send((ROOT + 1) % WORLD_SIZE, index, next);",
    ),
}


def compiled(folder: Path, world_size: int, root: int, instead: tuple[str, str] | None = None) -> Library:
    defines = defines_of(all_gather_program(world_size, 0, root))
    return build(folder, SOURCE, KERNELS, CollectiveParams, defines, instead=instead)


def right(library: Library, world_size: int, root: int, seed: int, calls: int) -> bool:
    """Whether calls of all kernels, one after the other, give what they must and leave their slots empty."""
    torch.manual_seed(seed)
    choice, ranks, made = random.Random(seed), Ranks(library, ExchangeLayout(world_size, 256)), []
    for call in range(calls):
        dtype, rows = choice.choice([torch.uint8, torch.int16, torch.int64]), choice.choice([1, 2, 5])
        n, shift, config = (
            choice.choice([1, 16, 31, 100, 320]),
            choice.randrange(2),
            small(world_size, choice, True),
        )
        if call < 4:  # each kernel at least once
            rows, dtype, shift, n = 1, torch.uint8, 0, (16, 31, 16 * 70, 16 * 70 + 1)[call]
            config = RoundsConfig(32, 1, 32, True)
        xs = [any_bits(rows * n, dtype) for _ in range(world_size)]
        problem = SlicesProblem(rows * n * dtype.itemsize, None, n * dtype.itemsize)
        outs = []
        for rank in range(world_size):
            out = shifted(torch.zeros(world_size * rows * n, dtype=dtype), shift)
            kernel = CollectiveLauncher(ranks.places[rank], problem, ranks.function, config)
            kernel.launch(0, (xs[rank].data_ptr(),), (out.data_ptr(),), PATIENT if calls > 8 else 500, rank)
            outs.append(out)
        made.append((torch.stack([x.view(rows, n) for x in xs], 1), xs, outs))
    if not ranks.ends(seed) or ranks.records.any() or not ranks.slots_are_empty():
        return False
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for want, _, outs in made:
        for rank, out in enumerate(outs):
            assert is_guarded(out), "written past the end"
            if not torch.equal(out.view_as(want), want if rank == root else torch.zeros_like(want)):
                return False
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 9])
def test_all_comes_to_the_root(tmp_path: Path, world_size: int) -> None:
    seed = random.randrange(1 << 30)
    root = seed % world_size
    assert right(compiled(tmp_path, world_size, root), world_size, root, seed, 60 // world_size + 6), (
        f"seed {seed}"
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, mistake: str) -> None:
    library = compiled(tmp_path, 3, 1, MISTAKES[mistake])
    assert not all(right(library, 3, 1, seed, 8) for seed in range(6))
