"""What parallel layers save with torch.distributed.checkpoint is the whole model, whoever loads it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opcommon import check, world
from ranks import on_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
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


@on_ranks(4)
def test_a_part_of_another_group_is_refused_on_all_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    weight = torch.randn(HIDDEN, HIDDEN)
    for kind, cut in ((ColumnParallelLinear, Shard(0)), (RowParallelLinear, Shard(1))):
        mine = weight.chunk(2, cut.dim)[mesh.get_local_rank("model")]
        for where, placements in ((mesh["model"], [cut]), (mesh, [Replicate(), cut])):
            layer = kind(HIDDEN, HIDDEN, group=mesh["model"], bias=False)
            layer.load_state_dict({"weight": distribute_tensor(weight, where, placements)})
            assert torch.equal(layer.weight, mine)
        # All of these are as large as the own part, and on two of the ranks the first one is the own part.
        others: list[tuple[DeviceMesh, list[Placement]]] = [
            (mesh["data"], [cut]),
            (mesh, [cut, Replicate()]),
            (mesh, [Partial(), cut]),
        ]
        for where, placements in others:
            layer = kind(HIDDEN, HIDDEN, group=mesh["model"], bias=False)
            kept, before = layer.weight, layer.weight.clone()
            state = {"weight": DTensor.from_local(mine, where, placements, run_check=False)}
            for assign in (False, True):
                with pytest.raises(RuntimeError, match=r"weight: is a DTensor .* must have shape .*"):
                    layer.load_state_dict(state, assign=assign)
                assert layer.weight is kept and torch.equal(layer.weight, before)
    whole_bias = RowParallelLinear(HIDDEN, HIDDEN, group=mesh["model"])
    state = {
        **whole_bias.state_dict(),
        "bias": distribute_tensor(torch.ones(HIDDEN), mesh["data"], [Replicate()]),
    }
    whole_bias.load_state_dict(state)
    assert torch.equal(whole_bias.bias, torch.ones(HIDDEN))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def trained(model: nn.Module, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def both(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))


def resumes(rank: int, size: int, seed: int, folder: Path, flat: bool) -> None:
    """On two replicas of two parts: a step, saved, and one more, in layers that were drawn otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    group = (mesh, "part")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    x = torch.rand(2, ROWS, IN, generator=torch.Generator().manual_seed(seed))
    reference, plain_optimizer = trained(whole(seed).double(), 0.01)
    step(reference, plain_optimizer, x[0].double())
    step(reference, plain_optimizer, x[1].double())

    model, optimizer = trained(parallel(whole(seed), group), 0.01)
    step(model, optimizer, x[0])
    dcp.save(sharded_state_dict(model, both(model, optimizer, options)), checkpoint_id=folder)
    model, optimizer = trained(parallel(whole(seed + 1), group), 0.5)
    state = sharded_state_dict(model, both(model, optimizer, options))
    dcp.load(state, checkpoint_id=folder)
    own = local_state_dict(state)
    given = {"model_state_dict": own["model"], "optim_state_dict": own["optim"], "options": options}
    set_state_dict(model, optimizer, **given)
    step(model, optimizer, x[1])
    wanted = parallel(reference.float(), group).parameters()
    for (name, got), expected in zip(model.named_parameters(), wanted, strict=True):
        check(name, got.detach(), expected.detach().double(), 1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_training_goes_on(tmp_path: Path, flat: bool) -> None:
    run_ranks(resumes, 4, secrets.randbits(31), tmp_path, flat)


@on_ranks(2)
def test_layers_in_wrappers(rank: int, size: int) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        lambda inner: torch.compile(inner, backend="eager"),
        checkpoint_wrapper,
        lambda inner: nn.parallel.DistributedDataParallel(inner, process_group=alone),
        lambda inner: torch.compile(checkpoint_wrapper(inner), backend="eager"),
    ]
    for wrap in wrappers:
        for outside in (False, True):
            model = parallel(whole(0), None)
            layers = {id(model[1][0].weight), id(model[2].weight), id(model[2].bias)}
            if outside:
                model = wrap(model)
            else:
                model[1][0] = wrap(model[1][0])
            optimizer = torch.optim.Adam(model.parameters())
            step(model, optimizer, torch.ones(ROWS, IN))
            state = sharded_state_dict(model, both(model, optimizer))
            for name in ("1.0.weight", "2.weight", "2.bias"):
                assert isinstance(state["model"][name], DTensor), name
                assert isinstance(state["optim"]["state"][name]["exp_avg"], DTensor), name
            kept = model.state_dict(keep_vars=True)
            for name, value in sharded_state_dict(model).items():
                assert isinstance(value, DTensor) == (id(kept[name]) in layers), name


