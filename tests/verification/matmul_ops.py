"""Calls of the products that send by themselves, on the CPU, threads as fibers, for the tests of their protocols.

The kernels and their launchers run as they are but for tensor copies, products of warpgroups and assembly; stores to
peers become visible late and in any order (matmuls.cpp). Operands are small whole numbers: all sums are exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
import torch
from fibers import PATIENT, Library
from matmuls import BROAD, SMALL, TWO_AND_A_HALF, WIDE, WIDEST, Matmuls, build
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import cuda_kernel as gather
from weft.kernels.device.gemm.gemm_tiles import Tile
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import cuda_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue

ROUNDED = Epilogue(torch.bfloat16)
BEHIND = 144  # rows
LARGE_BUT_ONE = (2.0**24, 1.0, 2.0**24)  # of three ranks: a sum in another order is another one


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).bfloat16()


def result(want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel writes to, after it more rows than a tile has, and what shall stand there."""
    kept = want.new_full((BEHIND, want.shape[-1]), 1.5)
    flat = want.reshape(-1, want.shape[-1])
    return torch.cat([torch.full_like(flat, float("nan")), kept]), torch.cat([flat, kept])


@dataclass
class Gather:
    """all_gather(A) @ [B, ...] on one workspace of each rank."""

    size: int
    m: int
    ns: tuple[int, ...]
    k: int
    config: gather_configs.GatherPushConfig
    blocks: int = 4
    rows: bool = False  # N is contiguous in B, not K
    apart: int = 0  # what lies between two rows of a shard, in elements
    return_A: bool = False

    def shard(self) -> torch.Tensor:
        return numbers(self.m, self.k + self.apart)[:, self.apart :]

    def bs(self) -> list[torch.Tensor]:
        k = self.size * self.k if self.config.split_k else self.k
        return [numbers(k, n) if self.rows else numbers(n, k).t() for n in self.ns]

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        defines = gather.gather_defines(self.bs(), self.config, return_A=self.return_A)
        return build(gather.SOURCE, gather._Params, defines, instead)

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Matmuls:
        layout = gather_configs.gather_push_layout(self.m, self.k, self.size, self.config)
        self.ranks = Matmuls(monkeypatch, library, layout, pace)
        example = gather_configs.GatherKernelCall(
            self.shard(), self.bs(), self.blocks, return_A=self.return_A
        )
        self.kernels = [
            gather.AllGatherMatmulPush(place, example, self.config) for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, buffer: int, polls: int, chunks: int = 1) -> None:
        """An epoch on every rank, in so many launches, of which the first one sends and the last one ends it."""
        shards = [self.shard() for _ in self.kernels]
        split_k = self.config.split_k
        whole = torch.cat(shards, 1).double() if split_k else torch.stack(shards).double()
        for rank, kernel in enumerate(self.kernels):
            for chunk in range(chunks):
                bs = self.bs()
                pairs = [result((whole @ b.double()).bfloat16()) for b in bs]
                kernel.push, kernel.final = chunk == 0, chunk == chunks - 1
                if self.return_A:
                    pairs.append(result(whole.bfloat16()))
                given, to = [x.data_ptr() for x in (shards[rank], *bs)], [c.data_ptr() for c, _ in pairs]
                kernel.launch(buffer, given, to, polls, rank)
                self.kept += [bs, shards]
                self.wanted += pairs


