"""Programs over the process group "weft" do what they do over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import weft
from opcommon import check
from ranks import run_ranks
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from weft.fused_ops.passes.agreement import guard

Losses = list[float]


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12), nn.BatchNorm1d(12))


def _train(model: nn.Module, parameters: Any, rank: int, *, same: bool = False) -> Losses:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(7 if same else 7 + rank)
    losses = []
    for _ in range(3):
        x = torch.randn(6, 12, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _by_weft(group: Any) -> dict[str, int]:
    taken = weft.process_group(group).calls(clear=True)
    return {call.op: call.count for call in taken if call.by == "weft"}


def _on_both(
    program: Callable[[Any, int], tuple[Losses, list[torch.Tensor]]], rank: int, *expected: str
) -> None:
    """The program's losses and tensors are gloo's within rounding, and weft took these collectives; none if not one
    is expected."""
    over_gloo = program(dist.new_group(backend="gloo"), rank)
    group = dist.new_group(backend="weft")
    over_weft = program(group, rank)
    torch.testing.assert_close(torch.tensor(over_weft[0]), torch.tensor(over_gloo[0]), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(over_weft[1], over_gloo[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    taken = _by_weft(group)
    assert set(expected) <= set(taken) and bool(expected) == bool(taken), taken


def _ddp(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.001)
    return _train(model, model.parameters(), rank), [p.detach() for p in model.parameters()]


def _moved_ddp(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    """One rank makes its DDP of the group, the other one gets it later."""
    alone = [dist.new_group([r], backend="gloo") for r in range(dist.get_world_size())][rank]
    first = alone if rank == 0 else group
    model = DistributedDataParallel(_model()[:3], process_group=first, init_sync=False)
    if rank == 0:
        model._update_process_group(group)
    return _train(model, model.parameters(), rank), [p.detach() for p in model.parameters()]


def _ddp_hook(
    group: Any, rank: int, hook: Callable[[Any, Any], Any], state: Any
) -> tuple[Losses, list[torch.Tensor]]:
    model = DistributedDataParallel(_model(), process_group=group)
    model.register_comm_hook(state, hook)
    losses = _train(model, model.parameters(), rank)
    return losses, [p.detach() for p in model.parameters()]


def _fp16(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _ddp_hook(group, rank, fp16_compress_hook, group)


def _power_sgd(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    """Its callbacks start collectives and wait for them."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    return _ddp_hook(group, rank, powerSGD_hook, state)


def _chained(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    """Gradients go as shares of the largest one of all ranks, which the ranks find first."""

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        x = bucket.buffer()
        most = dist.all_reduce(x.abs().amax().view(1), dist.ReduceOp.MAX, group=group, async_op=True)

        def scaled(future: Any) -> torch.Tensor:
            largest = future.value()[0]
            share = x / largest
            dist.all_reduce(share, group=group, async_op=True).get_future().wait()
            return share * (largest / group.size())

        return most.get_future().then(scaled)  # type: ignore[no-any-return]

    hook.__annotations__.clear()  # DDP takes no strings for types
    return _ddp_hook(group, rank, hook, None)


def check_ddp(rank: int, world_size: int) -> None:
    _on_both(_ddp, rank)
    _on_both(_moved_ddp, rank)
    for program in (_fp16, _chained, _power_sgd):
        _on_both(program, rank, "all_reduce")


def _fsdp(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = _train(model, model.parameters(), rank)
    return losses, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def check_fsdp(rank: int, world_size: int) -> None:
    _on_both(_fsdp, rank, "all_gather_into_tensor", "reduce_scatter_tensor")


def _tensor_parallel(group: Any, rank: int) -> tuple[Losses, list[torch.Tensor]]:
    # By its name no other one: torch keeps for equal meshes what it has found out for one of them, its group, too.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 4)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    losses = _train(model, model.parameters(), rank, same=True)
    return losses, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def check_tensor_parallel(rank: int, world_size: int) -> None:
    _on_both(_tensor_parallel, rank, "all_reduce")


def check_dtensor(rank: int, world_size: int) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend="weft"), "cpu")
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close(sharded.full_tensor(), whole)
    torch.testing.assert_close(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    parts = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    total = whole * sum(range(1, world_size + 1))
    torch.testing.assert_close(parts.redistribute(mesh, [Replicate()]).to_local(), total)
    mine = parts.redistribute(mesh, [Shard(0)]).to_local()
    torch.testing.assert_close(mine, total.chunk(world_size)[rank])
    taken = _by_weft(mesh.get_group())
    assert set(taken) == {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}, taken


def check_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(
        "cpu", (1, world_size), mesh_dim_names=("data", "tensor"), backend_override={"tensor": "weft"}
    )
    assert dist.get_backend(mesh.get_group("tensor")) == "weft"
    x = torch.full((5,), float(rank))
    y = functional.all_reduce(x, "sum", (mesh, 1)) + 0
    torch.testing.assert_close(y, torch.full((5,), float(sum(range(world_size)))))
    assert _by_weft(mesh.get_group("tensor")) == {"all_reduce": 1}


def default_group(folder: Path, rank: int, world_size: int) -> Any:
    """The default group is weft's from now on."""
    dist.destroy_process_group()
    place = f"file://{folder}/store"
    dist.init_process_group("weft", init_method=place, rank=rank, world_size=world_size)
    return dist.group.WORLD


def check_transformers(rank: int, world_size: int, folder: Path) -> None:
    group = default_group(folder, rank, world_size)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    if rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    whole = LlamaForCausalLM.from_pretrained(folder).double().eval()
    plan = DistributedConfig(tp_plan="auto", tp_size=world_size)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
    _by_weft(group)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(os.getppid()))
    with torch.no_grad():
        check("logits", model(ids).logits, whole(ids).logits, 1e-5)
    assert _by_weft(group)["all_reduce"] >= 2 * config.num_hidden_layers


@functorch_config.patch(enable_autograd_cache=False)
@inductor_config.patch(fx_graph_cache=False)  # of a graph from a cache the pass has no report
def check_compiled(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="weft")
    fusion = weft.FusionPass(groups=[group], agree=True)

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = functional.all_gather_tensor(x, 0, group) @ up
        return functional.reduce_scatter_tensor(h.relu() @ down, "sum", 0, group) + 0

    torch.manual_seed(11)
    x, up, down = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12, 16)
    compiled = torch.compile(block, options=fusion.options)
    want = block(x, up, down)
    assert set(_by_weft(group)) == {"all_gather_into_tensor", "reduce_scatter_tensor"}
    for _ in range(2):
        torch.testing.assert_close(compiled(x, up, down), want)
    report = fusion.report().details()
    assert "fused_all_gather_matmul" in report and "fused_matmul_reduce_scatter" in report, report
    # A rank that runs the program op by op meets one that runs it compiled, and that has asked for it in vain.
    other = block if rank else compiled
    with mock.patch.object(guard, "VOTE_DEADLINE", 2.0):
        torch.testing.assert_close(other(x, up, down), want)


@pytest.mark.parametrize(
    "program",
    [check_ddp, check_fsdp, check_tensor_parallel, check_dtensor, check_mesh, check_compiled],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_program(program: Callable[[int, int], None]) -> None:
    run_ranks(program, 2, fresh=True)


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(check_transformers, 2, tmp_path, fresh=True)
