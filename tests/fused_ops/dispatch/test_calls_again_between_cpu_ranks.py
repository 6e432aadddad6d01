"""Calls between CPU ranks like one before: validated and chosen no more, and in few Python calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from op_table import OpCall, op_calls
from opcommon import world
from ranks import run_row
from torch import Tensor
from torch.utils._pytree import tree_leaves
from weft import fused_ops, symm_mem
from weft.fused_ops import one_shot_all_reduce, one_shot_all_reduce_
from weft.fused_ops.dispatch import call_check, plan

SIZE = 2
# How many Python calls each may take when it is repeated.
MOST = {
    "one_shot_all_reduce": 48,
    "one_shot_all_reduce_": 50,
    "one_shot_all_gather": 50,
    "one_shot_all_gather out": 55,
    "one_shot_reduce_scatter": 52,
    "one_shot_all_to_all": 58,
    "one_shot_gather": 58,
    "fused_matmul_all_gather": 64,
    "fused_matmul_all_to_all": 64,
    "fused_all_to_all_matmul": 64,
    "moe_dispatch": 200,
    "moe_combine": 175,
    "fused_all_gather_scaled_matmul": 96,
    "fused_all_reduce_rms_norm_quant": 62,
    "fused_scaled_matmul_reduce_scatter": 62,
    **dict.fromkeys(
        ("fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fused_matmul_all_reduce"), 60
    ),
    **dict.fromkeys(("fused_all_reduce_rms_norm", "fused_all_reduce_layer_norm"), 60),
}


def counted(call: Callable[[], Any]) -> int:
    """Python calls of this thread, without those of a wait for a rank that is late."""
    count = 0

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name != "_wait":
            caller = caller.f_back
        count += event == "call" and caller is None

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def begun(monkey: pytest.MonkeyPatch) -> list[str]:
    """The calls that are validated and chosen from here on."""
    seen: list[str] = []
    real = call_check.OpCall.__new__

    def noted(cls: Any, op: str, *args: Any, **named: Any) -> Any:
        seen.append(op)
        return real(cls, op, *args, **named)

    monkey.setattr(call_check.OpCall, "__new__", noted)
    return seen


def again(rank: int, world_size: int, op: str) -> None:
    """Of new numbers the same bits as on the slow path, which the checked mode takes."""
    torch.manual_seed(100 + rank)

    def made(call: OpCall) -> Any:
        return call(*[x.clone() for x in call.tensors])

    for _ in range(2):
        made(op_calls(world_size, world())[op])
    with pytest.MonkeyPatch.context() as monkey:
        seen = begun(monkey)
        call = op_calls(world_size, world())[op]
        found = tree_leaves(made(call))
        assert seen == [] and plan.last_plan().algorithm == "host"
        symm_mem.set_checked(True)
        try:
            expected = tree_leaves(made(call))
        finally:
            symm_mem.set_checked(False)
        assert len(seen) == 1
    for x, y in zip(found, expected, strict=True):
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype and x.stride() == y.stride()
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
            assert (x.data_ptr() != y.data_ptr() or not x.numel()) and not x.requires_grad
    made(call), made(call)
    # A rank that waits makes calls that one which finds its data there does not.
    count = min(counted(lambda: call.function(**call.arguments)) for _ in range(30))
    assert count <= MOST[op], f"{op}: {count} Python calls, must be at most {MOST[op]}"


@pytest.mark.parametrize("op", MOST)
def test_a_repeated_call_is_not_validated_again(op: str) -> None:
    run_row(again, SIZE, op)


def other_calls(rank: int, world_size: int) -> None:
    """What differs is validated and chosen as a first call."""
    x, group = torch.full((5, 3), float(rank + 1)), world()

    def total(x: Tensor) -> float:
        return float(one_shot_all_reduce(x, "sum", group).flatten()[0])

    for _ in range(3):
        assert total(x) == 3
    with pytest.MonkeyPatch.context() as monkey:
        seen = begun(monkey)

        def validated(call: Callable[[], Any]) -> bool:
            seen.clear()
            call()
            return bool(seen)

        assert not validated(lambda: total(x))
        assert validated(lambda: total(x.double().float()[:, :2])), "sizes"
        assert validated(lambda: total(x.bfloat16())), "dtype"
        assert validated(lambda: total(x.t().contiguous().t())), "strides"
        assert validated(lambda: one_shot_all_reduce(x, "max", group)), "operation"
        with torch.autocast("cpu", torch.bfloat16):  # which casts nothing
            y, B = torch.randn(4, 3), torch.randn(3, 5)
            for _ in range(3):
                _, (z,) = fused_ops.fused_all_gather_matmul(y, [B], 0, group, return_A=False)
                assert z.dtype == y.dtype
        with plan.forced("unfused"):
            assert total(x) == 3 and plan.last_plan().algorithm == "unfused"
        assert not validated(lambda: total(x)), "as before"
        wanted = x.clone().requires_grad_()
        y = one_shot_all_reduce(wanted, "sum", group)
        y.sum().backward()
        assert wanted.grad is not None and float(wanted.grad[0, 0]) == world_size
        one_shot_all_reduce_(x.clone(), "sum", group)
        one_shot_all_reduce_(x.clone(), "sum", group)
        with torch.inference_mode():
            kept = x.clone()
        with pytest.raises(ValueError, match="inference"):
            one_shot_all_reduce_(kept, "sum", group)
        symm_mem.reset(group)
        assert validated(lambda: total(x)), "after a reset ranks compare their first calls"
        assert not validated(lambda: total(x))


def test_another_call_is_validated() -> None:
    run_row(other_calls, SIZE)


def tensors_twice(rank: int, world_size: int) -> None:
    """A call of which two tensors are one says nothing of the next one, of which they are two."""
    rows, weight, bias = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    for _ in range(3):
        fused_ops.fused_all_reduce_layer_norm(rows, None, weight, weight, 1e-5, world())
    found, _ = fused_ops.fused_all_reduce_layer_norm(rows, None, weight, bias, 1e-5, world())
    sums = one_shot_all_reduce(rows, "sum", world())
    exact = torch.nn.functional.layer_norm(sums.double(), (6,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_one_tensor_as_two_operands() -> None:
    run_row(tensors_twice, SIZE)
