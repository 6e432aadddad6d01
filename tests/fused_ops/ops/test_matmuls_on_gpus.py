"""The CUDA products: every tile at odd sizes, each result right to the last bit.

Operands are small whole numbers and sums stay below 256: every rounding on the way is exact, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unittest import mock

import ahead
import pytest
import torch
from algorithms import ALGORITHMS, choose_anew, needs_gemm
from opcommon import gathered, matrix, poison, same_on_all, whole, world
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, last_plan
from weft.fused_ops.dispatch.plan import forced, num_sms
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul.configs import AllGatherMatmulProblem, GatherPushConfig
from weft.kernels.device.gemm import gemm_tiles
from weft.kernels.device.gemm.gemm_tiles import TILES, WIDEST, Tile
from weft.kernels.device.gemm.one_shot import MOST_BYTES
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall, push_config

pytestmark = [pytest.mark.gpu, needs_gemm]

SHAPES = [  # m, K, N of each B
    (1, 8, [8]),
    (100, 72, [40]),
    (257, 1000, [520, 1032]),
    (64, 520, [256, 64, 64]),
    (300, 2048, [1544]),
    (1024, 512, [768]),
    (129, 64, [2048]),
    (33, 1024, [128, 136, 8, 64, 72]),
    (640, 192, [3072]),
]


@dataclass(frozen=True)
class Problem:
    """A shard [m, k], and Bs [k, n] with the columns ``ns``; ``what`` is said where a result is wrong."""

    m: int
    k: int
    ns: list[int]
    dtype: torch.dtype
    transposed: bool
    what: str

    def operands(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        shard = whole(self.m, self.k, dtype=self.dtype)
        return shard, [matrix(self.k, n, self.dtype, self.transposed) for n in self.ns]


def gathers(problem: Problem, return_A: bool, algorithm: str = "push") -> None:
    (shard, Bs), what = problem.operands(), problem.what
    A, outs = fused_all_gather_matmul(shard, Bs, 0, world(), return_A=return_A)
    assert last_plan().algorithm == ("push" if return_A else algorithm), last_plan()
    want = gathered(shard).flatten(0, 1)
    assert (A is not None) is return_A
    assert A is None or torch.equal(A, want), f"gathered A, {what}"
    for out, B in zip(outs, Bs, strict=True):
        assert torch.equal(out, (want.float() @ B.float()).to(problem.dtype)), f"all-gather + matmul, {what}"


def scatters(problem: Problem, algorithm: str = "push") -> None:
    rank, size, m, dtype, what = world().rank(), world().size(), problem.m, problem.dtype, problem.what
    wide, B = whole(size * m, problem.k, dtype=dtype), problem.operands()[1][0]
    got = fused_matmul_reduce_scatter(wide, B, "sum", 0, world())
    assert last_plan().algorithm == algorithm, last_plan()
    parts = [
        a.chunk(size)[rank].float() @ b.float() for a, b in zip(gathered(wide), gathered(B), strict=True)
    ]
    assert torch.equal(got, sum(parts).to(dtype)), f"matmul + reduce-scatter, {what}"
    # A half or a quarter of a large sum is no 16-bit number.
    got = fused_matmul_reduce_scatter(wide, B, "avg", 0, world(), out_dtype=torch.float32)
    assert last_plan().algorithm == algorithm, last_plan()
    assert torch.equal(got, sum(parts) * (1 / size)), f"matmul + reduce-scatter in float32, {what}"
    named = {"bias": whole(B.shape[1], dtype=dtype), "residual": whole(m, B.shape[1], dtype=dtype)}
    if m % 3:
        del named["bias" if m % 3 == 1 else "residual"]
    want_more = sum(named.values(), start=sum(parts))
    got = fused_matmul_reduce_scatter(wide, B, "sum", 0, world(), **named)
    assert last_plan().algorithm == algorithm, last_plan()
    assert torch.equal(got, want_more.to(dtype)), f"matmul + reduce-scatter + {[*named]}, {what}"


# By every block, or by some, which miss a tile meanwhile; steps of a short first wave; rows of a chunk; columns of a
# k-chunk.
SENT = ((0, 2, 64, 1024), (0, 0, 32, 512), (8, 0, 16, 256), (8, 1, 32, 512))


@contextmanager
def chosen_anew() -> Iterator[None]:
    """What was chosen for these shapes before is forgotten, the kernels with it; in the body they push."""
    gather_configs.rank_gather_pushes.cache_clear()
    choose_anew()
    symm_mem.reset()
    with forced("push"):
        yield


def problems(rank: int, how: object) -> Iterator[Problem]:
    for m, k, ns in SHAPES:
        for dtype, transposed in ((torch.bfloat16, False), (torch.float16, True)):
            poison(rank)
            yield Problem(m, k, ns, dtype, transposed, f"{how}, {m, k, ns} {dtype}")


def gather_config(tile: Tile, sent: tuple[int, int, int, int], m: int) -> GatherPushConfig:
    comm_sms, first_wave, chunk_rows, k_chunk_columns = sent
    how = (tile, comm_sms, min(2, -(-m // tile.block_m)), chunk_rows)
    return GatherPushConfig(
        *how, k_chunk_columns=k_chunk_columns, skipped_steps=comm_sms // 8, first_wave=first_wave
    )


def epilogues_of(m: int, dtype: torch.dtype) -> list[Epilogue]:
    """Those of ``scatters``."""
    added = {"bias": m % 3 != 1, "residual": m % 3 != 2}
    return [Epilogue(dtype), Epilogue(torch.float32), Epilogue(dtype, **added)]


def every_gather(rank: int, world_size: int) -> None:
    tried = [*product((*TILES, WIDEST), SENT)]
    operands = [(p.m, p.operands()[1]) for p in problems(rank, "ahead")]
    ahead.compile_ahead(
        program
        for (tile, sent), (i, (m, bs)) in product(tried, enumerate(operands))
        for program in ahead.gather_programs(bs, gather_config(tile, sent, m), [i % 4 < 2])
    )
    for tile, sent in tried:

        def only(
            problem: AllGatherMatmulProblem, tile: Tile = tile, sent: tuple[int, int, int, int] = sent
        ) -> list[GatherPushConfig]:
            return [gather_config(tile, sent, problem.m)]

        with chosen_anew(), mock.patch.object(gather_configs, "push_candidates", only):
            for i, problem in enumerate(problems(rank, (tile, sent))):
                gathers(problem, return_A=i % 4 < 2)


def every_scatter(rank: int, world_size: int) -> None:
    needed = []
    for tile, problem in product(TILES, [*problems(rank, "ahead")]):
        a, b = torch.empty(1, world_size, problem.m, problem.k), problem.operands()[1][0]
        epilogues = epilogues_of(problem.m, problem.dtype)
        call = ScatterKernelCall(a, b, num_sms(b.device), epilogues[0])
        needed += ahead.scatter_programs(b, push_config(tile, call.problem(world_size)), epilogues)
    ahead.compile_ahead(needed)
    for tile in TILES:
        with chosen_anew(), mock.patch.object(gemm_tiles, "TILES", (tile,)):
            for problem in problems(rank, tile):
                scatters(problem)


@pytest.mark.timeout(960)  # 4 ranks taking turns on one GPU had not come to the end in 240 s
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("every", [every_gather, every_scatter])
def test_every_tile(every: Callable[[int, int], None], world_size: int) -> None:
    run_ranks(every, world_size, device="cuda", fresh=True, timeout=900)


@on_ranks([2, 4], device="cuda")
def test_scattered_inner_dimension(rank: int, world_size: int) -> None:
    """Dimensions before the scattered one, and an average."""
    for lead, m, k, n in [(3, 65, 200, 136), (2, 128, 256, 512)]:
        A, B = whole(lead, world_size * m, k, dtype=torch.bfloat16), whole(k, n, dtype=torch.bfloat16)
        with forced("fused"):
            got = fused_matmul_reduce_scatter(A, B, "avg", 1, world())
        assert last_plan().algorithm == "push"
        products = [a.float() @ b.float() for a, b in zip(gathered(A), gathered(B), strict=True)]
        want = sum(p.chunk(world_size, 1)[rank] for p in products) / world_size
        assert torch.equal(got, want.bfloat16())
        bias, residual = whole(n, dtype=torch.bfloat16), whole(lead, m, n, dtype=torch.bfloat16)
        named = {"bias": bias, "residual": residual, "out_dtype": torch.float32}
        with forced("fused"):
            got = fused_matmul_reduce_scatter(A, B, "avg", 1, world(), **named)
        assert torch.equal(got, want + bias + residual)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks([2, 4], device="cuda")
def test_strided_operands_are_not_copied(rank: int, world_size: int, algorithm: str) -> None:
    """A that lies with gaps, or permuted, is not copied: its result is all that a call allocates, in one shot also the
    partial one."""
    lead, rows, k, n, dtype = world_size, 256, 72, 136, torch.bfloat16
    B = whole(k, n, dtype=dtype)
    taken = set()
    for A, dim in [
        (whole(lead * rows, k + 8, dtype=dtype)[:, :k], 0),
        (whole(lead, rows + 64, k, dtype=dtype)[:, 8 : rows + 8], 0),
        (whole(3 * lead, rows + 64, k, dtype=dtype)[:, 8 : rows + 8], 0),
        (whole(rows, 3 * lead, k, dtype=dtype).transpose(0, 1), 0),
        (whole(5, lead * rows, k + 8, dtype=dtype)[1:4, :, 8:], 1),
        (whole(lead * 100, 3, k, dtype=dtype).transpose(0, 1), 1),
    ]:
        products = [a.float() @ b.float() for a, b in zip(gathered(A), gathered(B), strict=True)]
        want = sum(p.chunk(world_size, dim)[rank] for p in products).to(dtype)
        for call in range(3):  # the slow path, and the fast one
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with forced(algorithm):
                got = fused_matmul_reduce_scatter(A, B, "sum", dim, world())
            made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
            taken.add(last_plan().algorithm)
            assert last_plan().algorithm in ALGORITHMS and torch.equal(got, want)
            needed = 1 + (last_plan().algorithm == "one_shot")
            assert made == needed or call == 0, f"{made} allocations for strides {A.stride()}"
    assert taken == {"push", algorithm}  # several batches are never scattered in one shot


@on_ranks([2, 4], device="cuda")
def test_ranks_with_equal_bs_get_equal_bits(rank: int, world_size: int) -> None:
    """What a router computes of gathered tokens must be the same on all ranks, to the last bit."""
    for m, k, n in [(300, 1000, 64), (1024, 2048, 520), (2048, 4096, 1536)]:
        B = same_on_all(k, n).bfloat16()
        shard = torch.randn(m, k, dtype=torch.bfloat16)
        for algorithm in ALGORITHMS:
            with forced(algorithm):
                _, (out,) = fused_all_gather_matmul(shard, [B], 0, world(), return_A=False)
            fits = 2 * world_size * m * k <= MOST_BYTES
            assert last_plan().algorithm == (algorithm if fits else "push")
            for peer, theirs in enumerate(gathered(out)):
                assert torch.equal(theirs, out), f"{algorithm}, {m, k, n}: rank {peer} has other bits"
