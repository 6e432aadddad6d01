"""A call of torch's op like one before, with weft installed, without a GPU: it takes the fast path, and is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_gpu
import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
import torch.distributed._symmetric_memory as torch_symm
import weft
from fake_gpu import NAME, Stage
from test_launch_cache_of_matmuls import Op

stage, op = fake_gpu.stage, matmuls.op
Called = tuple[str, tuple[Any, ...]]


@pytest.fixture
def by_name(op: Op) -> Iterator[Called]:
    """torch's op that takes such a call, and its arguments."""
    A, *rest = op.given
    if len(op.given) == 4:
        pytest.skip("torch's op takes neither bias nor residual")
    gathers = len(op.given) == 3
    name = "fused_all_gather_matmul" if gathers else "fused_matmul_reduce_scatter"
    weft.install()
    weft.drop_in.installed_calls(clear=True)
    yield name, (A, rest, 0, NAME) if gathers else (A, rest[0], "sum", 0, NAME)
    weft.drop_in.uninstall()


def test_it_is_launched_at_once(stage: Stage, by_name: Called) -> None:
    name, arguments = by_name
    for way in (getattr(torch.ops.symm_mem, name), getattr(torch.ops.symm_mem, name).default):
        way(*arguments)
    assert len(stage.launched) == 2
    assert [str(taken) for taken in weft.drop_in.installed_calls()] == [f"{name}: 2 calls by weft"]


def test_what_is_torchs_is_not(stage: Stage, by_name: Called) -> None:
    """A dimension counted from the end, which torch refuses, and torch's test mode."""
    name, arguments = by_name
    op = getattr(torch.ops.symm_mem, name)
    behind = [-3 if type(argument) is int else argument for argument in arguments]
    with pytest.raises(ValueError, match="Invalid gather_dim"):
        op(*behind)
    with torch_symm._test_mode():
        op(*arguments)
    assert not stage.launched
    assert {taken.by for taken in weft.drop_in.installed_calls()} == {"torch"}
