"""A layer holds one rank's part of so many: another rank, or another number of them, is refused and not given numbers.

Modules are pickled whole, and kept while the process group is made anew.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import check, gather
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from weft.fused_ops import ColumnParallelLinear, RowParallelLinear
from weft.fused_ops.layers.checkpoint import sharded_state_dict

IN, OUT, SEQUENCE = 12, 24, 12  # multiples of every number of ranks here


def layers(**options: Any) -> Iterator[nn.Module]:
    """In all modes."""
    for sequence_parallel, flag in product((True, False), (True, False)):
        yield ColumnParallelLinear(
            IN, OUT, group=None, sequence_parallel=sequence_parallel, gather_output=flag, **options
        )
        yield RowParallelLinear(
            IN, OUT, group=None, sequence_parallel=sequence_parallel, input_is_parallel=flag, **options
        )


def fitting(layer: Any) -> Tensor:
    """What the layer takes: but for the ranks nothing is wrong with it."""
    cut = isinstance(layer, RowParallelLinear) and layer.input_is_parallel
    return torch.randn(SEQUENCE, layer.weight.shape[1] if cut else IN)


def saved(rank: int, size: int) -> bytes:
    file = io.BytesIO()
    torch.save(list(layers()), file)
    return file.getvalue()


def loaded(pickled: bytes) -> list[Any]:
    found: list[Any] = torch.load(io.BytesIO(pickled), weights_only=False)
    return found


def refuses(layer: Any, words: str) -> None:
    x = fitting(layer)
    on_meta = copy.deepcopy(layer).to("meta")
    for one, given in ((layer, x), (layer, x.clone().requires_grad_()), (on_meta, x.to("meta"))):
        with pytest.raises(ValueError, match=f"^{words}"):
            one(given)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=f"^{words}"):
        torch.compile(layer, backend="eager")(x)
    with pytest.raises(ValueError, match=words):
        layer.reset_parameters()
    with pytest.raises(ValueError, match=rf"^{words}"):
        sharded_state_dict(layer)
    with pytest.raises(ValueError, match=rf"^module: '1.0', {words}"):
        sharded_state_dict(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        key: DTensor.from_local(value.detach(), mesh, [Shard(0)], run_check=False)
        for key, value in layer.state_dict().items()
    }
    with pytest.raises(RuntimeError, match=f"weight: {words}"):
        layer.load_state_dict(state)
    layer.load_state_dict(layer.state_dict())  # the own part needs no group


def by_another_number(rank: int, size: int, pickled: list[bytes]) -> None:
    made = len(pickled)
    for layer in loaded(pickled[rank % made]):
        refuses(layer, f"group: the layer was made for {made} ranks, group '0' has {size}")


@pytest.mark.parametrize(("made", "run"), [(3, 2), (2, 4), (2, 1), (1, 2)])
def test_another_number_of_ranks(made: int, run: int) -> None:
    run_ranks(by_another_number, run, run_ranks(saved, made))


def by_another_rank(rank: int, size: int, pickled: list[bytes]) -> None:
    """Rank 0's, loaded by all; and each rank's own, that computes what it did."""
    for layer in loaded(pickled[0]) if rank else ():
        refuses(layer, f"group: the layer was made for rank 0, this is rank {rank} of group '0'")
    for layer, fresh in zip(loaded(pickled[rank]), layers(), strict=True):
        fresh.load_state_dict(layer.state_dict())
        torch.manual_seed(7)
        x = fitting(layer)
        assert torch.equal(layer(x), fresh(x))
        assert torch.equal(copy.deepcopy(layer)(x), fresh(x))
        sharded_state_dict(layer)
        layer.reset_parameters()
        assert torch.isfinite(layer(x)).all()


def test_another_rank() -> None:
    run_ranks(by_another_rank, 2, run_ranks(saved, 2))


def no_group(rank: int, size: int, pickled: list[bytes]) -> None:
    for layer in loaded(pickled[rank]):
        layer.group = "gone"
        with pytest.raises(ValueError, match=r"^group: no process group is named 'gone'"):
            layer(fitting(layer))


def test_a_group_that_is_gone() -> None:
    run_ranks(no_group, 2, run_ranks(saved, 2))


def init(folder: str, name: str, rank: int, size: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=size)


def restarted(rank: int, size: int, folder: str) -> None:
    """Three ranks, three again, and two of them: layers are kept, and what was compiled."""
    torch._dynamo.reset()
    kept = list(layers(bias=False))
    compiled = [torch.compile(copy.deepcopy(k), backend="aot_eager", fullgraph=True) for k in kept]
    xs = [fitting(layer).requires_grad_() for layer in kept]
    before = [layer(x) for layer, x in zip(kept, xs, strict=True)]
    for one, x, y in zip(compiled, xs, before, strict=True):
        check("compiled", one(x).detach(), y.detach().double(), 1e-6)
        one(x).sum().backward()
    init(folder, "same", rank, size)
    for layer, one, x, y in zip(kept, compiled, xs, before, strict=True):
        assert torch.equal(layer(x), y), layer
        check("compiled", one(x).detach(), y.detach().double(), 1e-6)
    assert len(gather(before[0])) == size
    if rank == 2:
        dist.destroy_process_group()
        return
    init(folder, "fewer", rank, 2)
    for layer, one, x in zip(kept, compiled, xs, strict=True):
        with pytest.raises(ValueError, match=r"^group: the layer was made for 3 ranks, group '0' has 2$"):
            layer(x)
        # A column-parallel layer whose input is whole sends nothing of weft's but in its backward pass.
        if isinstance(layer, RowParallelLinear) or layer.sequence_parallel:
            words = re.escape("group_size: is 3, must be 2, the number of ranks of group '0'")
            with pytest.raises(ValueError, match=words):
                one(x)
        elif not layer.gather_output:
            y = one(x)
            with pytest.raises(ValueError, match="group_size: is 3, must be 2"):
                y.sum().backward()
        else:  # c10d's own
            with pytest.raises(RuntimeError):
                one(x)
    torch._dynamo.reset()


def test_a_restart_with_fewer_ranks(tmp_path: Any) -> None:
    run_ranks(restarted, 3, str(tmp_path), fresh=True)
