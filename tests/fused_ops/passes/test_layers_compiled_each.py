"""Layers that are compiled one by one, as torchtitan does: their graphs are those of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import weft
from graphs import fake_ranks, gather, scatter
from memory_check.verified import verifying
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.backend import weft_backend

LAYERS = 12
SETTINGS: dict[str, Any] = {"sequence_parallel": True, "regather": True, "reorder": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4, bias=False)
        self.down = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + scatter(self.down(self.up(gather(x)).relu()))


def other(graph: torch.fx.Graph) -> None:
    """A pass of the user's own."""


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_ranks(2), inductor_config.patch(fx_graph_cache=False), verifying():
        yield
    torch._dynamo.reset()
    counters.clear()


def by_options(fusion: FusionPass, block: Block) -> None:
    block.compile(options=fusion.options)


def with_others(fusion: FusionPass, block: Block) -> None:
    block.compile(options=fusion.options_with(other))


def by_name(fusion: FusionPass, block: Block) -> None:
    block.compile(backend=weft_backend, options={f"weft.{name}": value for name, value in SETTINGS.items()})


def by_weft_compile(fusion: FusionPass, block: Block) -> None:
    block._compiled_call_impl = weft.compile(block._call_impl, **SETTINGS)


@pytest.mark.parametrize("way", [by_options, with_others, by_name, by_weft_compile])
def test_each_layer_runs_the_graph_of_the_first(way: Callable[[FusionPass, Block], None]) -> None:
    torch._dynamo.reset()
    counters.clear()
    fusion, blocks = FusionPass(**SETTINGS), [Block() for _ in range(LAYERS)]
    for block in blocks:
        way(fusion, block)
    x = torch.randn(4, 8, requires_grad=True)
    for block in blocks:
        x = block(x)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["frames"] == {"total": 1, "ok": 1}
