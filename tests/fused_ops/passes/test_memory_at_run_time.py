"""WEFT_VERIFY_MEMORY=1 on ranks that communicate: fused graphs are as predicted, an op that keeps memory is named."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.memory import at_run_time

ENV = {"WEFT_VERIFY_MEMORY": "1"}


def program(x: Tensor, w: Tensor) -> Tensor:
    h = all_gather_tensor(x, 0, dist.group.WORLD) @ w
    y = reduce_scatter_tensor(torch.nn.functional.dropout(h, 0.5) @ w, "sum", 0, dist.group.WORLD)
    return y + all_gather_tensor(x * 2, 0, dist.group.WORLD).sum()


def clean(rank: int, world: int) -> list[tuple[list[str], int, int]]:
    seen: list[tuple[list[str], int, int]] = []
    as_always = at_run_time.MemoryVerifier.verify

    def verify(self: Any, inputs: Any) -> Any:
        found = as_always(self, inputs)
        seen.append((found.problems, max(found.predicted), max(found.measured)))
        return found

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("weft.passes")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    fusion = FusionPass()
    compiled = torch.compile(program, options=fusion.options)
    results = []
    with patch.object(at_run_time.MemoryVerifier, "verify", verify):
        for _ in range(2):
            torch.manual_seed(rank)
            results.append(compiled(x, w))
            results[-1].sum().backward()
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    assert sum("memory of generated code verified" in each for each in said) == 4
    # Random numbers are drawn as in a run that verifies nothing.
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert fusion.report().fused >= 3
    return seen


def kept(rank: int, world: int) -> str:
    held: list[Tensor] = []

    @torch.library.custom_op("weft_memory_ranks::keeps", mutates_args=())
    def keeps(x: Tensor) -> Tensor:
        held.append(x)
        return x + 1

    keeps.register_fake(torch.empty_like)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_tensor(keeps(x.sin()), 0, dist.group.WORLD) @ w

    with pytest.raises(Exception, match="WEFT_VERIFY_MEMORY: a compiled graph's memory is not") as error:
        torch.compile(fn, options=FusionPass().options)(torch.randn(4, 8), torch.randn(8, 8))
    dist.barrier()
    return str(error.value)


def test_fused_graphs_are_as_predicted() -> None:
    for seen in run_ranks(clean, 2, env=ENV):
        assert len(seen) == 2  # forward and backward, once each
        for problems, predicted, measured in seen:
            assert not problems
            assert predicted == measured


def test_an_op_that_keeps_its_input_is_named() -> None:
    for said in run_ranks(kept, 2, env=ENV, fresh=True):
        assert "behind keeps the 128 bytes that sin made are still held" in said


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_VERIFY_MEMORY", "yes")
    with pytest.raises(ValueError, match="WEFT_VERIFY_MEMORY: is 'yes', must be 0 or 1"):
        FusionPass().uuid()
    monkeypatch.setenv("WEFT_VERIFY_MEMORY", "1")
    assert FusionPass().uuid() is None
    monkeypatch.setenv("WEFT_VERIFY_MEMORY", "0")
    assert "'WEFT_VERIFY_MEMORY': '0'" in FusionPass().uuid()
