"""What parallel layers save with torch.distributed.checkpoint is the whole model, whoever loads it."""

from __future__ import annotations

import secrets
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opcommon import check, world
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured
from weft.fused_ops import ColumnParallelLinear, RowParallelLinear, local_state_dict, sharded_state_dict

IN, HIDDEN, ROWS = 5, 12, 6


def whole(seed: int) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(seed)
    ends = nn.Linear(IN, HIDDEN, bias=False), nn.Linear(HIDDEN, IN)
    return nn.Sequential(nn.LayerNorm(IN), nn.Sequential(ends[0], nn.Tanh()), ends[1])


def parallel(model: nn.Module, group: Any) -> nn.Module:
    norm, (up, act), down = deepcopy(model)  # type: ignore[misc, arg-type]
    up = ColumnParallelLinear.from_linear(up, group, sequence_parallel=False)
    return nn.Sequential(
        norm, nn.Sequential(up, act), RowParallelLinear.from_linear(down, group, sequence_parallel=False)
    )


def same(model: nn.Module, reference: nn.Module, group: Any) -> None:
    for (name, got), wanted in zip(
        model.named_parameters(), parallel(reference, group).parameters(), strict=True
    ):
        assert torch.equal(got, wanted), name


def saves(rank: int, size: int, seed: int, folder: Path) -> None:
    group = dist.new_group(list(range(size)))
    for given in (None, group, group.group_name, DeviceMesh.from_group(group, "cpu")):
        model = parallel(whole(seed), given)
        state = sharded_state_dict(model)
        assert isinstance(state["1.0.weight"], DTensor) and not isinstance(state["0.weight"], DTensor)
        for name, value in whole(seed).state_dict().items():
            full = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
            assert torch.equal(full, value), name
        for name, value in local_state_dict(state).items():
            assert value.data_ptr() == model.get_parameter(name).data_ptr()
    dcp.save(state, checkpoint_id=folder)


def loads(rank: int, size: int, seed: int, folder: Path) -> None:
    model = parallel(whole(seed + 1), None)
    state = sharded_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    same(model, whole(seed), None)
    other = parallel(whole(seed + 2), None)
    other.load_state_dict(state)
    same(other, whole(seed), None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_any_number_of_ranks_loads_what_another_has_saved(tmp_path: Path) -> None:
    seed = secrets.randbits(31)
    run_ranks(saves, 2, seed, tmp_path / "by 2")
    run_ranks(loads, 2, seed, tmp_path / "by 2")
    run_ranks(loads, 3, seed, tmp_path / "by 2")
    plain = whole(seed + 1)
    dcp.load(plain.state_dict(), checkpoint_id=tmp_path / "by 2", no_dist=True)
    for got, wanted in zip(plain.parameters(), whole(seed).parameters(), strict=True):
        assert torch.equal(got, wanted)
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "by 1", no_dist=True)
    run_ranks(loads, 2, seed, tmp_path / "by 1")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def trained(model: nn.Module, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def resumes(rank: int, size: int, seed: int, folder: Path) -> None:
    """On two replicas of two parts: a step, saved, and one more, in layers that were drawn otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    group = (mesh, "part")
    x = torch.rand(2, ROWS, IN, generator=torch.Generator().manual_seed(seed))
    reference, plain_optimizer = trained(whole(seed).double(), 0.01)
    step(reference, plain_optimizer, x[0].double())
    step(reference, plain_optimizer, x[1].double())

    model, optimizer = trained(parallel(whole(seed), group), 0.01)
    step(model, optimizer, x[0])
    dcp.save(sharded_state_dict(model, both(model, optimizer)), checkpoint_id=folder)
    model, optimizer = trained(parallel(whole(seed + 1), group), 0.5)
    state = sharded_state_dict(model, both(model, optimizer))
    dcp.load(state, checkpoint_id=folder)
    own = local_state_dict(state)
    set_state_dict(model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optim"])
    step(model, optimizer, x[1])
    wanted = parallel(reference.float(), group).parameters()
    for (name, got), expected in zip(model.named_parameters(), wanted, strict=True):
        check(name, got.detach(), expected.detach().double(), 1e-5)


def test_training_goes_on(tmp_path: Path) -> None:
    run_ranks(resumes, 4, secrets.randbits(31), tmp_path)


def refused(rank: int, size: int) -> None:
    model = parallel(whole(0), None)
    with pytest.raises(TypeError, match=r"^module: is of type OrderedDict, must be an nn.Module"):
        sharded_state_dict(model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^state: is of type list, must be a mapping"):
        sharded_state_dict(model, [model.state_dict()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^state: has no tensor .* must have one under 'module.1.0.weight'"):
        sharded_state_dict(nn.ModuleDict({"module": model}), model.state_dict())
    with pytest.raises(
        TypeError, match=r"^state: has a DTensor under '1.0.weight', must have this rank's own"
    ):
        sharded_state_dict(model, sharded_state_dict(model))
    assert sharded_state_dict(whole(0), {}) == {}
    meta = sharded_state_dict(parallel(whole(0), None).to("meta"))["1.0.weight"]
    assert meta.shape == (HIDDEN, IN) and meta.to_local().is_meta
    with pytest.raises(TypeError, match=r"^state: has a DTensor under '1.0.weight'"):
        sharded_state_dict(fully_shard(model, mesh=DeviceMesh.from_group(world(), "cpu")))
    # What the weight is made of are parts, too: saved as plain tensors they would be those of rank 0.
    for change in (weight_norm, lambda layer: l1_unstructured(layer, "weight", 0.2)):
        layer = change(ColumnParallelLinear(IN, HIDDEN, group=None))
        with pytest.raises(
            ValueError, match=r"^module: 'weight' is computed from other tensors, must be the"
        ):
            sharded_state_dict(layer)
        with pytest.raises(ValueError, match=r"^module: '1.weight' is computed from other tensors"):
            sharded_state_dict(nn.Sequential(nn.ReLU(), layer))


def test_refused() -> None:
    run_ranks(refused, 2)
