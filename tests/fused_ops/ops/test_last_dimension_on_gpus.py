"""fused_all_gather_matmul of the last dimension on CUDA, and shards that are no block of memory: right to the last bit.

Where operands are small whole numbers every rounding on the way is exact, in any order.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from algorithms import ALGORITHMS, choose_anew, needs_gemm
from opcommon import BOUND, check, gather, gathered, matrix, poison, same_on_all, whole, world
from ranks import on_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, last_plan
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.all_gather_matmul import configs
from weft.kernels.all_gather_matmul.configs import AllGatherMatmulProblem, GatherPushConfig
from weft.kernels.device.gemm.gemm_tiles import TILES, WIDEST, Tile

pytestmark = [pytest.mark.gpu, needs_gemm]

SHAPES = [  # m, K of a shard, N of each B
    (1, 8, [8]),
    (101, 72, [40]),
    (257, 1000, [520, 1032]),
    (63, 520, [256, 64, 64]),
    (301, 2056, [1544]),
    (1023, 504, [768]),
    (129, 64, [2048]),
    (33, 1032, [128, 136, 8, 64, 72]),
    (641, 200, [3080]),
]


def joined(shards: torch.Tensor) -> torch.Tensor:
    """[W, ..., K] as [..., W * K]."""
    return torch.cat(list(shards), -1)


def late(chance: float) -> None:
    """Hold this rank's stream up for some milliseconds, now and then."""
    if random.random() < chance:
        torch.cuda._sleep(random.randrange(3_000_000))


def exact(
    m: int, k: int, ns: list[int], dtype: torch.dtype, transposed: bool, what: str, return_A: bool
) -> None:
    shard = whole(m, k, dtype=dtype)
    Bs = [matrix(world().size() * k, n, dtype, transposed) for n in ns]
    A, outs = fused_all_gather_matmul(shard, Bs, 1, world(), return_A=return_A)
    assert last_plan().algorithm == "push", last_plan()
    want = joined(gathered(shard))
    assert (A is not None) is return_A
    assert A is None or torch.equal(A, want), f"gathered A, {what}"
    for out, B in zip(outs, Bs, strict=True):
        assert torch.equal(out, (want.float() @ B.float()).to(dtype)), what


@on_ranks([2, 4], device="cuda", fresh=True)
def test_every_tile(rank: int, world_size: int) -> None:
    for tile in (*TILES, WIDEST):
        for comm_sms in (0, 8):  # sent by every block, or by some, which miss a tile meanwhile

            def only(problem: AllGatherMatmulProblem, tile: Tile = tile, comm_sms: int = comm_sms) -> Any:
                group = min(2, -(-problem.m // tile.block_m))
                return [
                    (1.0, GatherPushConfig(tile, comm_sms, group, split_k=True, skipped_steps=comm_sms // 8))
                ]

            choose_anew()
            symm_mem.reset()  # forgets the kernels that were made for these shapes before
            with mock.patch.object(configs, "rank_gather_pushes", only), forced("push"):
                for i, (m, k, ns) in enumerate(SHAPES):
                    for dtype, transposed in ((torch.bfloat16, False), (torch.float16, True)):
                        poison(rank)
                        what = f"{tile}, {comm_sms} senders, {m, k, ns} {dtype}"
                        exact(m, k, ns, dtype, transposed, what, return_A=i % 2 == 0)


@on_ranks([2, 4], device="cuda")
def test_random_numbers_and_equal_bits(rank: int, world_size: int) -> None:
    for m, k, n, dtype in [(1023, 1032, 1544, torch.bfloat16), (2048, 512, 4096, torch.float16)]:
        shard = torch.randn(3, m // 3, k).to(dtype)
        A = joined(torch.stack(gather(shard)))
        # Equal Bs: the parts are added in the same order on every rank.
        B = same_on_all(world_size * k, n, dtype=dtype)
        with forced("push"):
            got_A, (first,) = fused_all_gather_matmul(shard, [B], -1, world())
            assert last_plan().algorithm == "push"
            check("last dimension", first, A @ B.double(), BOUND[dtype])
            assert got_A is not None and torch.equal(got_A.double(), A)
            assert all(torch.equal(other, first) for other in gathered(first)), "other bits on another rank"
            for _ in range(5):
                late(0.3)
                _, (out,) = fused_all_gather_matmul(shard, [B], -1, world(), return_A=False)
                assert torch.equal(out, first), "other bits in another run"
            for bs, algorithm, why in (
                ([B.float()], "copy_engine", ""),
                ([B, B.t().contiguous().t()], "push", "Bs[1] does not lie in rows"),
            ):
                _, outs = fused_all_gather_matmul(shard.to(bs[0].dtype), bs, -1, world())
                assert last_plan().algorithm == algorithm and why in last_plan().reason
                check(algorithm, outs[-1], A @ B.double(), BOUND[dtype])


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks([2, 4], device="cuda")
def test_shards_whose_rows_lie_apart(rank: int, world_size: int, algorithm: str) -> None:
    wide, batched = whole(301, 1032, dtype=torch.bfloat16), whole(43, 3, 136, dtype=torch.bfloat16)
    cases = {  # the shard, the dimension, copies that are made of it
        "columns": (wide[:, 520:656], 0, 0),
        "columns, the last dimension": (wide[:, 520:656], 1, 0),
        "every other row": (wide[::2, :136], 0, 0),
        "inner dimension that lies in front": (batched.transpose(0, 1), 1, 0),
        "columns that begin between two vectors": (wide[:, 1:137], 0, 1),
        "inner dimension": (batched, 1, 1),
    }
    whole(8, 8, dtype=torch.bfloat16) @ whole(8, 8, dtype=torch.bfloat16)  # cuBLAS takes its own memory
    for name, (shard, dim, copies) in cases.items():
        B = matrix((world_size if dim == shard.dim() - 1 else 1) * 136, 264, torch.bfloat16, transposed=True)
        for return_A in (False, True):
            for _ in range(2):  # the slow path and, where nothing is copied, the fast one
                poison(rank)
                torch.cuda.synchronize()
                before = allocations()
                with forced(algorithm):
                    A, (out,) = fused_all_gather_matmul(shard, [B], dim, world(), return_A=return_A)
                made = allocations() - before
                taken = last_plan().algorithm
                assert taken == ("push" if return_A else algorithm)
                want = torch.cat(list(gathered(shard)), dim)
                assert torch.equal(out, (want.float() @ B.float()).bfloat16()), name
                assert A is None or torch.equal(A, want), name
            # In one shot the product is given what was gathered.
            needed = 1 + (return_A or taken == "one_shot") + copies
            assert made == needed, f"{name}: {made} tensors are made"
