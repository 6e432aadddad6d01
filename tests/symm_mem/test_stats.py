"""symm_mem.stats(): bytes of the heap by purpose, at once and without the other ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul
from weft.symm_mem.heap.placement import Placement


@on_ranks(2, fresh=True)
def test_stats(rank: int, world_size: int) -> None:
    assert symm_mem.stats() == symm_mem.HeapStats()  # and no heap was made for it
    x = symm_mem.empty(1000, 1000)
    first = symm_mem.stats()
    assert first.by_purpose["symm_mem.empty"] >= x.nbytes
    assert first.mapped >= first.peak >= first.in_use == sum(first.by_purpose.values())
    if rank == 0:  # one rank alone may ask, and drop
        y = symm_mem.stats(None, "cpu")
        assert y == first
    fused_all_gather_matmul(torch.randn(4, 8), [torch.randn(8, 6)], 0, None)
    second = symm_mem.stats()
    workspaces = {p: size for p, size in second.by_purpose.items() if p.endswith("workspace")}
    assert workspaces and all(size > 0 for size in workspaces.values())
    assert second.in_use > first.in_use and second.peak >= second.in_use
    del x
    third = symm_mem.stats()
    assert third.by_purpose.get("symm_mem.empty", 0) < first.by_purpose["symm_mem.empty"]
    assert third.peak == second.peak  # what was dropped is there until all ranks have dropped it
    symm_mem.reset()
    assert symm_mem.stats().mapped == third.mapped
    assert "MiB mapped" in str(third)


def test_what_there_is_no_heap_of() -> None:
    with pytest.raises(ValueError, match="group"):
        symm_mem.stats("no such group")


@pytest.mark.parametrize(
    ("tag", "purpose"),
    [
        ("empty(3, 5) torch.float32", "symm_mem.empty"),
        ("matmul workspace Layout(world_size=2)", "matmul workspace"),
        ("workspace to tune in Layout(2)", "workspace to tune"),
        ("words of a fault", "words of a fault"),
    ],
)
def test_purposes(tag: str, purpose: str) -> None:
    assert Placement(0, 256, 0, tag).purpose == purpose
