"""The ops in torch's modes: inference mode, autocast, forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
from fake_gpu import SLOW, TAKEN, Stage
from op_table import OpCall, op_calls
from opcommon import DEVICES, world
from ranks import on_ranks, run_ranks
from references import held, held_gradients, results_of
from test_tiny import OF_LOSSES, OPS, drawn
from torch.autograd import forward_ad
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch import plan
from weft.fused_ops.library import registration

stage, op = matmuls.stage, matmuls.op


def every_op(rank: int, world_size: int) -> None:
    """Each once, with or without gradients."""
    for name in (name for name in OPS if "scaled" not in name):
        function, arguments = OPS[name].function, drawn(name, torch.float32)
        held(function, **arguments)
        if OPS[name].has_gradient and name not in OF_LOSSES and not torch.is_inference_mode_enabled():
            for x in results_of(arguments):
                x.requires_grad_()
            held_gradients(function, **arguments)


def inference(rank: int, world_size: int) -> None:
    """What is made in inference mode, memory on the heap among it, must serve outside of it."""
    with torch.inference_mode():
        every_op(rank, world_size)
        x = symm_mem.empty(5, group=world())
        peers = symm_mem.rendezvous(x)
    every_op(rank, world_size)
    right = (rank + 1) % world_size
    peers.tensors[right].copy_(torch.full((5,), float(rank)))
    peers.barrier()
    assert (x == (rank - 1) % world_size).all()
    peers.barrier()
    x.add_(1)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    every_op(rank, world_size)


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
        ways = (call, compiled) if world_size > 1 else (call,)
        for algorithm in ("fused", "unfused"):
            with plan.forced(algorithm):
                wanted = call(*[x.clone() for x in given])
                with torch.autocast(device, torch.bfloat16):
                    for way in ways:
                        same_bits(way(*[x.clone() for x in given]), wanted)
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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, two: str
) -> None:
    monkeypatch.setattr(registration, "_said", set())
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with torch.autocast("cpu"):
        for _ in range(2):
            assert fused_ops.fused_all_gather_matmul(x, [w], 0, None)[1][0].dtype == torch.float32
        fused_ops.one_shot_all_reduce(x.bfloat16(), "sum", None)
        with pytest.raises(TypeError, match=r"Bs\[0\]: is torch.float32, must be torch.bfloat16"):
            fused_ops.fused_all_gather_matmul(x.bfloat16(), [w], 0, None)
    told = [m for m in caplog.messages if "autocast" in m]
    assert len(told) == 1 and told[0].startswith("weft::fused_all_gather_matmul: autocast casts nothing")
