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
from opcommon import DEVICES, check, gather, world
from ranks import on_ranks, run_ranks
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_all_reduce_layer_norm,
    fused_all_reduce_rms_norm,
    fused_all_reduce_rms_norm_quant,
    fused_all_to_all_matmul,
    fused_grouped_matmul_all_reduce,
    fused_grouped_matmul_reduce_scatter,
    fused_matmul_all_reduce,
    fused_matmul_all_to_all,
    fused_matmul_reduce_scatter,
    fused_moe_combine_all_reduce,
    fused_moe_combine_all_reduce_rms_norm,
    fused_moe_combine_reduce_scatter,
    moe_combine,
    moe_dispatch,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_,
    one_shot_all_to_all,
    one_shot_gather,
    one_shot_reduce_scatter,
)
from weft.fused_ops.dispatch import plan
from weft.fused_ops.library import registration

stage, op = matmuls.stage, matmuls.op


def products(rank: int, world_size: int) -> None:
    """Every op once, with or without gradients."""
    grad = not torch.is_inference_mode_enabled()
    A, B = torch.randn(3 * world_size, 5), torch.randn(5, 7)
    parts = [a @ b for a, b in zip(gather(A), gather(B), strict=True)]
    weight = B.clone().requires_grad_(grad)
    _, (gathered,) = fused_all_gather_matmul(A, [weight], 0, world())
    check("all_gather_matmul", gathered, torch.cat(gather(A)) @ B.double(), 1e-6)
    scattered = fused_matmul_reduce_scatter(A, weight, "sum", 0, world())
    check("matmul_reduce_scatter", scattered, sum(parts).chunk(world_size)[rank], 1e-6, parts)
    reduced = fused_matmul_all_reduce(A, weight, "sum", world())
    check("matmul_all_reduce", reduced, sum(parts), 1e-6, parts)
    whole = one_shot_all_reduce(A, "sum", world())
    check("all_reduce", whole, sum(gather(A)), 1e-6)
    side_by_side = one_shot_all_gather(A, 1, world())
    check("all_gather", side_by_side, torch.cat(gather(A), 1), 0)
    part = one_shot_reduce_scatter(A, "sum", 0, world(), out=A.new_empty(3, 5))
    check("reduce_scatter", part, sum(gather(A)).chunk(world_size)[rank], 1e-6)
    exchanged = one_shot_all_to_all(A, 0, 1, world())
    check("all_to_all", exchanged, torch.cat([x.chunk(world_size)[rank] for x in gather(A)], 1), 0)
    to_first = one_shot_gather(A, 0, 0, world())
    whole_A = torch.cat(gather(A))
    check("gather", to_first, whole_A if rank == 0 else whole_A[:0], 0)
    wide = torch.cat([B, B], 1)
    heads = fused_matmul_all_to_all(A, wide, 0, world())
    products = [a @ b for a, b in zip(gather(A), gather(wide), strict=True)]
    check("matmul_all_to_all", heads, torch.cat([p.chunk(world_size, 1)[rank] for p in products]), 1e-6)
    tall = torch.cat([B] * world_size)
    multiplied = fused_all_to_all_matmul(A, tall, 0, world())
    check("all_to_all_matmul", multiplied, exchanged.double() @ tall.double(), 1e-6)
    _, sums = fused_all_reduce_rms_norm(A, A, A[0], 1e-5, world())
    check("all_reduce_rms_norm", sums, sum(gather(A)) + A.double(), 1e-6)
    *_, sums = fused_all_reduce_rms_norm_quant(A, A, A[0], 1e-5, world())
    check("all_reduce_rms_norm_quant", sums, sum(gather(A)) + A.double(), 1e-6)
    _, sums = fused_all_reduce_layer_norm(A, A, A[0], None, 1e-5, world())
    check("all_reduce_layer_norm", sums, sum(gather(A)) + A.double(), 1e-6)
    if grad:
        (gathered.sum() + scattered.sum() + reduced.sum()).backward()
        assert weight.grad is not None and weight.grad.isfinite().all()
    check("in place", one_shot_all_reduce_(A.clone(), "sum", world()), whole.double(), 0)


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


