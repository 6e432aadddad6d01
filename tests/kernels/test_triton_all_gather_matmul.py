"""The Triton kernel of all_gather_matmul in the interpreter, over real processes and the host heap."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from weft.kernels.all_gather_matmul.configs import AllGatherMatmulConfig, copied_gather_layout
from weft.kernels.all_gather_matmul.triton_kernel import TritonAllGatherMatmul
from weft.kernels.device.triton import sync
from weft.kernels.device.triton.tile_table import TritonTile
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
TILE = TritonTile(32, 32, 32, warps=4, stages=3, chunks=2, speed=1.0)
SECOND = 1_000_000_000


class Site:
    """One call site of one rank: what the op would own."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, chunk_rows: int) -> None:
        interpreter.install()
        config = AllGatherMatmulConfig(TILE, group_m=2, chunk_rows=chunk_rows)
        where = get_heap(None, "cpu")
        self.rank, self.world_size = where.rank, where.world_size
        self.shape, self.dtype = (self.world_size, m, k), dtype
        # The ranks serve other tests, too: what breaks here is this site alone.
        self.workspace = Workspace(
            where, copied_gather_layout(m, k, dtype, self.world_size, config), "site", fault=Fault(where)
        )
        self.layout: Layout = self.workspace.layout
        self.words = self.workspace.words
        self.record = torch.zeros(8, dtype=torch.int64)
        self.workspace.fault.record = self.record.data_ptr()  # as on GPUs
        for buffer in (0, 1):
            self.workspace.buffer(self.rank, buffer, self.shape, dtype).fill_(float("nan"))
        self.chunk_rows = chunk_rows
        b = self.operand(n, k, transposed)
        self.op = TritonAllGatherMatmul(
            self.workspace,
            self.shard(m, k),
            b,
            config,
            num_sms=3,
        )
        dist.barrier()

    def operand(self, n: int, k: int, transposed: bool) -> torch.Tensor:
        return torch.randn(n, k).to(self.dtype).t() if transposed else torch.randn(k, n).to(self.dtype)

    def shard(self, m: int, k: int) -> torch.Tensor:
        return torch.randn(m, k + 16).to(self.dtype)[:, 8 : 8 + k]  # rows lie apart: strides are honoured

    def use(self, buffer: int) -> torch.Tensor:
        """Of the next launch; asked before it, as one that the peers have served already may end before it is sent."""
        return self.words[self.layout.EPOCH + buffer] + 1

    def push(self, buffer: int, use: torch.Tensor, a: torch.Tensor, pause: float) -> None:
        """What the acquire kernel, copy engines and stream writes do on GPUs."""
        epoch = int(use)
        flags = self.layout.flags_per_rank
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            while int(self.words[self.layout.done(buffer) + peer]) - (epoch - 1) < 0:
                time.sleep(0.001)
            theirs = self.workspace.buffer(peer, buffer, self.shape, self.dtype)[self.rank]
            for chunk in range(flags):
                time.sleep(pause)
                rows = slice(chunk * self.chunk_rows, (chunk + 1) * self.chunk_rows)
                theirs[rows] = a[rows]
                self.workspace.words_of(peer)[self.layout.flags(buffer) + self.rank * flags + chunk] = epoch


