"""Collectives that start together, more than copy engines carry: each starts when it is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from graphs import copied, fake_ranks
from orders import WORLD, check_alike, graph_of, order_of, program, words
from weft.fused_ops.dispatch import profitability
from weft.fused_ops.passes.order.copy_engines import start_when_needed


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(profitability, "_LEAST_ASYNC", 16)
    with fake_ranks(WORLD):
        yield


@pytest.mark.parametrize("seeds", [range(i, 80, 4) for i in range(4)], ids=str)
def test_random_programs(seeds: range) -> None:
    changed = 0
    for seed in seeds:
        before = graph_of(program(seed, most=8, at_once=0.0))
        after = copied(before)
        if not start_when_needed(after):
            assert words(after) == words(before)
            continue
        changed += 1
        after.lint()
        assert order_of(after) == order_of(before)
        check_alike(before, after)
    assert changed > 2, changed