@on_ranks([1, 2])
def test_what_may_be_a_part_is_not_saved_as_the_same_on_every_rank(rank: int, size: int) -> None:
    model = parallel(whole(0), None)
    optimizer = torch.optim.Adafactor(model.parameters())
    step(model, optimizer, torch.ones(ROWS, IN))
    for flat in (False, True):
        state = both(model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
        if size == 1:
            sharded_state_dict(model, state)
            continue
        wanted = rf"^state: has a tensor of shape .* under '1.0.weight', .* part, \({HIDDEN // size}, {IN}\)"
        with pytest.raises(ValueError, match=wanted):
            sharded_state_dict(model, state)
    if size > 1:  # of one row Adafactor keeps one number, which differs all the same
        narrow = RowParallelLinear(HIDDEN, 1, group=None, bias=False)
        of_narrow = torch.optim.Adafactor(narrow.parameters())
        step(narrow, of_narrow, torch.ones(ROWS, HIDDEN // size))
        with pytest.raises(ValueError, match=r"^state: has .* shape \(1, 1\) under 'weight'"):
            sharded_state_dict(narrow, both(narrow, of_narrow))
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if size == 1:
        sharded_state_dict(model, state)
    else:
        with pytest.raises(
            ValueError, match=r"^state: has an optimizer's state under the number 0, must have"
        ):
            sharded_state_dict(model, state)


@on_ranks(2)
def test_refused(rank: int, size: int) -> None:
    model = parallel(whole(0), None)
    with pytest.raises(TypeError, match=r"^module: is of type OrderedDict, must be an nn.Module"):
        sharded_state_dict(model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^state: is of type list, must be a mapping"):
        sharded_state_dict(model, [model.state_dict()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^state: has no tensor .* must have one under 'module.1.0.weight'"):
        sharded_state_dict(nn.ModuleDict({"module": model}), model.state_dict())
    with pytest.raises(TypeError, match=r"^state: has a DTensor under '1.0.weight', must have this"):
        sharded_state_dict(model, sharded_state_dict(model))
    assert sharded_state_dict(whole(0), {}) == {}
    meta = sharded_state_dict(parallel(whole(0), None).to("meta"))["1.0.weight"]
    assert meta.shape == (HIDDEN, IN) and meta.to_local().is_meta
    with pytest.raises(TypeError, match=r"^state: has a DTensor under '1.0.weight'"):
        sharded_state_dict(fully_shard(model, mesh=DeviceMesh.from_group(world(), "cpu")))
    # What the weight is made of are parts, too: saved as plain tensors they would be those of rank 0.
    for change in (weight_norm, lambda layer: l1_unstructured(layer, "weight", 0.2)):
        layer = change(ColumnParallelLinear(IN, HIDDEN, group=None))
        with pytest.raises(ValueError, match=r"^module: 'weight' is computed from other tensors"):
            sharded_state_dict(layer)
        with pytest.raises(ValueError, match=r"^module: '1.weight' is computed from other tensors"):
            sharded_state_dict(nn.Sequential(nn.ReLU(), layer))
