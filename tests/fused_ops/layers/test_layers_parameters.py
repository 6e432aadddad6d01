"""The parameters of parallel layers: what they are drawn as, on the meta device and elsewhere."""

from __future__ import annotations

import secrets

import pytest
import torch
from opcommon import gather
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from weft.fused_ops import ColumnParallelLinear, RowParallelLinear

Layer = ColumnParallelLinear | RowParallelLinear
LAYERS: list[type[Layer]] = [ColumnParallelLinear, RowParallelLinear]
IN, OUT = 6, 12


def same(layer: Layer, weight: Tensor, bias: Tensor | None) -> None:
    """``layer`` holds its rank's parts of these."""
    assert torch.equal(layer.weight, weight.chunk(layer.world_size, layer.shard_dim)[layer.rank])
    assert layer.weight.is_contiguous()
    assert (layer.bias is None) == (bias is None)
    if bias is not None:
        assert torch.equal(
            layer.bias, bias.chunk(layer.world_size)[layer.rank] if layer.shard_dim == 0 else bias
        )


def drawn(rank: int, size: int, seed: int) -> None:
    for cls in LAYERS:
        for bias in (True, False):
            torch.manual_seed(seed)
            linear = nn.Linear(IN, OUT, bias)
            behind = torch.rand(3)
            wanted = linear.weight, linear.bias
            if bias and cls is RowParallelLinear:
                wanted = linear.weight, torch.zeros(OUT)

            torch.manual_seed(seed)
            layer = cls(IN, OUT, group=None, bias=bias)
            assert torch.equal(torch.rand(3), behind)  # what is drawn next is what follows an nn.Linear, too
            same(layer, *wanted)

            with torch.device("meta"):
                later = cls(IN, OUT, group=None, bias=bias)
            later.reset_parameters()
            assert all(p.is_meta for p in later.parameters())
            later.to_empty(device="cpu")
            layer.weight.requires_grad_(False)
            for again in (layer, later):
                before = list(again.parameters())
                torch.manual_seed(seed)
                again.reset_parameters()
                same(again, *wanted)
                assert all(p is q for p, q in zip(before, again.parameters(), strict=True))
            same(cls.from_linear(linear, None), linear.weight, linear.bias)  # its bias, not zero


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_drawn(size: int) -> None:
    run_ranks(drawn, size, secrets.randbits(32))


def fully_sharded(rank: int, size: int, seed: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    for cls in LAYERS:
        torch.manual_seed(seed)
        wanted = cls(IN, OUT, group=(mesh, "part"), sequence_parallel=False)
        layer = cls(IN, OUT, group=(mesh, "part"), sequence_parallel=False, device="meta")
        fully_shard(layer, mesh=mesh["replica"])
        layer.to_empty(device="cpu")
        torch.manual_seed(seed)
        layer.reset_parameters()
        x = torch.ones(3, layer.weight.shape[1])
        assert torch.equal(layer(x), wanted(x))


def test_what_is_drawn_by_a_layer_of_fully_shard() -> None:
    run_ranks(fully_sharded, 4, secrets.randbits(32))


def differently_seeded(rank: int, size: int, seed: int) -> None:
    torch.manual_seed(seed + rank)
    layer = RowParallelLinear(IN, OUT, group=None, sequence_parallel=False)
    results = gather(layer(torch.ones(2, IN // size)))
    assert all(torch.equal(result, results[0]) for result in results)
    parts = gather(layer.weight)
    assert not torch.equal(parts[0], parts[1])


def test_ranks_that_are_seeded_differently_agree_on_a_row_parallel_layers_result() -> None:
    run_ranks(differently_seeded, 2, secrets.randbits(32))


class Counted(nn.Module):
    """A parametrization that says how often it was asked."""

    calls = 0

    def forward(self, parameter: Tensor) -> Tensor:
        self.calls += 1
        return 2 * parameter


@on_ranks(2)
def test_a_parametrization_is_asked_once_a_call(rank: int, size: int) -> None:
    """As by nn.Linear: dropout of weights draws each time, and a spectral norm takes a step."""
    for cls in LAYERS:
        for sequence_parallel in (True, False):
            layer = cls(IN, OUT, group=None, sequence_parallel=sequence_parallel)
            counts = {}
            for name in ("weight", "bias"):
                parametrize.register_parametrization(layer, name, counted := Counted())
                counts[name] = counted
                counted.calls = 0
            layer(torch.ones(size, IN // (1 if cls is ColumnParallelLinear else size))).sum().backward()
            asked = {name: counted.calls for name, counted in counts.items()}
            assert asked == {"weight": 1, "bias": 1}, f"{layer}: {asked}"
