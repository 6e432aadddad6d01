"""The CUDA cast to fp8 on the CPU, threads as fibers: the bits of torch's operators."""

from __future__ import annotations

import ctypes
import random
import shutil
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import TORCH, Ranks, build
from quantised import E4M3, E5M2, same_bits
from torch import Tensor
from weft.kernels.float8_cast.cuda_kernel import SOURCE, CastParams, Float8Cast, cast_program
from weft.kernels.float8_cast.reference import Float8, reference_cast, reference_maxima
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


def matrices(dtype: torch.dtype) -> list[list[Tensor]]:
    """Of one tile, of several, of a part of one; that lie anyhow; zeros, nothing, something infinite and NaNs."""

    def drawn(*shape: int) -> Tensor:
        return (
            torch.randn(*shape) * torch.exp2(torch.randint(-30, 3, (shape[0], *[1] * (len(shape) - 1))))
        ).to(dtype)

    endless, unknown, tiny = drawn(16, 32), drawn(16, 16), torch.full((16, 16), 2.0**-24).to(dtype)
    endless[3, 5], unknown[2, 7] = -inf, nan
    shifted = torch.empty(1 + 16 * 48, dtype=dtype)[1:].view(16, 48).copy_(drawn(16, 48))
    return [
        [drawn(144, 80), drawn(7, 16), drawn(2, 3, 32)],
        [drawn(272, 64), drawn(48, 160).t(), shifted],
        [torch.zeros(16, 16, dtype=dtype), endless, unknown, tiny, drawn(1, 16)[:0], drawn(5, 7, 16)],
    ]


def check_casts(made: list[Float8], want: list[Float8]) -> None:
    for one, as_torch in zip(made, want, strict=True):
        assert torch.equal(one.scale.nan_to_num(-1), as_torch.scale.nan_to_num(-1)), "scale"
        assert same_bits(one.numbers, as_torch.numbers), "numbers"
        assert (one.transposed is None) == (as_torch.transposed is None)
        if one.transposed is not None and as_torch.transposed is not None:
            assert same_bits(one.transposed, as_torch.transposed), "transposed"


def check_bits(ranks: Ranks, given: list[Tensor], to: torch.dtype) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
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
