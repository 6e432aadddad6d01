"""Memory is verified on ranks that communicate: fused graphs are as predicted, an op that keeps memory is named."""

from __future__ import annotations

import logging
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from memory_check.verified import verified
from memory_check.verifier import MemoryVerifier
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.order import moves
from weft.fused_ops.passes.order.copy_engines import place_gathers


def program(x: Tensor, w: Tensor) -> Tensor:
    h = all_gather_tensor(x, 0, dist.group.WORLD) @ w
    y = reduce_scatter_tensor(torch.nn.functional.dropout(h, 0.5) @ w, "sum", 0, dist.group.WORLD)
    return y + all_gather_tensor(x * 2, 0, dist.group.WORLD).sum()


def clean(rank: int, world: int) -> list[tuple[list[str], int, int]]:
    seen: list[tuple[list[str], int, int]] = []
    as_always = MemoryVerifier.verify

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
    with patch.object(MemoryVerifier, "verify", verify):
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

    with pytest.raises(Exception, match="a compiled graph's memory is not") as error:
        torch.compile(fn, options=FusionPass().options)(torch.randn(4, 8), torch.randn(8, 8))
    dist.barrier()
    return str(error.value)


def layers(x: Tensor, *shards: Tensor) -> Tensor:
    for shard in shards:
        x = torch.tanh(x @ all_gather_tensor(shard, 0, dist.group.WORLD))
    return x


def gathered_in_place(rank: int, world: int, too_early: bool) -> str:
    """What is gathered lies on the heap. The code, or what is said of releases that stand right after the waits."""

    def placed(graph: fx.Graph) -> int:
        count = place_gathers(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.weft.all_gather_release.default):
            if too_early:
                node.args[1].append(node)
        return count

    x, shards = torch.randn(8, 512), [torch.randn(512 // world, 512) / 20 for _ in range(4)]
    fusion = FusionPass(reorder=True)
    compiled = torch.compile(layers, options=fusion.options)
    with torch.no_grad(), patch.object(moves, "place_gathers", placed):
        if too_early:
            with pytest.raises(Exception, match="a compiled graph's memory is") as error:
                compiled(x, *shards)
            dist.barrier()
            return str(error.value)
        y, (code,) = run_and_get_code(compiled, x, *shards)
        for _ in range(2):
            assert torch.equal(compiled(x, *shards), y)
        torch.testing.assert_close(y, layers(x, *shards), rtol=1e-4, atol=1e-4)
    (order,) = fusion.report().orders
    assert order.peak_after <= order.peak_before - 2 * 512 * 512, "two weights at once are not torch's memory"
    return str(code)


def test_what_is_gathered_in_place_is_as_predicted() -> None:
    for code in run_ranks(verified, 2, gathered_in_place, False):
        assert [code.count(f"weft_watch.{word}(") for word in ("started", "placed", "released")] == [4] * 3


def test_a_release_before_a_reader_is_seen() -> None:
    for said in run_ranks(verified, 2, gathered_in_place, True, fresh=True):
        assert re.search(r"all_gather_wait_default_1 has come to where all_gather_wait_default was", said)


def test_fused_graphs_are_as_predicted() -> None:
    for seen in run_ranks(verified, 2, clean):
        assert len(seen) == 2  # forward and backward, once each
        for problems, predicted, measured in seen:
            assert not problems
            assert predicted == measured


def test_an_op_that_keeps_its_input_is_named() -> None:
    for said in run_ranks(verified, 2, kept, fresh=True):
        assert "behind keeps the 128 bytes that sin made are still held" in said