@dataclass
class Scatter:
    """reduce_scatter(A @ B) on one workspace of each rank; with ``epilogue.to_all`` all_reduce(A @ B) of ``m`` rows."""

    size: int
    m: int
    n: int
    k: int
    tile: Tile = SMALL
    batches: int = 1
    epilogue: Epilogue = ROUNDED
    blocks: int = 4
    raster_group: int = 1
    split_n: bool = False  # ranks have columns of B of their own
    rows: bool = False  # N is contiguous in B, not K
    nans: bool = False  # in the first row of each part of A
    scales: tuple[float, ...] = ()  # of the ranks' A
    more: tuple[int, ...] = ()  # K of further products that are added

    def __post_init__(self) -> None:
        self.config = scatter_configs.ScatterPushConfig(self.tile, self.raster_group, self.split_n)

    def operand(self, k: int = 0) -> torch.Tensor:
        parts = 1 if self.epilogue.to_all or self.split_n else self.size
        a = numbers(self.batches, parts, self.m, k or self.k)
        if self.nans:
            a.view(torch.int16)[:, :, 0] = -1  # all bits set
        return a

    def columns(self, of_all: bool = True, k: int = 0) -> torch.Tensor:
        n, k = self.size * self.n if of_all and self.split_n else self.n, k or self.k
        return numbers(k, n) if self.rows else numbers(n, k).t()

    def factors(self) -> list[torch.Tensor]:
        return [x for k in (self.k, *self.more) for x in (self.operand(k), self.columns(k=k))]

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        b = self.columns(of_all=False)
        defines = scatter.scatter_defines(b, self.config, self.size, 0, self.epilogue)
        return build(scatter.SOURCE, scatter._Params, defines, instead)

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Matmuls:
        problem = scatter_configs.MatmulReduceScatterProblem(
            *(self.m, self.n, self.k + sum(self.more), self.size, self.blocks, self.batches, self.split_n),
            to_all=self.epilogue.to_all,
        )
        layout = scatter_configs.scatter_push_layout(self.config, problem)
        self.ranks = Matmuls(monkeypatch, library, layout, pace)
        a, b, *more = self.factors()
        example = scatter_configs.ScatterKernelCall(
            *(a, b, self.blocks, self.epilogue), split_n=self.split_n, more=more
        )
        self.kernels = [
            scatter.MatmulReduceScatterPush(place, example, self.config) for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, buffer: int, polls: int) -> None:
        factors = [self.factors() for _ in self.kernels]
        if self.scales:  # else NaNs keep their bits
            for scale, each in zip(self.scales, factors, strict=True):
                each[0] = each[0] * scale
        pairs = [pair for each in factors for pair in zip(each[::2], each[1::2], strict=True)]
        total = sum(x.float() @ y.float() for x, y in pairs)
        if self.split_n:
            total = torch.cat(total.chunk(self.size, -1), 1)
        epilogue, shape = self.epilogue, (self.batches, self.m, self.n)
        scale = torch.tensor(1.0) / self.size if epilogue.average else torch.tensor(1.0)
        for rank, kernel in enumerate(self.kernels):
            terms = [numbers(self.n)] * epilogue.bias + [numbers(*shape)] * epilogue.residual
            operands = [x.data_ptr() for x in (*factors[rank], *terms)]
            want = sum(terms, start=total[:, 0 if epilogue.to_all else rank] * scale)
            out, want = result(want.to(epilogue.out_dtype))
            kernel.launch(buffer, operands, [out.data_ptr()], polls, rank)
            self.wanted.append((out, want))
            self.kept += terms
        self.kept += factors


def push(
    tile: Tile,
    comm_sms: int,
    group: int,
    k_chunk_columns: int = 128,
    split_k: bool = False,
    skipped_steps: int = 0,
    first_wave: int = 0,
    chunk_rows: int = 64,
) -> gather_configs.GatherPushConfig:
    return gather_configs.GatherPushConfig(
        *(tile, comm_sms, group),
        chunk_rows=chunk_rows,
        k_chunk_columns=k_chunk_columns,
        raster_group=2,
        remote_raster_group=2,
        split_k=split_k,
        skipped_steps=skipped_steps,
        first_wave=first_wave,
    )


