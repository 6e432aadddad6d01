"""What is sent for gradients: nothing that nobody wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opcommon import world
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft import fused_ops

GATHER, SCATTER, REDUCE = "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "one_shot_all_reduce"
PRODUCT = "fused_matmul_all_reduce"


class Sent(TorchDispatchMode):
    """Keeps which collectives are called; of gathers also whether all of A is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("weft", "_c10d_functional") and func._opname != "wait_tensor":
            wanted = " A" if func._opname == GATHER and kwargs.get("return_A", True) else ""
            self.calls.append(func._opname + wanted)
        return func(*args, **kwargs)


def sent(call: Callable[..., Tensor], shapes: list[tuple[int, ...]], wanted: list[bool]) -> list[list[str]]:
    """Forward and backward."""
    given = [torch.randn(s).requires_grad_(grad) for s, grad in zip(shapes, wanted, strict=True)]
    found = []
    with Sent() as forward:
        out = call(*given)
    found.append(forward.calls)
    with Sent() as backward:
        out.sum().backward()
    found.append(backward.calls)
    assert [x.grad is not None for x in given] == wanted
    return found


def gather(A: Tensor, B: Tensor) -> Tensor:
    return fused_ops.fused_all_gather_matmul(A, [B], 0, world(), return_A=False)[1][0]


def scatter(A: Tensor, B: Tensor, bias: Tensor) -> Tensor:
    return fused_ops.fused_matmul_reduce_scatter(A, B, "avg", 0, world(), bias=bias)


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return fused_ops.fused_all_reduce_rms_norm(x, residual, weight, 0.1, world())[0]


def product(A: Tensor, B: Tensor) -> Tensor:
    return fused_ops.fused_matmul_all_reduce(A, B, "sum", world())


@on_ranks(2)
def test_nothing_is_sent_that_nobody_wants(rank: int, world_size: int) -> None:
    matrices, rows = [(4, 3), (3, 5)], [(4, 8), (4, 8), (8,)]
    assert sent(gather, matrices, [True, True])[1] == [SCATTER]
    assert sent(gather, matrices, [True, False]) == [[GATHER], [SCATTER]]
    assert sent(gather, matrices, [False, True]) == [[f"{GATHER} A"], []]
    assert sent(scatter, [*matrices, (5,)], [True, True, True])[1] == [REDUCE, f"{GATHER} A"]
    assert sent(scatter, [*matrices, (5,)], [True, False, False])[1] == [GATHER]
    assert sent(scatter, [*matrices, (5,)], [False, True, False])[1] == ["all_gather_into_tensor"]
    assert sent(scatter, [*matrices, (5,)], [False, False, True])[1] == [REDUCE]
    assert sent(norm, rows, [True, True, True])[1] == [REDUCE]
    assert sent(norm, rows, [False, True, True])[1] == []
    assert sent(product, matrices, [True, True])[1] == [REDUCE]


@on_ranks(2)
def test_layers_whose_activations_are_whole(rank: int, world_size: int) -> None:
    """Activations are whole on every rank: one op on the way out, of gradients on the way back."""
    options: dict[str, Any] = {"group": world(), "sequence_parallel": False}
    down, up = fused_ops.RowParallelLinear(6, 8, **options), fused_ops.ColumnParallelLinear(6, 8, **options)
    for layer, forward, backward in ((down, [PRODUCT], []), (up, [], [PRODUCT])):
        shapes = [(2, 3, layer.weight.shape[1])]
        assert sent(layer, shapes, [True]) == [forward, backward]
        assert sent(layer, shapes, [False]) == [forward, []]
        assert layer.weight.grad is not None
        layer.requires_grad_(False)
        x = torch.randn(shapes[0], requires_grad=True)
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=kept: to.append(t.shape) or t, lambda t: t
        ):
            layer(x)
        assert kept == [layer.weight.shape], "of a frozen layer nothing is kept but itself"