def calls() -> list[tuple[Callable[..., Any], list[torch.Tensor]]]:
    A, B, x = torch.randn(4, 6), torch.randn(6, 8), torch.randn(5, 7)
    ends, once = (
        torch.tensor([1, 4], dtype=torch.int32),
        torch.tensor([[2], [0], [-1], [3]], dtype=torch.int32),
    )
    slots, weights = torch.tensor([[2, 0], [1, -1], [3, 3], [-1, 2]], dtype=torch.int32), torch.rand(4, 2)
    return [
        (lambda a, b: fused_all_gather_matmul(a, [b], 0, world()), [A, B]),
        (lambda a, b, c: fused_matmul_reduce_scatter(a, b, "sum", 0, world(), bias=c), [A, B, B[0]]),
        (lambda a: one_shot_all_reduce(a, "sum", world()), [x]),
        (lambda a: one_shot_all_reduce(a, "max", world()), [x]),
        (lambda a: one_shot_all_reduce_(a, "sum", world()), [x]),
        (lambda a: one_shot_all_gather(a, 1, world()), [x]),
        (lambda a, b: one_shot_all_gather(a, 0, world(), out=b), [x, x.repeat(world().size(), 1)]),
        (lambda a: one_shot_reduce_scatter(a, "sum", 0, world()), [A]),
        (lambda a: one_shot_all_to_all(a, 1, 0, world()), [A]),
        (lambda a: one_shot_gather(a, 1, 0, world()), [A]),
        (lambda a, b: fused_matmul_all_to_all(a, b, 0, world()), [A, B]),
        (lambda a, b: fused_all_to_all_matmul(a, b, 0, world()), [A, torch.cat([B] * world().size())]),
        (lambda a, b: one_shot_reduce_scatter(a, "min", 0, world(), out=b), [A, A.chunk(world().size())[0]]),
        (lambda a, b, c: fused_all_reduce_rms_norm(a, b, c, 1e-5, world()), [x, x, x[0]]),
        (lambda a, b, c: fused_all_reduce_rms_norm_quant(a, b, c, 1e-5, world()), [x, x, x[0]]),
        (lambda a, b, c: fused_all_reduce_layer_norm(a, b, c, c, 1e-5, world()), [x, x, x[0]]),
        (lambda a, b: fused_matmul_all_reduce(a, b, "avg", world()), [A, B]),
        (lambda a, b: fused_moe_combine_all_reduce(a, slots, b, world(), shared=a), [A, weights]),
        (lambda a, b: fused_moe_combine_reduce_scatter(a, slots, b, 0, world()), [A, weights]),
        (sent_to_experts, [A, weights]),
        (
            lambda a, b, c: fused_grouped_matmul_all_reduce(a, b, ends, once, c, "sum", world()),
            [torch.randn(4, 8), torch.randn(2, 8, 16), weights[:, :1]],
        ),
        (
            lambda a, b, c: fused_grouped_matmul_reduce_scatter(a, b, ends, once, c, "avg", 0, world()),
            [torch.randn(4, 8), torch.randn(2, 8, 16), weights[:, :1]],
        ),
        (
            lambda a, b, c: fused_moe_combine_all_reduce_rms_norm(a, slots, b, a, c, 1e-5, world()),
            [A, weights, A[0]],
        ),
    ]


def sent_to_experts(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Rows of experts of all ranks, and their sums, where they came from."""
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [4, 0]])[: x.shape[0]]
    rows, offs, handle = moe_dispatch(x, ids, 4, world(), align=2)
    return [offs, *handle, moe_combine(rows, handle, weights, world())]


def same_bits(got: Any, wanted: Any) -> None:
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, wanted)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def autocast(rank: int, world_size: int) -> None:
    """It casts nothing, whatever the plan: float32 stays float32, and is multiplied as such."""
    device = torch.get_default_device().type
    for call, given in calls():
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
    for number, (call, given) in enumerate(calls()):
        for i, x in enumerate(given):
            with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=refused):
                torch.func.jvp(partial(of_one, call, given, i), (x,), (torch.ones_like(x),))
            with forward_ad.dual_level(), pytest.raises((NotImplementedError, ValueError), match=refused):
                of_one(call, given, i, forward_ad.make_dual(x, torch.ones_like(x)))
        with forward_ad.dual_level():
            call(*[x.clone() for x in given])  # none of them has a tangent
        assert (one_shot_all_reduce(torch.ones(3), "sum", world()) == world_size).all(), number


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
            assert fused_all_gather_matmul(x, [w], 0, None)[1][0].dtype == torch.float32
        one_shot_all_reduce(x.bfloat16(), "sum", None)
        with pytest.raises(TypeError, match=r"Bs\[0\]: is torch.float32, must be torch.bfloat16"):
            fused_all_gather_matmul(x.bfloat16(), [w], 0, None)
    dist.destroy_process_group()
    told = [m for m in caplog.messages if "autocast" in m]
    assert len(told) == 1 and told[0].startswith("weft::fused_all_gather_matmul: autocast casts nothing")
