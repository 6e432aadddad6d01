"""A short soak, and that it would notice what it is there for."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from soak import soak
from traffic import Options
from usage import MIB, Usage


def test_some_calls_on_three_ranks() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for said in soak(3, Options("cpu", calls=300, seconds=60, seed=seed, lanes=2)):
        assert said["calls"] == 300 and 100 < said["checked"] < 300


@pytest.mark.gpu
@pytest.mark.timeout(900)  # most of it to compile each kernel for each group
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_calls_and_graphs_with_late_ranks_on_gpus(world_size: int) -> None:
    """Every op but the norms, in one shot and not, on two streams and in graphs; nothing grows."""
    seed, there = random.randrange(1 << 30), torch.cuda.device_count()
    print(f"seed {seed}")
    shared = there if there < world_size else None
    for said in soak(world_size, Options("cuda", calls=6000, seconds=240, seed=seed, lanes=1, gpus=shared)):
        assert said["checked"] > 500 and said["replayed"] > 5 and said["late"] > 5, said


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_share_gpus(world_size: int) -> None:
    """Fewer than there are ranks, at most two: calls take milliseconds, and ranks meet in other orders."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for GPUs of compute capability 9.0")
    gpus, seed = min(2, torch.cuda.device_count(), world_size - 1), random.randrange(1 << 30)
    print(f"seed {seed}")
    for said in soak(world_size, Options("cuda", calls=600, seconds=240, seed=seed, lanes=1, gpus=gpus)):
        assert said["checked"] > 20, said


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
