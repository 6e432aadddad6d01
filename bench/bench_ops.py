"""Every row of the registry as a benchmark of pytest-benchmark, with fixed rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import measure
from pytest_benchmark.fixture import BenchmarkFixture
from registry import Row


def test_row(
    row: Row, benchmark: BenchmarkFixture, device: torch.device, results: list[dict[str, Any]]
) -> None:
    """Fails when weft's result is wrong, after the row was recorded without a time."""

    def pedantic(one_round: Any, rounds: int) -> None:
        # A calibrated number of rounds would differ between ranks.
        benchmark.pedantic(one_round, rounds=rounds, iterations=1, warmup_rounds=1)

    world = dist.group.WORLD
    assert world is not None
    line = measure(row, world.group_name, device, pedantic)
    benchmark.extra_info.update(line)
    results.append(line)
    if line["weft_us"] is None:
        pytest.fail(line["error"], pytrace=False)
