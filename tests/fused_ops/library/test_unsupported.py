"""What is said of what the ops do not support, and of arguments that are easily taken for each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_table import OpCall, op_calls
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves
from weft.fused_ops import (
    ColumnParallelLinear,
    RowParallelLinear,
    fused_all_gather_matmul,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)
from weft.fused_ops.dispatch import plan

NAME = "0"
B = torch.ones(6, 8)
HANDLE = [torch.full(size, n, dtype=torch.int32) for size, n in (((4, 2), -1), ((4,), -1), ((4,), 0))]
DTENSOR = r"is given a DTensor, must be given what this rank holds of it: its to_local\(\)"
TRANSFORM = "has no derivative inside of torch.func's transforms; use backward or torch.autograd.grad"
VMAP = r"has no rule for vmap \(nor for is_grads_batched\); call it once"


# Their functions give these ops other arguments: the op, its first tensor, and whether it has a gradient.
OF_OWN_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, bool]] = {
    "fused_linear_cross_entropy": (
        lambda a: torch.ops.weft.fused_linear_cross_entropy(a, B[:5], None, torch.zeros(4).long(), NAME)[0],
        torch.ones(4, 8),
        True,
    ),
    "moe_combine": (
        lambda a: torch.ops.weft.moe_combine(a, *HANDLE, torch.ones(2, 2), NAME)[0],
        torch.ones(4, 6),
        True,
    ),
}


def call_of_the_first(call: OpCall, op: Any) -> Callable[[Tensor], Tensor]:
    """Of an op of torch.ops.weft, from its first tensor to its first result."""

    def of(first: Tensor) -> Tensor:
        named = {**call.put(first, *call.tensors[1:]), "group_name": NAME}
        del named["group"]
        return next(x for x in tree_leaves(op(**named)) if x is not None and x.is_floating_point())

    return of


@on_ranks(2)
def test_transforms_and_dtensors_are_refused_by_name(rank: int, world_size: int) -> None:
    mesh, cases = init_device_mesh("cpu", (world_size,)), dict(OF_OWN_FUNCTIONS)
    for call in op_calls(world_size).values():
        if (found := call.of_torch(NAME)) is not None:
            name = found[0]._schema.name.removeprefix("weft::")
            cases[name] = call_of_the_first(call, found[0]), call.tensors[0], call.has_gradient
    assert len(cases) > 20, cases
    for name, (op, A, has_gradient) in cases.items():
        for grad in (False, True)[: 1 + has_gradient]:
            sharded = DTensor.from_local(A.clone().requires_grad_(grad), mesh, [Shard(0)])
            with pytest.raises(TypeError, match=f"^{name}: {DTENSOR}"):
                op(sharded)
        sharded = sharded.detach()
        with torch.inference_mode(), pytest.raises(TypeError, match=f"^{name}: {DTENSOR}"):
            op(sharded)
        for dim in (0, 1):
            with pytest.raises(NotImplementedError, match=f"^{name}: {VMAP}"):
                torch.vmap(op, in_dims=dim)(torch.stack([A] * 3, dim))
        with pytest.raises(NotImplementedError, match=f"^{name}: {TRANSFORM}"):
            torch.func.grad(lambda a, op=op: op(a).sum())(A)
        with pytest.raises(NotImplementedError, match=f"^{name}: {TRANSFORM}"):
            torch.func.jvp(op, (A,), (A,))
        if has_gradient:
            given = A.clone().requires_grad_()
            y = op(given)
            with pytest.raises(NotImplementedError, match=VMAP):
                torch.autograd.grad(y, given, torch.ones(2, *y.shape), is_grads_batched=True)
            # Nothing is left behind: the same once more, one by one.
            assert torch.autograd.grad(op(given), given, torch.ones(y.shape))[0].shape == A.shape
            # A transform that differentiates something else lets it pass.
            assert torch.func.grad(lambda s, op=op, A=A: s * op(A).sum().item())(torch.tensor(2.0)).isfinite()


def batched(call: Callable[..., Tensor], tensors: list[Tensor], at: int) -> bool:
    """Whether the gradients of one tensor, of a batch, are taken; they are those of its elements, or refused."""
    given = [x.detach().clone().requires_grad_(i == at) for i, x in enumerate(tensors)]
    y = call(*given)
    grads = torch.randn(3, *y.shape, dtype=y.dtype)
    want = [torch.autograd.grad(y, given[at], grad, retain_graph=True)[0] for grad in grads]
    try:
        (got,) = torch.autograd.grad(y, given[at], grads, is_grads_batched=True)
    except NotImplementedError as e:
        if re.search(VMAP, str(e)) is None:
            raise
        return False
    torch.testing.assert_close(got, torch.stack(want))
    return True


@on_ranks([2, 3])
def test_gradients_of_a_batch_are_right_or_refused(rank: int, world_size: int) -> None:
    """torch's own loop over a batch does not wait for functional collectives, and gives whatever memory holds."""
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        name: (call.first, call.tensors) for name, call in op_calls(world_size).items() if call.has_gradient
    }
    x, wide = torch.randn(2, 3, 8), torch.randn(2, 3, 4 * world_size)
    for kind, given, *of_kind in (
        (ColumnParallelLinear, x, 8, 4 * world_size, {"gather_output": True}),
        (ColumnParallelLinear, x, 8, 4 * world_size, {"sequence_parallel": True}),
        (RowParallelLinear, wide, 4 * world_size, 8, {"input_is_parallel": False}),
    ):
        layer = kind(*of_kind[:2], group=None, **of_kind[2])
        calls[f"{kind.__name__} {of_kind[2]}"] = layer, [given]
        for name in ("weight", "bias"):
            calls[f"{kind.__name__} {of_kind[2]} {name}"] = (
                lambda p, layer=layer, name=name, given=given: torch.func.functional_call(
                    layer, {name: p}, (given,)
                ),
                [layer.get_parameter(name)],
            )
        with pytest.raises(NotImplementedError, match=f"^{kind.__name__}: {TRANSFORM}"):
            torch.vmap(layer)(torch.stack([given] * 2))
    gathers = lambda t: fused_all_gather_matmul(t, [B.t()], 0, None)[0]  # noqa: E731
    calls["fused_all_gather_matmul A"] = gathers, [torch.randn(2, 8)]
    found = {
        (name, i): batched(call, given, i) for name, (call, given) in calls.items() for i in range(len(given))
    }
    assert len(found) > 60 and not all(found.values())
    right = [name for name, of in found.items() if of]
    assert {("fused_all_gather_matmul", 1), ("fused_matmul_reduce_scatter", 3)} < {*right}, right


