"""The CUDA cast to fp8 on the CPU, threads as fibers: the bits of torch's operators."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import TORCH, Ranks, build, drawn_seed
from quantised import E4M3, E5M2, check_casts, matrices
from torch import Tensor
from weft.kernels.float8_cast.cuda_kernel import SOURCE, CastParams, Float8Cast, cast_program
from weft.kernels.float8_cast.reference import reference_cast, reference_maxima
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.workspace import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, to: torch.dtype, *instead: str
) -> Ranks:
    """What is launched of the program is noted there."""
    defines = {"WORLD_SIZE": 1, **cast_program(dtype, to).defines}
    mistake: Any = instead or None
    library = build(folder, SOURCE, ("largest", "cast"), CastParams, defines, instead=mistake)
    ranks, gpu = Ranks(library, Layout(1, 64, 1)), cuda_state.CudaState()
    monkeypatch.setattr(cuda_state, "state", gpu)
    for name, stand_in in (
        ("current_stream", lambda device: 0),
        ("clear", lambda at, size, stream: ctypes.memset(at, 0, size)),
        ("function", lambda program, name, shared: ranks.function(name)),
    ):
        monkeypatch.setattr(gpu, name, stand_in)
    return ranks


def check_bits(ranks: Ranks, given: list[Tensor], to: torch.dtype) -> None:
    seed = drawn_seed()
    launches = ranks.places[0].launches
    across = [t.numel() // t.shape[-1] % 16 == 0 for t in given]
    cast = Float8Cast(given, to, across)
    maxima, want = cast.maxima(), reference_maxima(given)
    ranks.run(seed)
    assert torch.equal(maxima.nan_to_num(-1), want.nan_to_num(-1)), "maxima"
    launches.clear()
    maxima = want * 1.7  # of all ranks
    made = cast.numbers(maxima)
    launches[0].blocks = min(launches[0].blocks, 3)  # which have several tiles
    for one in made:
        for t in (one.numbers, one.transposed):
            if t is not None:
                t.view(torch.uint8).fill_(0x55)
    ranks.run(seed)
    launches.clear()
    check_casts(made, reference_cast(given, maxima, to, across))


@pytest.mark.parametrize("to", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", TORCH)
def test_the_bits_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, to: torch.dtype
) -> None:
    ranks = built(tmp_path, monkeypatch, TORCH[dtype], to)
    for given in matrices(TORCH[dtype]):
        check_bits(ranks, given, to)


@pytest.mark.parametrize(
    ("there", "instead", "seen"),
    [
        ("word << 16 & MAGNITUDE", "word & MAGNITUDE", "maxima"),
        ("(their_row >= m.rows)", "(their_row >= m.rows - 4)", "transposed"),
        ("tile < tiles;", "tile + 1 < tiles;", "numbers"),
        ("byte | (byte + 4) << 4", "byte | (byte + 4) << 4 ^ 1", "transposed"),
    ],
)
def test_mistakes_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, instead: str, seen: str
) -> None:
    ranks = built(tmp_path, monkeypatch, torch.bfloat16, E4M3, there, instead)

    def calls() -> None:
        for given in matrices(torch.bfloat16):
            check_bits(ranks, given, E4M3)

    with pytest.raises(AssertionError, match=seen):
        calls()
