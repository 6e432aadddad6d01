"""The ops in torch's modes: inference mode, autocast, forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
import torch.distributed as dist
from fake_gpu import SLOW, TAKEN, Stage
from op_table import OpCall, op_calls
from opcommon import DEVICES, check, gather, world
from ranks import on_ranks, run_ranks
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch import plan
from weft.fused_ops.library import registration

stage, op = matmuls.stage, matmuls.op


def products(rank: int, world_size: int) -> None:
    """Every op once, with or without gradients."""
    grad = not torch.is_inference_mode_enabled()
    A, B = torch.randn(3 * world_size, 5), torch.randn(5, 7)
    parts = [a @ b for a, b in zip(gather(A), gather(B), strict=True)]
    weight = B.clone().requires_grad_(grad)
    _, (gathered,) = fused_ops.fused_all_gather_matmul(A, [weight], 0, world())
    check("all_gather_matmul", gathered, torch.cat(gather(A)) @ B.double(), 1e-6)
    scattered = fused_ops.fused_matmul_reduce_scatter(A, weight, "sum", 0, world())
    check("matmul_reduce_scatter", scattered, sum(parts).chunk(world_size)[rank], 1e-6, parts)
    reduced = fused_ops.fused_matmul_all_reduce(A, weight, "sum", world())
    check("matmul_all_reduce", reduced, sum(parts), 1e-6, parts)
    whole = fused_ops.one_shot_all_reduce(A, "sum", world())
    check("all_reduce", whole, sum(gather(A)), 1e-6)
    side_by_side = fused_ops.one_shot_all_gather(A, 1, world())
    check("all_gather", side_by_side, torch.cat(gather(A), 1), 0)
    part = fused_ops.one_shot_reduce_scatter(A, "sum", 0, world(), out=A.new_empty(3, 5))
    check("reduce_scatter", part, sum(gather(A)).chunk(world_size)[rank], 1e-6)
    exchanged = fused_ops.one_shot_all_to_all(A, 0, 1, world())
    check("all_to_all", exchanged, torch.cat([x.chunk(world_size)[rank] for x in gather(A)], 1), 0)
    to_first = fused_ops.one_shot_gather(A, 0, 0, world())
    whole_A = torch.cat(gather(A))
    check("gather", to_first, whole_A if rank == 0 else whole_A[:0], 0)
    wide = torch.cat([B, B], 1)
    heads = fused_ops.fused_matmul_all_to_all(A, wide, 0, world())
    products = [a @ b for a, b in zip(gather(A), gather(wide), strict=True)]
    check("matmul_all_to_all", heads, torch.cat([p.chunk(world_size, 1)[rank] for p in products]), 1e-6)
    tall = torch.cat([B] * world_size)
    multiplied = fused_ops.fused_all_to_all_matmul(A, tall, 0, world())
    check("all_to_all_matmul", multiplied, exchanged.double() @ tall.double(), 1e-6)
    _, sums = fused_ops.fused_all_reduce_rms_norm(A, A, A[0], 1e-5, world())
    check("all_reduce_rms_norm", sums, sum(gather(A)) + A.double(), 1e-6)
    *_, sums = fused_ops.fused_all_reduce_rms_norm_quant(A, A, A[0], 1e-5, world())
    check("all_reduce_rms_norm_quant", sums, sum(gather(A)) + A.double(), 1e-6)
    _, sums = fused_ops.fused_all_reduce_layer_norm(A, A, A[0], None, 1e-5, world())
    check("all_reduce_layer_norm", sums, sum(gather(A)) + A.double(), 1e-6)
    if grad:
        (gathered.sum() + scattered.sum() + reduced.sum()).backward()
        assert weight.grad is not None and weight.grad.isfinite().all()
    check("in place", fused_ops.one_shot_all_reduce_(A.clone(), "sum", world()), whole.double(), 0)


def inference(rank: int, world_size: int) -> None:
    """What is made in inference mode, memory on the heap among it, must serve outside of it."""
    with torch.inference_mode():
        products(rank, world_size)
        x = symm_mem.empty(5, group=world())
        peers = symm_mem.rendezvous(x)
    products(rank, world_size)
    right = (rank + 1) % world_size
    peers.tensors[right].copy_(torch.full((5,), float(rank)))
    peers.barrier()
    assert (x == (rank - 1) % world_size).all()
    peers.barrier()
    x.add_(1)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    products(rank, world_size)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode(device: str) -> None:
    run_ranks(inference, 2, device=device, fresh=True)


def calls() -> list[tuple[str, OpCall]]:
    return [(name, call) for name, call in op_calls(world().size()).items() if "scaled" not in name]


def same_bits(got: Any, wanted: Any) -> None:
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, wanted)), strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


def autocast(rank: int, world_size: int) -> None:
    """It casts nothing, whatever the plan: float32 stays float32, and is multiplied as such."""
    device = torch.get_default_device().type
    for _, call in calls():
        given = call.tensors
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for algorithm in ("fused", "unfused"):
            with plan.forced(algorithm):
                wanted = call(*[x.clone() for x in given])
                with torch.autocast(device, torch.bfloat16):
                    same_bits(call(*[x.clone() for x in given]), wanted)
                    same_bits(compiled(*[x.clone() for x in given]), wanted)
                    assert torch.mm(given[0], given[0].t()).dtype == torch.bfloat16  # it is still on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast(world_size: int, device: str) -> None:
    run_ranks(autocast, world_size, device=device)


def of_one(call: Callable[..., Any], given: list[torch.Tensor], i: int, x: torch.Tensor) -> Any:
    return call(*given[:i], x, *given[i + 1 :])


@on_ranks(2)
def test_a_tangent_is_not_dropped(rank: int, world_size: int) -> None:
    """There is no forward mode; a result without a tangent would be taken for one that does not depend on x."""
    refused = "jvp|setup_context|torch.func|requires a gradient"
    for name, call in calls():
        given = call.tensors
        for i, x in enumerate(given):
            with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=refused):
                torch.func.jvp(partial(of_one, call, given, i), (x,), (torch.ones_like(x),))
            with forward_ad.dual_level(), pytest.raises((NotImplementedError, ValueError), match=refused):
                of_one(call, given, i, forward_ad.make_dual(x, torch.ones_like(x)))
        with forward_ad.dual_level():
            call(*[x.clone() for x in given])  # none of them has a tangent
        assert (fused_ops.one_shot_all_reduce(torch.ones(3), "sum", world()) == world_size).all(), name


def test_the_fast_path_drops_no_tangent(stage: Stage, op: matmuls.Op) -> None:
    op.call(*op.given)
    stage.launched.clear()
    with forward_ad.dual_level():
        for way in (op.call, op.through_torch):
            with pytest.raises(SLOW, match=TAKEN):
                way(*op.given)
    assert not stage.launched
    op.call(*op.given)
    assert len(stage.launched) == 1


def test_autocast_that_casts_nothing_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_said", set())
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with torch.autocast("cpu"):
        for _ in range(2):
            assert fused_ops.fused_all_gather_matmul(x, [w], 0, None)[1][0].dtype == torch.float32
        fused_ops.one_shot_all_reduce(x.bfloat16(), "sum", None)
        with pytest.raises(TypeError, match=r"Bs\[0\]: is torch.float32, must be torch.bfloat16"):
            fused_ops.fused_all_gather_matmul(x.bfloat16(), [w], 0, None)
    dist.destroy_process_group()
    told = [m for m in caplog.messages if "autocast" in m]
    assert len(told) == 1 and told[0].startswith("weft::fused_all_gather_matmul: autocast casts nothing")
