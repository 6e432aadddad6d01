"""The tuner with real kernels and times: right results whatever is taken, nothing measured twice, graphs left alone."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from opcommon import world
from ranks import run_ranks
from test_matmuls_on_gpus import gathered, whole
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.device.tuning import benchmark, tuner
from weft.kernels.device.tuning.tuned_file import TunedFile
from weft.symm_mem.heap.registry import get_heap

pytestmark = pytest.mark.gpu

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(m: int, k: int, n: int) -> Operands:
    """Of both products: their results are exact in any order."""
    dtype = torch.bfloat16
    return whole(m, k, dtype=dtype), whole(n, k, dtype=dtype).t(), whole(world().size() * m, k, dtype=dtype)


def products(given: Operands) -> tuple[list[torch.Tensor], list[str]]:
    """The results of both, and how their configurations were come by."""
    shard, B, wide = given
    with forced("fused"):
        _, (up,) = fused_ops.fused_all_gather_matmul(shard, [B], 0, world(), return_A=False)
        how = [fused_ops.last_plan().chosen]
        down = fused_ops.fused_matmul_reduce_scatter(wide, B, "sum", 0, world())
        return [up, down], [*how, fused_ops.last_plan().chosen]


def right(got: list[torch.Tensor], given: Operands) -> bool:
    shard, B, wide = given
    parts = [
        a.chunk(world().size())[world().rank()].float() @ b.float()
        for a, b in zip(gathered(wide), gathered(B.t()).mT, strict=True)
    ]
    up = gathered(shard).flatten(0, 1).float() @ B.float()
    return torch.equal(got[0], up.bfloat16()) and torch.equal(got[1], sum(parts).bfloat16())


def tuned(rank: int, world_size: int) -> None:
    first, other = operands(257, 1000, 520), operands(1024, 512, 768)
    for given in (first, first, other):
        got, how = products(given)
        assert how == ["tuned"] * 2 and right(got, given)
    where = get_heap(world(), "cuda")
    file = TunedFile(torch.cuda.get_device_name(), world_size)
    assert len(file.read()) == 4

    symm_mem.reset()
    where.tuner = None  # as in the next process
    unknown = operands(100, 72, 40)
    with mock.patch.object(benchmark, "median_us", side_effect=AssertionError("nothing is measured")):
        got, how = products(first)
        assert how == ["tuned"] * 2 and right(got, first)
        for given, expected in ((other, "tuned"), (unknown, tuner.FROM_MODEL)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got, how = products(given)
            assert how == [expected] * 2
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert right(got, given)
    got, how = products(unknown)
    assert how == ["tuned"] * 2 and right(got, unknown)
    symm_mem.check()


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_matmuls(world_size: int, tmp_path: Path) -> None:
    env = {"WEFT_TUNE": "1", "WEFT_CACHE_DIR": str(tmp_path)}
    run_ranks(tuned, world_size, device="cuda", env=env, fresh=True)


def scaled_products(
    given: Operands, scales: tuple[torch.Tensor, ...]
) -> tuple[list[torch.Tensor], list[str]]:
    """As ``products``, of fp8 operands: what is gathered with scales of its rows, the other one tensor-wise."""
    fp8 = torch.float8_e4m3fn
    shard, B, wide = given[0].to(fp8), given[1].t().to(fp8).t(), given[2].to(fp8)
    of_rows, of_columns, one = scales
    with forced("fused"):
        _, (up,) = fused_ops.fused_all_gather_scaled_matmul(
            shard, [B], of_rows, [of_columns], 0, world(), return_A=False
        )
        how = [fused_ops.last_plan().chosen]
        down = fused_ops.fused_scaled_matmul_reduce_scatter(wide, B, one, one, "sum", 0, world())
        return [up, down], [*how, fused_ops.last_plan().chosen]


def tuned_scaled(rank: int, world_size: int) -> None:
    for given in (operands(256, 1008, 528), operands(1024, 512, 768)):
        (m, _), n = given[0].shape, given[1].shape[1]
        of_rows = torch.randint(1, 3, (m, 1)).float()
        scales = of_rows, torch.full((1, n), 2.0), torch.ones(())
        for _ in range(2):
            (up, down), how = scaled_products(given, scales)
            assert how == ["tuned"] * 2
            assert right([(up.float() / (2 * gathered(of_rows).flatten(0, 1))).bfloat16(), down], given)
    assert len(TunedFile(torch.cuda.get_device_name(), world_size).read()) == 4
    with mock.patch.object(benchmark, "median_us", side_effect=AssertionError("nothing is measured")):
        symm_mem.reset()
        get_heap(world(), "cuda").tuner = None  # as in the next process
        _, how = scaled_products(given, scales)
        assert how == ["tuned"] * 2


def test_scaled_matmuls(tmp_path: Path) -> None:
    env = {"WEFT_TUNE": "1", "WEFT_CACHE_DIR": str(tmp_path)}
    run_ranks(tuned_scaled, 2, device="cuda", env=env, fresh=True)
