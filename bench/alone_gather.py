"""All-gather + matmul of one rank alone (the suite alone).

The rows of its peers lie in its memory already. What announce.cu plays are their flags: when rank 0 has set a flag at
one of them, they set theirs for the same chunk, as much later as a link is long, and no earlier than links could have
brought it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from alone_rank import TIMEOUT_NS, Alone, RankProblem, Trial
from parts import divisible, random_tensor, sets_of
from registry import SPLITS, Row
from torch import Tensor
from weft.kernels.all_gather_matmul.configs import (
    AllGatherMatmulProblem,
    GatherKernelCall,
    GatherPushConfig,
    gather_push_layout,
    rank_gather_pushes,
)
from weft.kernels.all_gather_matmul.cuda_kernel import AllGatherMatmulPush
from weft.kernels.all_gather_matmul.estimate import CHUNK_COLUMNS
from weft.kernels.device.device_spec import device_spec_of
from weft.kernels.device.jit.program import Program
from weft.symm_mem.failure.fault import WORD
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

# Bytes a nanosecond that all peers together send to a rank, and nanoseconds on the way, as between H200s.
RATE_OF_TWO, RATE, TRIP = 335.0, 294.0, 1000


class _Params(ctypes.Structure):
    """The twin of ``Params`` in announce.cu."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("told", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
        ("due", ctypes.c_uint64),
        ("use", ctypes.c_uint64),
        ("count", ctypes.c_int32),
        ("flags_per_rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("trip", ctypes.c_int32),
        ("deadline", ctypes.c_uint64),
    )


def varied(ranked: Iterable[tuple[float, GatherPushConfig]]) -> list[tuple[float, GatherPushConfig]]:
    """First the likeliest of each tile with which all blocks send, or some."""
    likeliest: dict[object, tuple[float, GatherPushConfig]] = {}
    others = []
    for us, config in ranked:
        if likeliest.setdefault((config.tile, config.comm_sms > 0), (us, config))[1] is not config:
            others.append((us, config))
    return [*likeliest.values(), *others]


def alone_program() -> Program:
    return Program(Path(__file__).parent / "announce.cu")


