"""The layer functions of fp8 on CUDA without a GPU: calls of theirs that were made before are made on the fast path,
forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import NAME, SLOW, WORLD_SIZE, Kernel, Stage, run_on_cuda
from torch import Tensor
from weft.fused_ops import float8_all_gather_matmul, float8_matmul_reduce_scatter, ops
from weft.fused_ops.dispatch import plan
from weft.fused_ops.layers import float8
from weft.fused_ops.ops import all_gather_scaled_matmul, scaled_matmul_reduce_scatter
from weft.fused_ops.ops.all_gather_scaled_matmul import AllGatherScaledMatmulCall
from weft.fused_ops.ops.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatterCall

stage = fake_gpu.stage
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
M, K, N = 512, 256, 1024  # of a shard, of B


def reduced_before(stage: Stage, count: int) -> None:
    x = torch.empty(count)
    stage.remember(Kernel([]), "one_shot_all_reduce", "max", [x], [x], alignment=1)


def operands(rows: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, n = sizes
    return torch.zeros(rows, k).to(dtype), torch.zeros(n, k).to(E4M3).t()


def gathered_before(stage: Stage, sizes: tuple[int, int], dtype: torch.dtype, fast: bool) -> None:
    (a, b), one = operands(M, sizes, dtype), torch.ones(())
    given: Any = (a, [b], one, [one.clone()], 0, NAME, [None], [None], [BF16], [fast], True)
    call, rows, _ = ops.ALL_GATHER_SCALED_MATMUL.validate(AllGatherScaledMatmulCall(*given))
    run_on_cuda(all_gather_scaled_matmul, stage.where, call, rows)


def scattered_before(stage: Stage, sizes: tuple[int, int], dtype: torch.dtype, fast: bool) -> None:
    (a, b), one = operands(WORLD_SIZE * M, sizes, dtype), torch.ones(())
    given: Any = (a, b, one, one.clone(), "sum", 0, 0, NAME, None, None, None, BF16, fast)
    made = ScaledMatmulReduceScatterCall(*given)
    call, rows, _ = ops.SCALED_MATMUL_REDUCE_SCATTER.validate(made)
    run_on_cuda(scaled_matmul_reduce_scatter, stage.where, call, rows, given=made)


def gathers(x: Tensor, B: Tensor) -> Tensor:
    _, (y,) = float8_all_gather_matmul(x, [B], 0, NAME, return_A=False)
    return y


def scatters(A: Tensor, B: Tensor) -> Tensor:
    return float8_matmul_reduce_scatter(A, B, "sum", 0, NAME)


def launches(stage: Stage, fn: Any, rows: int) -> tuple[int, int]:
    """How many all-reduces and products are launched, forward and backward."""
    x, w = (torch.randn(*shape, dtype=BF16).requires_grad_() for shape in ((rows, K), (N, K)))
    stage.workspace.noted.clear(), stage.launched.clear()
    y = fn(x, w.t())
    y.backward(torch.zeros_like(y))
    assert x.grad is not None and w.grad is not None
    return stage.workspace.noted.count("one_shot_all_reduce"), len(stage.launched)


ROWS = {gathers: M, scatters: WORLD_SIZE * M}


@pytest.fixture
def casts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What casts launch."""
    launched: list[str] = []

    def function(program: Any, name: str, shared: int) -> Any:
        return SimpleNamespace(launch=lambda *_: launched.append(name))

    monkeypatch.setattr(stage.gpu, "function", function)
    monkeypatch.setattr(stage.gpu, "clear", lambda *_: launched.append("clear"))
    return launched


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("fn", ROWS)
def test_what_was_called_before(
    fn: Any, has_kernel: bool, stage: Stage, casts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as one of its calls was not made, it ends on the slow path."""
    monkeypatch.setattr(float8, "_runs_on", lambda device: has_kernel)
    forward, backward = gathered_before, scattered_before
    if fn is scatters:
        forward, backward = backward, forward
    with plan.forced("fused"):
        for prepare in (
            lambda: reduced_before(stage, 2),
            lambda: forward(stage, (K, N), E4M3, fast=True),
            lambda: reduced_before(stage, 1),
            lambda: backward(stage, (N, K), E5M2, fast=False),
        ):
            with pytest.raises(SLOW):
                launches(stage, fn, ROWS[fn])
            prepare()
        casts.clear()
        assert launches(stage, fn, ROWS[fn]) == (2, 2)
        assert casts == 2 * has_kernel * ["clear", "largest", "cast"]