GATHERS = {
    "beside": Gather(2, 147, (72, 40), 200, push(SMALL, 0, 1)),
    "beside-4": Gather(4, 65, (8,), 264, push(WIDE, 0, 1), blocks=2),
    "comm_sms": Gather(3, 147, (72,), 200, push(SMALL, 2, 2)),
    "comm_sms-miss-one": Gather(3, 147, (72,), 200, push(SMALL, 2, 1, skipped_steps=1)),
    "comm_sms-miss-all": Gather(2, 147, (72,), 136, push(SMALL, 2, 1, skipped_steps=1 << 16)),
    "comm_sms-small": Gather(3, 147, (72,), 200, push(SMALL, 2, 2, 256, chunk_rows=16)),
    "beside-small": Gather(2, 147, (72,), 264, push(SMALL, 0, 1, chunk_rows=32)),
    "comm_sms-wide": Gather(2, 200, (40,), 72, push(WIDE, 2, 1, 64)),
    "first_wave": Gather(2, 147, (72, 40), 72, push(SMALL, 0, 1, first_wave=2), blocks=6),
    "first_wave-comm_sms": Gather(
        3, 147, (72,), 200, push(SMALL, 2, 1, skipped_steps=1, first_wave=1), blocks=8
    ),
    "rows": Gather(2, 147, (64,), 200, push(BROAD, 0, 1), rows=True, apart=24),
    "half-a-group": Gather(2, 130, (200,), 72, push(TWO_AND_A_HALF, 0, 1), rows=True),
    "two-instructions": Gather(2, 130, (328, 72), 72, push(WIDEST, 0, 1), blocks=2),
    "two-instructions-rows": Gather(2, 130, (320,), 72, push(WIDEST, 0, 1), blocks=2, rows=True),
    "returned": Gather(3, 147, (72, 40), 200, push(SMALL, 2, 1, skipped_steps=1), apart=8, return_A=True),
    "returned-odd-rows": Gather(2, 205, (64,), 136, push(BROAD, 0, 1), rows=True, return_A=True),
    "returned-wide": Gather(4, 130, (40, 8), 72, push(WIDE, 0, 1, first_wave=1), blocks=2, return_A=True),
    "returned-split": Gather(3, 147, (72, 40), 200, push(SMALL, 0, 1, split_k=True), return_A=True),
    "returned-split-odd-rows": Gather(
        2, 205, (64,), 72, push(BROAD, 2, 1, 64, split_k=True), rows=True, return_A=True
    ),
    "split": Gather(2, 147, (72, 40), 200, push(SMALL, 0, 1, split_k=True)),
    "split-comm_sms": Gather(3, 200, (40,), 72, push(WIDE, 2, 1, 64, split_k=True, skipped_steps=1), apart=8),
    "split-rows": Gather(4, 65, (64, 128), 72, push(BROAD, 0, 1, split_k=True), rows=True),
    "split-odd-rows": Gather(3, 300, (72,), 136, push(BROAD, 2, 2, 64, split_k=True), rows=True),
}
SCATTERS = {
    "2": Scatter(2, 147, 72, 200, raster_group=2),
    "two-blocks": Scatter(2, 147, 136, 72, blocks=2),
    "two-blocks-3": Scatter(3, 67, 40, 136, WIDE, blocks=2, epilogue=Epilogue(torch.float32, average=True)),
    "3": Scatter(3, 65, 136, 72, epilogue=Epilogue(torch.bfloat16, average=True, bias=True)),
    "4": Scatter(4, 67, 40, 136, WIDE, blocks=2, epilogue=Epilogue(torch.bfloat16, residual=True)),
    "to-all": Scatter(2, 275, 136, 72, blocks=2, epilogue=replace(ROUNDED, to_all=True)),
    "to-all-3": Scatter(
        *(3, 391, 40, 136, WIDE),
        blocks=2,
        raster_group=2,
        epilogue=Epilogue(torch.bfloat16, average=True, to_all=True),
    ),
    "to-all-few-rows": Scatter(4, 5, 72, 72, epilogue=replace(ROUNDED, to_all=True)),
    "sum": Scatter(2, 147, 72, 200, raster_group=2, more=(8, 72)),
    "sum-rows": Scatter(
        *(3, 67, 64, 40, BROAD),
        rows=True,
        more=(136, 64, 72),
        epilogue=Epilogue(torch.float32, residual=True),
    ),
    "sum-columns": Scatter(3, 65, 72, 136, split_n=True, more=(72,)),
    "columns": Scatter(2, 147, 72, 200, raster_group=2, split_n=True),
    "columns-odd-rows": Scatter(
        *(3, 300, 72, 136, BROAD),
        split_n=True,
        rows=True,
        epilogue=Epilogue(torch.float32, average=True, bias=True, residual=True),
    ),
    "columns-whole": Scatter(4, 65, 64, 72, BROAD, blocks=2, raster_group=3, split_n=True, rows=True),
    "nans": Scatter(2, 67, 72, 72, nans=True),
    "order-of-ranks": Scatter(3, 67, 72, 72, epilogue=Epilogue(torch.float32), scales=LARGE_BUT_ONE),
    "batches": Scatter(2, 33, 72, 72, batches=3, epilogue=Epilogue(torch.float32, bias=True, residual=True)),
}
Op = Gather | Scatter
#: A host's eight ranks. So many threads take long: little work, and few blocks.
OF_EIGHT: dict[str, Op] = {
    "comm_sms": Gather(8, 67, (8,), 72, push(SMALL, 2, 2, skipped_steps=1, first_wave=1)),
    "split": Gather(8, 5, (8,), 72, push(SMALL, 0, 1, split_k=True), blocks=2),
    "parts": Scatter(8, 67, 72, 72, blocks=2),
    "to-all": Scatter(8, 463, 72, 72, blocks=2, epilogue=replace(ROUNDED, to_all=True)),
}
#: How long stores take, and how far ranks drift apart (matmuls.cpp).
PACES = [(store, rank) for store in (1, 10, 100) for rank in (2000, 200_000)]


