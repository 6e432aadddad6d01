"""The Triton kernel of matmul_reduce_scatter in the interpreter, over real processes and the host heap.

There the programs of a grid run one after the other, and the own tiles wait for the peers: one program a rank,
unless the peers' part is played by plain tensor code.
"""

from __future__ import annotations

import time
from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft.kernels.device.triton import sync
from weft.kernels.device.triton.tile_table import TritonTile
from weft.kernels.matmul_reduce_scatter.configs import (
    Epilogue,
    MatmulReduceScatterConfig,
    MatmulReduceScatterProblem,
    tiled_scatter_layout,
)
from weft.kernels.matmul_reduce_scatter.triton_kernel import TritonMatmulReduceScatter
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.workspace import Workspace

ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
TILE = TritonTile(32, 32, 32, warps=4, stages=3, chunks=2, speed=1.0)
SECOND = 1_000_000_000


class Site:
    """One call site of one rank: what the op would own."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        epilogue: Epilogue | None = None,
        programs: int = 1,
        uses: int = 0,
    ) -> None:
        interpreter.install()
        (batches, world_size, m, _), n = a.shape, b.shape[1]
        config = MatmulReduceScatterConfig(TILE, group_m=2)
        where = get_heap(None, "cpu")
        self.rank, self.part = where.rank, (batches, m, n)
        # The ranks serve other tests, too: what breaks here is this site alone.
        problem = MatmulReduceScatterProblem(m, n, a.shape[-1], world_size, programs, batches)
        made = tiled_scatter_layout(config, problem, a.dtype)
        self.workspace = Workspace(where, made, "site", fault=Fault(where))
        self.layout, self.words = self.workspace.layout, self.workspace.words
        self.record = torch.zeros(8, dtype=torch.int64)
        self.workspace.fault.record = self.record.data_ptr()  # as on GPUs
        for buffer in (0, 1):
            self.receive_buffer(self.rank, buffer, a.dtype).fill_(float("nan"))
            self.words[self.layout.EPOCH + buffer] = uses
            for first, count in (
                (self.layout.done(buffer), world_size),
                (self.layout.flags(buffer), world_size * self.layout.flags_per_rank),
            ):
                self.words[first : first + count] = uses
        epilogue = epilogue or Epilogue(a.dtype)
        self.op = TritonMatmulReduceScatter(self.workspace, a, b, config, epilogue, num_sms=programs)
        dist.barrier()

    def receive_buffer(self, rank: int, buffer: int, dtype: torch.dtype) -> torch.Tensor:
        return self.workspace.buffer(rank, buffer, (self.workspace.world_size, *self.part), dtype)


def reference(a: torch.Tensor, b: torch.Tensor, average: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the sum in float64, and a bound on what its terms sum up to without their signs."""
    results = []
    for x, y in ((a.double(), b.double()), (a.double().abs(), b.double().abs())):
        total = x @ y
        dist.all_reduce(total)
        results.append(total[:, dist.get_rank()] / (dist.get_world_size() if average else 1))
    return results[0], results[1]


def check(
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    batches: int,
    m: int,
    n: int,
    k: int,
    transposed: bool,
    average: bool,
    bias: bool,
    residual: bool,
) -> None:
    def operands() -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(batches, world_size * m, k + 8).to(dtype)[..., :k].unflatten(1, (world_size, m))
        b = torch.randn(n, k).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
        return a, b

    epilogue = Epilogue(dtype, average, bias, residual)
    site = Site(*operands(), epilogue, uses=2**31 - 2)  # the counts wrap around on the way
    for call, buffer in enumerate((0, 1, 0, 1, 1, 0)):
        a, b = operands()
        time.sleep(0.03 * ((rank + call) % 3))
        out = torch.full((batches, m, n), float("nan"), dtype=dtype)
        terms = [torch.randn(n).to(dtype)] * bias + [torch.randn(batches, m, n).to(dtype)] * residual
        site.op.launch(buffer, a, b, out, *terms, timeout_ns=60 * SECOND)
        assert site.record[0] == 0
        want, bound = reference(a, b, average)
        want = sum((term.double() for term in terms), start=want)
        # each partial result is rounded once, and so is their sum
        eps = torch.finfo(dtype).eps
        error = (out.double() - want).abs() - eps * want.abs()
        assert (error <= (eps / 2 + 1e-6) * bound).all(), f"call {call}: off by {error.max()}"
    dist.barrier()
    for buffer in (0, 1):
        assert int(site.words[site.layout.EPOCH + buffer]) == 2**31 + 1 - 2**32
        done = site.words[site.layout.done(buffer) :][:world_size]
        assert done.tolist() == [2**31 + 1 - 2**32] * world_size
        assert site.receive_buffer(rank, buffer, dtype)[rank].isnan().all(), "nobody writes the own slot"