def announcements(config: GatherPushConfig, m: int, k: int, world_size: int) -> list[tuple[int, int]]:
    """(flag, nanoseconds that links take up to it) of each chunk that one peer sends, in the order of kernel.cu.

    Args:
        m, k: of a shard.
    """
    height, width = config.chunk_rows, CHUNK_COLUMNS
    down, across = config.tile.block_m // height, config.k_chunk_columns // width
    tile_rows, units = -(-m // config.tile.block_m), -(-k // config.k_chunk_columns)
    rate, sent, found = RATE_OF_TWO if world_size == 2 else RATE, 0, []
    for first in range(0, tile_rows, config.group):
        for unit in range(units):
            for tile_row in range(first, min(first + config.group, tile_rows)):
                for chunk in range(down * across):
                    row = tile_row * config.tile.block_m + chunk // across * height
                    column = unit * config.k_chunk_columns + chunk % across * width
                    if row < m and column < k:
                        sent += (world_size - 1) * min(height, m - row) * min(width, k - column) * 2
                        flag = (tile_row * units + unit) * down * across + chunk
                        found.append((flag, round(sent / rate)))
    return found


@dataclass(frozen=True)
class GatherOperands:
    """Sets of operands and results; ``peers``: what the peers send, the same in every set."""

    peers: Tensor
    shards: list[Tensor]
    weights: list[list[Tensor]]
    outs: list[list[Tensor]]


class GatherCandidate(Alone):
    """A candidate with operands of its own."""

    def __init__(
        self,
        workspace: Workspace[Layout],
        config: GatherPushConfig,
        operands: GatherOperands,
        num_sms: int,
    ) -> None:
        peers, shards, weights = operands.peers, operands.shards, operands.weights
        m, k = shards[0].shape
        addresses = [
            ([x.data_ptr() for x in (a, *bs)], [c.data_ptr() for c in cs])
            for a, bs, cs in zip(shards, weights, operands.outs, strict=True)
        ]
        for buffer in (0, 1):
            workspace.buffer(0, buffer, tuple(peers.shape), peers.dtype).copy_(peers)
        kernel = AllGatherMatmulPush(workspace, GatherKernelCall(shards[0], weights[0], num_sms), config)
        self._use = torch.zeros(2, dtype=torch.int32, device=peers.device)
        chunks = torch.tensor(announcements(config, m, k, workspace.world_size)).int().to(peers.device)
        self._chunks, self._due = (x.contiguous() for x in chunks.unbind(1))
        announce = alone_program().function("announce")

        def launch(buffer: int, i: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            kernel.launch(buffer, *addresses[i], TIMEOUT_NS, stream)

        self._announce = [announce.bound(1, 1024, self._params(workspace, buffer), 0) for buffer in (0, 1)]
        self._side = torch.cuda.Stream()
        super().__init__("all_gather_matmul", workspace, launch, operands)

    def _params(self, w: Workspace[Layout], buffer: int) -> _Params:
        flags = w.address + w.layout.flags(buffer) * WORD
        told = flags + w.span  # rank 0's are the first ones of rank 1's
        given = (x.data_ptr() for x in (self._chunks, self._due, self._use[buffer:]))
        counts = self._chunks.numel(), w.layout.flags_per_rank, w.world_size
        return _Params(flags, told, *given, *counts, TRIP, TIMEOUT_NS)

    def begins(self, buffer: int, use: int) -> None:
        layout, size = self.workspace.layout, self.workspace.world_size
        self._use[buffer].fill_(use)
        first = layout.flags(buffer)
        self.workspace.words[first : first + size * layout.flags_per_rank].fill_(use - 1)
        self._side.wait_stream(torch.cuda.current_stream())
        self._announce[buffer](self._side.cuda_stream)

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)


class GatherProblem(RankProblem[GatherPushConfig]):
    free = 2  # for one block of announce.cu: the op takes them in pairs

    def __init__(self, row: Row, world: int, device: torch.device) -> None:
        super().__init__(row, world, device)
        assert row.K is not None
        self.m, self.k, self.n = divisible(row.M, world, "M", row), row.K, divisible(row.N, world, "N", row)
        split = SPLITS.get(row.name, (1,))
        self.ns = [self.n * share // sum(split) for share in split]

    @property
    def received(self) -> int:
        return (self.world - 1) * self.m * self.k * self.row.dtype.itemsize

    def ranked(self) -> list[tuple[float, GatherPushConfig]]:
        of = self.m, tuple(self.ns), self.k, self.world, self.num_sms
        return varied(rank_gather_pushes(AllGatherMatmulProblem(*of, spec=device_spec_of(self.device))))

    def layout(self, config: GatherPushConfig) -> Layout:
        return gather_push_layout(self.m, self.k, self.world, config)

    def trial(self, rooms: list[Workspace[Layout]], configs: list[GatherPushConfig]) -> Trial:
        m, k, ns, dtype, device = self.m, self.k, self.ns, self.row.dtype, self.device
        sets = sets_of((m * k + k * self.n) * dtype.itemsize, device)
        shards = [random_tensor((m, k), dtype, device) for _ in range(sets)]
        weights = [[random_tensor((k, n), dtype, device) / k**0.5 for n in ns] for _ in range(sets)]
        outs = [[torch.empty(self.world * m, n, dtype=dtype, device=device) for n in ns] for _ in range(sets)]
        peers = random_tensor((self.world * m, k), dtype, device)

        def product(i: int) -> None:
            for b, out in zip(weights[i], outs[i], strict=True):
                torch.mm(peers, b, out=out)

        def expected() -> list[Tensor]:
            gathered = torch.cat([shards[0], peers[m:]]).double()
            return [gathered @ b.double() for b in weights[0]]

        operands = GatherOperands(peers, shards, weights, outs)
        candidates: list[Alone] = [
            GatherCandidate(room, config, operands, self.num_sms)
            for room, config in zip(rooms, configs, strict=True)
        ]
        return Trial(product, candidates, outs[0], expected, sets)

    def text(self, config: GatherPushConfig) -> str:
        c = config
        wave = f" first_wave {c.first_wave}" if c.first_wave else ""
        chunks = f"chunks {c.chunk_rows} units {c.k_chunk_columns}"
        return f"{c.tile.block_m}x{c.tile.block_n} comm_sms {c.comm_sms} group {c.group} {chunks}{wave}"
