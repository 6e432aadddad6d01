"""The key under which Inductor keeps a graph of the pass: everything that decides what the graph becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import weft
from graphs import fake_ranks
from weft.fused_ops.passes import FusionPass, cache_key


def test_the_configuration() -> None:
    passes = [
        FusionPass(),
        FusionPass(strict=True),
        FusionPass(fuse="always"),
        FusionPass(agree=False),
        FusionPass(groups=["a"]),
        FusionPass(groups=["a", "b"]),
        FusionPass(groups=[]),
    ]
    keys = [p.uuid() for p in passes]
    assert len(set(keys)) == len(keys)
    assert FusionPass(groups=["b", "a"]).uuid() == keys[5]
    assert FusionPass(fuse="auto").uuid() == keys[0]


def test_the_sizes_of_the_groups() -> None:
    """An all-reduce's node does not say for how many ranks it is, and what it is fused into depends on it."""
    keys = []
    for world in (2, 4):
        with fake_ranks(world):
            keys.append(FusionPass().uuid())
            group = dist.new_group([0, 1])
            keys.append(FusionPass().uuid())
            dist.destroy_process_group(group)
            assert FusionPass().uuid() == keys[-2]
    assert len({*keys, FusionPass().uuid()}) == 5


@pytest.mark.parametrize(
    ("name", "matters"),
    [("WEFT_RESERVED_SMS", True), ("WEFT_PDL", True), ("WEFT_TIMEOUT", False), ("HOME", False)],
)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, matters: bool) -> None:
    key = FusionPass().uuid()
    monkeypatch.setenv(name, "7")
    assert (FusionPass().uuid() != key) is matters


def test_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    key = FusionPass().uuid()
    monkeypatch.setattr(weft, "__version__", "0.0.0+other")
    assert FusionPass().uuid() != key


@pytest.mark.parametrize(
    "changed", ["fused_ops/dispatch/plan.py", "kernels/device/ptx/sync.cuh", "symm_mem/heap/heap.py"]
)
def test_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    for name in (
        "fused_ops/dispatch/plan.py",
        "fused_ops/passes/graph/collectives.py",
        "kernels/device/ptx/sync.cuh",
        "symm_mem/heap/heap.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(cache_key, "_ROOT", tmp_path)
    before = cache_key._sources.__wrapped__()
    assert cache_key._sources.__wrapped__() == before
    (tmp_path / changed).write_text("another text")
    assert cache_key._sources.__wrapped__() != before


def test_the_real_sources_are_read() -> None:
    assert cache_key._ROOT.joinpath("fused_ops", "passes", "fusion.py").is_file()
    assert cache_key._ROOT.joinpath("kernels", "all_gather_matmul", "configs.py").is_file()
