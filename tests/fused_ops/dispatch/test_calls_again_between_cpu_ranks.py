"""Calls between CPU ranks like one before: validated and chosen no more, and in few Python calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from opcommon import world
from ranks import run_row
from torch import Tensor
from torch.utils._pytree import tree_leaves
from weft import fused_ops, symm_mem
from weft.fused_ops import one_shot_all_reduce, one_shot_all_reduce_
from weft.fused_ops.dispatch import call_check, plan

SIZE = 2
E4M3 = torch.float8_e4m3fn
Call = Callable[[list[Tensor]], Any]


def fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(E4M3)


def made(op: str) -> tuple[list[Tensor], Call, int]:
    """Fresh operands of an op, the call, and how many Python calls it may take when it is repeated."""
    n, of, g = torch.randn, fused_ops, world()
    x, matrix, whole, rows = n(17, 9), n(9, 7), n(34, 9), n(17, 9)
    wide, tall = n(9, 14), n(18, 7)
    ids = torch.arange(34).view(17, 2) % 6
    handle = of.moe_dispatch(x, ids, 6, g, capacity=36)[2] if op == "moe_combine" else None
    scales = [torch.rand(()) + 0.5, torch.rand(()) + 0.5]
    into: dict[str, tuple[list[Tensor], Call, int]] = {
        "all_reduce": ([x], lambda t: of.one_shot_all_reduce(t[0], "sum", g), 48),
        "all_reduce_": ([x], lambda t: of.one_shot_all_reduce_(t[0].clone(), "max", g), 50),
        "all_gather": ([x], lambda t: of.one_shot_all_gather(t[0], 1, g), 50),
        "all_gather_out": (
            [x],
            lambda t: of.one_shot_all_gather(t[0], 0, g, out=torch.full((34, 9), torch.nan)),
            55,
        ),
        "reduce_scatter": ([whole], lambda t: of.one_shot_reduce_scatter(t[0], "avg", 0, g), 52),
        "all_to_all": ([whole], lambda t: of.one_shot_all_to_all(t[0], 0, 1, g), 58),
        "gather": ([x], lambda t: of.one_shot_gather(t[0], 1, 0, g), 58),
        "matmul_all_to_all": ([x, wide], lambda t: of.fused_matmul_all_to_all(*t, 0, g), 64),
        "all_to_all_matmul": ([whole, tall], lambda t: of.fused_all_to_all_matmul(*t, 0, g), 64),
        "moe_dispatch": (
            [x, ids],
            lambda t: of.moe_dispatch(t[0], t[1], 6, g, align=2),
            200,
        ),
        "moe_combine": (
            [n(36, 9), torch.rand(17, 2)],
            lambda t: of.moe_combine(t[0], handle, t[1], g),
            175,
        ),
        "all_gather_matmul": ([x, matrix], lambda t: of.fused_all_gather_matmul(t[0], t[1:], 0, g), 60),
        "matmul_reduce_scatter": (
            [whole, matrix, n(7), n(17, 7)],
            lambda t: of.fused_matmul_reduce_scatter(*t[:2], "sum", 0, g, bias=t[2], residual=t[3]),
            60,
        ),
        "matmul_all_reduce": ([x, matrix], lambda t: of.fused_matmul_all_reduce(*t, "sum", g), 60),
        "rms_norm": ([x, rows, n(9)], lambda t: of.fused_all_reduce_rms_norm(*t, 1e-5, g), 60),
        "layer_norm": (
            [x, rows, n(9), n(9)],
            lambda t: of.fused_all_reduce_layer_norm(*t, 1e-5, g),
            60,
        ),
        "rms_norm_quant": ([x, rows, n(9)], lambda t: of.fused_all_reduce_rms_norm_quant(*t, 1e-5, g), 62),
        "all_gather_scaled_matmul": (
            [fp8(5, 32), fp8(48, 32), *scales],
            lambda t: of.fused_all_gather_scaled_matmul(t[0], [t[1].t()], t[2], [t[3]], 0, g),
            96,
        ),
        "scaled_matmul_reduce_scatter": (
            [fp8(6, 32), fp8(48, 32), *scales],
            lambda t: of.fused_scaled_matmul_reduce_scatter(t[0], t[1].t(), *t[2:], "sum", 0, g),
            62,
        ),
    }
    return into[op]


OPS = (
    *("all_reduce", "all_reduce_", "all_gather", "all_gather_out", "reduce_scatter", "all_to_all"),
    *("gather", "matmul_all_to_all", "all_to_all_matmul"),
    *("moe_dispatch", "moe_combine"),
    *("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    *("rms_norm", "layer_norm", "rms_norm_quant"),
    *("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"),
)


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
    _, call, most = made(op)
    for _ in range(2):
        call(made(op)[0])
    with pytest.MonkeyPatch.context() as monkey:
        seen = begun(monkey)
        operands = made(op)[0]
        found = tree_leaves(call(operands))
        assert seen == [] and plan.last_plan().algorithm == "host"
        symm_mem.set_checked(True)
        try:
            expected = tree_leaves(call(operands))
        finally:
            symm_mem.set_checked(False)
        assert len(seen) == 1
    for x, y in zip(found, expected, strict=True):
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype and x.stride() == y.stride()
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
            assert (x.data_ptr() != y.data_ptr() or not x.numel()) and not x.requires_grad
    call(operands), call(operands)
    # A rank that waits makes calls that one which finds its data there does not.
    count = min(counted(lambda: call(operands)) for _ in range(30))
    assert count <= most, f"{op}: {count} Python calls, must be at most {most}"


@pytest.mark.parametrize("op", OPS)
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