@on_ranks(2)
def test_reductions_may_be_torchs(rank: int, world_size: int) -> None:
    op, mine = dist.ReduceOp, torch.full((4, 6), rank + 1.0)
    want = {op.SUM: 3.0, op.AVG: 1.5, op.MAX: 2.0, op.MIN: 1.0}
    for kind, value in want.items():
        for given in (kind, dist.ReduceOp(kind)):
            assert one_shot_all_reduce(mine, given, None).eq(value).all()
            assert one_shot_all_reduce_(mine.clone(), given, None).eq(value).all()
    assert fused_matmul_all_reduce(mine, B, op.AVG, None).eq(9).all()
    assert fused_matmul_reduce_scatter(mine, B, op.SUM, 0, None).eq(18).all()
    compiled = torch.compile(
        lambda x: one_shot_all_reduce(x * 2, dist.ReduceOp.AVG, NAME), backend="aot_eager", fullgraph=True
    )
    assert compiled(mine).eq(3).all()
    for call in (fused_matmul_all_reduce, lambda *a: fused_matmul_reduce_scatter(*a[:3], 0, None)):
        with pytest.raises(ValueError, match=r"^reduce_op: is ReduceOp.MAX, must be 'sum' or 'avg'"):
            call(mine, B, op.MAX, None)
    for other, said in ((op.PRODUCT, "PRODUCT"), (dist._make_nccl_premul_sum(2.0), "PREMUL_SUM")):
        with pytest.raises(ValueError, match=rf"^reduce_op: is ReduceOp.{said}, must be one of 'sum', "):
            one_shot_all_reduce(mine, other, None)


@on_ranks(2, fresh=True)
def test_what_was_meant_is_named(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"^group: no process group is named 'tp', only '0'") as error:
        one_shot_all_reduce(torch.ones(3), "sum", "tp")
    assert f"{mesh['tp'].get_group().group_name!r} (" in str(error.value)
    assert str(error.value).endswith("a dimension of a DeviceMesh is (mesh, 'tp')")
    A, weight = torch.ones(4, 6), torch.ones(8, 6)
    for name, call in {
        "B": lambda: fused_matmul_all_reduce(A, weight, "sum", None),
        r"Bs\[1\]": lambda: fused_all_gather_matmul(A, [B, weight], 0, None),
    }.items():
        said = r"has 8 rows, must have 6, .*; its shape is \(8, 6\): of nn.Linear, .* pass weight.t\(\)$"
        with pytest.raises(ValueError, match=f"^{name}: {said}"):
            call()
    with pytest.raises(ValueError, match=r"has columns$"):
        fused_matmul_all_reduce(A, torch.ones(8, 7), "sum", None)


def test_calls_that_run_unfused_are_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, two: str
) -> None:
    monkeypatch.setattr(plan, "_logged_reasons", set())
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    why = {
        g.group_name: f"no heap for group {g.group_name!r}: its backend 'fake' has no processes"
        for g in groups
    }
    with caplog.at_level(logging.WARNING, "weft.ops"):
        for group in (*groups, *groups):
            for op in ("an_op", "another_op"):
                reason = plan.heap_or_reason(op, "all_reduce", torch.device("cpu"), group, empty=False)
                assert reason == why[group.group_name]
    assert [record.getMessage() for record in caplog.records] == [
        f"an_op and other ops of group {name!r} run unfused: {reason}" for name, reason in why.items()
    ]
