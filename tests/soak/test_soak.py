"""A short soak, and that it would notice what it is there for."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import soak
from traffic import Options
from usage import MIB, Usage


def test_some_calls_on_three_ranks() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for said in soak(3, Options("cpu", calls=300, seconds=60, seed=seed, lanes=2)):
        assert said["calls"] == 300 and 100 < said["checked"] < 300


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.AFTER_A_FAILURE", 0.5)
    with pytest.raises(AssertionError, match="wrong result: call 30 of lane 0 on rank 0"):
        soak(2, Options("cpu", calls=100, seconds=60, seed=1, lanes=1, corrupt=30))


def test_growth_is_noticed() -> None:
    before = Usage(resident=500 * MIB, heap=16 * MIB, device=0, tensors=0, descriptors=30, threads=12)
    assert not before.grown(before)
    for more in ({"resident": 600 * MIB}, {"heap": 17 * MIB}, {"descriptors": 31}, {"threads": 13}):
        after = Usage(**{**vars(before), **more})
        assert len(after.grown(before)) == 1 and not before.grown(after)


def test_where_ranks_lie() -> None:
    options = Options("cuda", calls=1, seconds=1, seed=1, lanes=1)
    assert [options.place(rank).index for rank in range(4)] == [0, 1, 2, 3]
    shared = dataclasses.replace(options, gpus=2)
    assert [shared.place(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert dataclasses.replace(options, device="cpu").place(3).type == "cpu"