def gathered(a: torch.Tensor) -> torch.Tensor:
    shards = [torch.empty(a.shape, dtype=a.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, a.contiguous())
    return torch.stack(shards)


def assert_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    want = a.double() @ b.double()
    bound = a.double().abs() @ b.double().abs()
    # float32 sums, and one rounding to the output's dtype
    error = (c.double() - want).abs() - torch.finfo(c.dtype).eps * want.abs()
    assert (error <= 1e-6 * bound).all(), f"off by {error.max()}"


def check(
    rank: int, world_size: int, dtype: torch.dtype, m: int, n: int, k: int, transposed: bool, chunk_rows: int
) -> None:
    site = Site(m, n, k, dtype, transposed, chunk_rows)
    uses = [0, 0]
    for call, buffer in enumerate((0, 1, 0, 1, 1)):  # the last two on the same buffer: that is right, too
        a = site.shard(m, k)
        bs = [site.operand(n, k, transposed) for _ in range(1 + call % 2)]
        pusher = threading.Thread(
            target=site.push, args=(buffer, site.use(buffer), a, 0.01 * (rank + call % 3))
        )
        pusher.start()
        cs = [torch.full((world_size, m, n), float("nan"), dtype=dtype) for _ in bs]
        for i, (b, c) in enumerate(zip(bs, cs, strict=True)):
            final = i + 1 == len(bs)
            site.op.launch(buffer, a, b, c, final=final, timeout_ns=60 * SECOND)
            uses[buffer] += final
            assert int(site.words[site.layout.EPOCH + buffer]) == uses[buffer]
        pusher.join()
        assert site.record[0] == 0
        for b, c in zip(bs, cs, strict=True):
            assert_product(c, gathered(a), b)
    assert site.op.gathered(0)[rank].isnan().all(), "local tiles read the input, not the own slot"
    dist.barrier()
    for buffer in (0, 1):
        done = site.words[site.layout.done(buffer) :][:world_size]
        assert done.tolist() == [uses[buffer]] * world_size
        assert int(site.words[site.layout.LEFT + buffer]) == 0


@pytest.mark.parametrize(
    ("world_size", "dtype", "m", "n", "k", "transposed", "chunk_rows"),
    [
        (2, torch.bfloat16, 72, 40, 64, True, 32),
        (2, torch.float16, 8, 72, 40, False, 32),
        (3, torch.float32, 70, 36, 20, False, 64),
        (3, torch.bfloat16, 33, 32, 104, False, 64),
        (1, torch.bfloat16, 40, 48, 32, True, 64),
    ],
)
def test_ranks(
    world_size: int, dtype: torch.dtype, m: int, n: int, k: int, transposed: bool, chunk_rows: int
) -> None:
    run_ranks(check, world_size, dtype, m, n, k, transposed, chunk_rows, env=ENV, timeout=120)


@on_ranks(2, env=ENV, timeout=120)
def test_epochs_wrap_around(rank: int, world_size: int) -> None:
    site = Site(40, 32, 32, torch.float32, False, 64)
    last = 2**31 - 1
    site.words[site.layout.EPOCH] = last - 1
    site.words[site.layout.done(0) :][:world_size] = last - 1
    site.words[site.layout.flags(0) :][: world_size * site.layout.flags_per_rank] = last - 1
    dist.barrier()
    for _ in range(3):
        a, b = site.shard(40, 32), site.operand(32, 32, False)
        c = torch.full((world_size, 40, 32), float("nan"))
        pusher = threading.Thread(target=wrapping_push, args=(site, site.use(0), a))
        pusher.start()
        site.op.launch(0, a, b, c, final=True, timeout_ns=20 * SECOND)
        pusher.join()
        assert_product(c, gathered(a), b)
    assert int(site.words[site.layout.EPOCH]) == last + 2 - 2**32
    assert site.record[0] == 0


def wrapping_push(site: Site, epoch: torch.Tensor, a: torch.Tensor) -> None:
    """Only one use is under way: the test's ranks meet after each."""
    time.sleep(0.05)
    peer = 1 - site.rank
    site.workspace.buffer(peer, 0, site.shape, site.dtype)[site.rank] = a
    site.workspace.words_of(peer)[site.layout.flags(0) + site.rank * site.layout.flags_per_rank] = epoch


def check_timeout(rank: int, world_size: int) -> Any:
    site = Site(70, 64, 32, torch.float32, False, 32)
    if rank == 1:
        dist.barrier()
        return None
    site.words[site.layout.flags(0) + site.layout.flags_per_rank] = (
        1  # the first of rank 1's three chunks came
    )
    start = time.monotonic()
    a, b = site.shard(70, 32), site.operand(64, 32, False)
    c = torch.empty(world_size, 70, 64)
    site.op.launch(0, a, b, c, final=True, timeout_ns=SECOND // 2)
    seconds = time.monotonic() - start
    dist.barrier()
    assert_product(c[:1], a[None], b)
    broken = int(site.workspace.fault.words[Fault.BROKEN])
    epoch = int(site.words[site.layout.EPOCH])
    written, where, *record = site.record.tolist()
    assert (written, where) == (1, site.workspace.address)
    return record, broken, epoch, seconds, site.layout.flags(0) + site.layout.flags_per_rank + 1


def test_a_missing_peer_is_recorded_and_the_kernel_ends() -> None:
    (*record, when), broken, epoch, seconds, word = run_ranks(check_timeout, 2, env=ENV, timeout=120)[0]
    assert record == [1, word, 1, 0, sync.WAIT_DATA.value] and when > 0
    assert (broken, epoch) == (1 + 1, 1)
    assert 0.5 <= seconds < 10, "later waits must give up at once"


def check_abort_notice(rank: int, world_size: int) -> list[int] | None:
    """Copies of rank 0's next epoch come while rank 1 is still at this one: no acquire kernel has ended."""
    site = Site(40, 32, 32, torch.float32, False, 64)
    a, b = site.shard(40, 32), site.operand(32, 32, False)
    c = torch.empty(world_size, 40, 32)
    site.push(0, site.use(0), a, 0.0)
    dist.barrier()
    if rank == 0:
        fault = site.workspace.fault
        theirs = fault.address + site.workspace.span + 4 * Fault.ABORT_NOTICE
        ctypes.c_uint32.from_address(theirs).value = 1 + 1
        site.workspace.buffer(1, 0, site.shape, site.dtype)[0] = 7.0
    dist.barrier()
    site.op.launch(0, a, b, c, final=True, timeout_ns=20 * SECOND)
    dist.barrier()
    assert site.record[1] in (0, site.workspace.address)
    return site.record.tolist()


def test_who_reads_what_a_peer_has_overwritten_is_told() -> None:
    unharmed, told = run_ranks(check_abort_notice, 2, env=ENV, timeout=120)
    assert not any(unharmed)
    written, _, peer, _, use, said, kind, _ = told
    assert (written, peer, use, said, kind) == (1, 0, 1, 2, sync.ABORTED.value)
