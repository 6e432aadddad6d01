"""fused_all_gather_matmul on CUDA, without a GPU: which memory the kernels are given of the op's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from algorithms import ALGORITHMS
from fake_gpu import NAME, WORLD_SIZE, Stage, run_on_cuda
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.ops import all_gather_matmul
from weft.fused_ops.ops.all_gather_matmul import AllGatherMatmulCall
from weft.kernels.all_gather_matmul import OP, on_cuda
from weft.kernels.all_gather_matmul.configs import GatherKernelCall
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.symm_mem.call_cache import CachedDict

stage = fake_gpu.stage


class Kernels:
    """In place of those that launch: they note what they are made for, and the operands."""

    operands: list[int]

    def __init__(self, split_k: bool, a: torch.Tensor) -> None:
        self.sizes = [split_k, a.shape, a.stride()]

    def launch(
        self, buffer: int, operands: list[int], results: list[int], timeout_ns: int, stream: int
    ) -> None:
        Kernels.operands = operands


class OneShot(Kernels):
    """The same in one shot."""

    def call(self, tensors: Any, results: Any, timeout_ns: int, stream: int) -> None:
        self.launch(0, [x.data_ptr() for x in tensors], results, timeout_ns, stream)


def noted(workspace: Any, call: GatherKernelCall, config: Any) -> Kernels:
    if isinstance(config, OneShotConfig):
        return OneShot(call.split_k, call.a)
    return Kernels(call.split_k, call.a)


@pytest.fixture
def where(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A heap whose workspace is empty."""
    prepared = stage.workspace.prepared = CachedDict()  # type: ignore[assignment]
    stage.workspace.heap = SimpleNamespace(prepare=lambda op, same, step: step())
    monkeypatch.setattr(on_cuda, "GATHER_STEPS", on_cuda.GATHER_STEPS._replace(make=noted))
    return SimpleNamespace(**vars(stage.where), prepared=prepared)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def kernels(where: SimpleNamespace) -> Kernels:
    (made,) = (x for x in where.prepared.values() if isinstance(x, Kernels))
    return made


def remembered(where: SimpleNamespace) -> int:
    return sum(isinstance(key, tuple) and key[0] == OP for key in where.prepared)


CASES = {  # the shard, the dimension, the rows' stride as the kernels see it; 0 where they are given a copy
    "rows": (numbers(6, 24), 0, 24),
    "columns of a wider matrix": (numbers(6, 72)[:, 40:64], 0, 72),
    "columns that begin between two vectors": (numbers(6, 72)[:, 1:25], 0, 0),
    "inner dimension that lies in front": (numbers(3, 5, 24).transpose(0, 1), 1, 24),
    "inner dimension": (numbers(3, 5, 24), 1, 0),
    "last dimension": (numbers(3, 5, 24), 2, 24),
    "last dimension, columns": (numbers(3, 5, 48)[..., 16:40], 2, 48),
    "last dimension, rows at two distances": (numbers(3, 6, 24)[:, ::4], 2, 0),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows_at_one_distance_are_not_copied(
    name: str, return_A: bool, algorithm: str, where: SimpleNamespace
) -> None:
    shard, dim, stride = CASES[name]
    last = dim == shard.dim() - 1
    bs = [numbers(WORLD_SIZE * 24 if last else 24, n) for n in (16, 40)]
    with forced(algorithm):
        done = run_on_cuda(all_gather_matmul, where, AllGatherMatmulCall(shard, bs, dim, NAME, return_A))
    assert not isinstance(done, str)
    A, outs = done
    assert isinstance(kernels(where), OneShot) is (algorithm == "one_shot" and not return_A)
    rows = shard if last else shard.movedim(dim, 0)
    assert kernels(where).sizes == [last, (shard.numel() // 24, 24), (stride or 24, 1)]
    assert Kernels.operands[1:] == [b.data_ptr() for b in bs]
    assert (Kernels.operands[0] == rows.data_ptr()) is bool(stride)
    assert remembered(where) == bool(stride), "what is copied takes the slow path again"
    for out, columns in zip(
        [*outs, A] if A is not None else outs, (16, 40, 48 if last else 24), strict=False
    ):
        shape = [*shard.shape[:-1], columns]
        if not last:
            shape[dim] *= WORLD_SIZE
        assert list(out.shape) == shape
        assert (out if last else out.movedim(dim, 0)).is_contiguous()
    assert (A is None) is not return_A