def uses(
    op: Op,
    monkeypatch: pytest.MonkeyPatch,
    library: Library,
    seed: int,
    count: int = 6,
    polls: int = PATIENT,
    paces: Sequence[tuple[int, int]] = PACES,
    room: int = 0,
) -> Matmuls:
    """Random buffers: the same one twice in a row, too."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    ranks = op.prepare(monkeypatch, library, choice.choice(paces))
    ranks.room = room
    for _ in range(count):
        buffer = choice.randrange(2)
        if isinstance(op, Gather):
            op.launch(buffer, polls, choice.choice([1, 1, 2]))
        else:
            op.launch(buffer, polls)
    ranks.run(seed)
    return ranks


def wrong(op: Op, ranks: Matmuls) -> str:
    """What is wrong after `uses`; empty if nothing is."""
    if ranks.records.any():
        return f"a wait has expired: {ranks.records.tolist()}"
    if ranks.layout.ll_protocol and ranks.memory[:, ranks.layout.buffer(0) : ranks.layout.staging].any():
        return "a buffer is not empty"
    words, layout = ranks.memory.view(torch.int32), ranks.layout
    for buffer in (0, 1):
        counts = [layout.EPOCH + buffer, *range(layout.done(buffer), layout.done(buffer) + op.size)]
        if (words[:, counts] != words[0, counts[0]]).any():
            return f"ranks count other uses of buffer {buffer}"
        if words[:, layout.DRAWN + buffer].any():
            return f"what blocks draw for buffer {buffer} is not set back"
        if words[:, layout.LEFT + buffer].any():
            return f"blocks have left an epoch of buffer {buffer} that is over"
    if ranks.strays:
        return f"{ranks.strays} times a block reached for one that had ended"
    bad = [i for i, pair in enumerate(op.wanted) if not torch.allclose(*pair, rtol=0, atol=0, equal_nan=True)]
    return f"results {bad} of {len(op.wanted)} are wrong" if bad else ""