@pytest.mark.parametrize(
    ("world_size", "dtype", "batches", "m", "n", "k", "transposed", "average", "bias", "residual"),
    [
        (2, torch.bfloat16, 1, 40, 72, 64, True, False, False, True),
        (2, torch.float16, 2, 33, 40, 40, False, True, False, False),
        (3, torch.float32, 1, 35, 36, 20, False, True, True, True),
        (4, torch.bfloat16, 1, 8, 40, 72, True, False, True, False),
        (1, torch.float32, 2, 40, 36, 32, False, False, True, True),
    ],
)
def test_ranks(
    world_size: int,
    dtype: torch.dtype,
    batches: int,
    m: int,
    n: int,
    k: int,
    transposed: bool,
    average: bool,
    bias: bool,
    residual: bool,
) -> None:
    kind = (transposed, average, bias, residual)
    run_ranks(check, world_size, dtype, batches, m, n, k, *kind, env=ENV, timeout=150)


@pytest.mark.parametrize("programs", [2, 5, 100])
@on_ranks(3, env=ENV, timeout=120)
def test_programs_share_the_tiles(rank: int, world_size: int, programs: int) -> None:
    """Rank 0 runs the kernel with several programs; the others have sent their partial results before."""
    m, n, k = 70, 72, 40
    a, b = torch.randn(1, world_size, m, k), torch.randn(k, n)
    site = Site(a, b, programs=programs)
    row = site.layout.flags(0) + rank * site.layout.flags_per_rank
    flags = slice(row, row + site.layout.flags_per_rank)
    if rank > 0:
        site.receive_buffer(0, 0, a.dtype)[rank] = a[:, 0] @ b
        site.workspace.words_of(0)[flags] = 1
    dist.barrier()
    out = torch.full((1, m, n), float("nan"))
    if rank == 0:
        site.op.launch(0, a, b, out, timeout_ns=10 * SECOND)
        assert site.record[0] == 0
    dist.barrier()
    want, bound = reference(a, b, False)
    if rank == 0:
        assert ((out.double() - want).abs() <= 1e-6 * bound).all()
    dist.broadcast_object_list(operands := [(a, b)], src=0)
    a0, b0 = operands[0]
    if rank > 0:
        torch.testing.assert_close(site.receive_buffer(rank, 0, a.dtype)[0], a0[:, rank] @ b0)
        first = site.layout.flags(0)
        assert (
            site.words[first : first + site.layout.flags_per_rank].tolist()
            == [1] * site.layout.flags_per_rank
        )


@on_ranks(3, env=ENV, timeout=120)
def test_partials_are_summed_in_the_order_of_the_ranks(rank: int, world_size: int) -> None:
    """Partial results 2^24, 1, -2^24 sum up to 0 in the order of the ranks, and to 1 in others."""
    a = torch.full((1, world_size, 16, 4), 0.25)
    b = torch.full((4, 32), [2.0**24, 1.0, -(2.0**24)][rank])
    out = torch.full((1, 16, 32), float("nan"))
    Site(a, b).op.launch(0, a, b, out, timeout_ns=60 * SECOND)
    assert (out == 0).all(), out.unique()


def check_timeout(rank: int, world_size: int, missing: str) -> Any:
    a, b = torch.randn(1, world_size, 70, 32), torch.randn(32, 64)
    site = Site(a, b)
    layout = site.layout
    word = layout.flags(0) + layout.flags_per_rank
    seconds = 0.0
    if rank == 0:
        if missing == "free":
            site.words[layout.EPOCH] = 1  # this is use 2, and nobody said that use 1 is over
            word = layout.done(0) + 1
        start = time.monotonic()
        site.op.launch(0, a, b, torch.empty(1, 70, 64), timeout_ns=SECOND // 2)
        seconds = time.monotonic() - start
    dist.barrier()
    row = layout.flags(0)  # what rank 0 told this rank
    sent = site.words[row : row + layout.flags_per_rank].tolist()
    came = site.receive_buffer(rank, 0, a.dtype)[0]
    dist.barrier()
    assert site.record[1] == site.workspace.address * (rank == 0)
    return site.record.tolist(), word, seconds, sent, not came.isnan().any(), came.isnan().all().item()


@pytest.mark.parametrize("missing", ["data", "free"])
def test_a_missing_peer_is_recorded_and_the_kernel_ends(missing: str) -> None:
    first, second = run_ranks(check_timeout, 2, missing, env=ENV, timeout=120)
    (written, _, *record, when), word, seconds, *_ = first
    kind = sync.WAIT_DATA if missing == "data" else sync.WAIT_FREE
    assert written == 1 and record == [1, word, 1, 0, kind.value] and when > 0
    assert 0.5 <= seconds < 10, "later waits must give up at once"
    _, _, _, sent, all_came, nothing_came = second
    if missing == "data":  # what others wait for is sent before anything is waited for
        assert sent == [1] * len(sent)
        assert all_came
    else:  # the peer may still read what a store would overwrite
        assert sent == [0] * len(sent)
        assert nothing_came
