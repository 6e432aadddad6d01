"""Matmul + reduce-scatter of one rank alone (the suite alone).

What rank 0 sends stays: a part for the peer d ranks above comes to lie in rank 0's own buffer, where that of the peer d
ranks below would, which such a peer stores in the same step. The sum is then that of all rank 0's own
products. Parts are sent at the rate of links, but come at once, where links take 1 us.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from alone_rank import TIMEOUT_NS, Alone, RankProblem, Trial
from parts import divisible, random_tensor, sets_of
from registry import Row
from torch import Tensor
from weft.kernels.device.device_spec import device_spec_of
from weft.kernels.matmul_reduce_scatter import cuda_kernel
from weft.kernels.matmul_reduce_scatter.configs import (
    Epilogue,
    MatmulReduceScatterProblem,
    ScatterKernelCall,
    ScatterPushConfig,
    rank_scatter_pushes,
    scatter_push_layout,
)
from weft.symm_mem.layout import NUM_BUFFERS, Layout
from weft.symm_mem.workspace import Workspace

# What stands in kernel.cu, and what stands there for a rank alone.
AT_PEER = (
    "    return weft::on_rank(p.receive_buffer, p.watch, p.buffer, dst) +"
    " place_of(order, t, part, p.watch.rank, dst);\n"
)
AT_HOME = """    const int rank = p.watch.rank, like = (2 * rank - dst + WORLD_SIZE) % WORLD_SIZE;
    Tile own = t;
    own.dst = rank;
    return p.receive_buffer + place_of(order, own, part, like, rank);
"""
LINK_RATE = "constexpr u64 RATE = 356;"
# Bytes a nanosecond that several peers take, as between H200s: there comm_sms meet, and kernel.cu offers a little more.
LINK_RATE_OF_SEVERAL = "constexpr u64 RATE = 330;"

_folders: list[tempfile.TemporaryDirectory[str]] = []  # of sources, until this process ends


@cache
def source(world_size: int) -> Path:
    """kernel.cu and what lies beside it, for a rank alone."""
    there, rate = cuda_kernel.SOURCE, LINK_RATE_OF_SEVERAL if world_size > 2 else LINK_RATE
    _folders.append(tempfile.TemporaryDirectory(prefix="weft-alone-"))
    folder = Path(_folders[-1].name)
    for file in (there, *there.parent.glob("*.cuh")):
        text = file.read_text()
        if file == there:
            for old, new in ((AT_PEER, AT_HOME), (LINK_RATE, rate)):
                if text.count(old) != 1:
                    raise RuntimeError(f"{file}: has not once {old!r}")
                text = text.replace(old, new)
        (folder / file.name).write_text(text)
    return folder / there.name


class Scatter(Alone):
    """A candidate with operands of its own: A [1, W, m, K] and B [K, N]."""

    def __init__(
        self,
        workspace: Workspace[Layout],
        config: ScatterPushConfig,
        lefts: Sequence[Tensor],
        weights: Sequence[Tensor],
        outs: Sequence[Tensor],
        num_sms: int,
    ) -> None:
        addresses = [
            ((a.data_ptr(), b.data_ptr()), (out.data_ptr(),))
            for a, b, out in zip(lefts, weights, outs, strict=True)
        ]
        a, b = lefts[0], weights[0]
        with mock.patch.object(cuda_kernel, "SOURCE", source(workspace.world_size)):
            example = ScatterKernelCall(a, b, num_sms, Epilogue(a.dtype))
            kernel = cuda_kernel.MatmulReduceScatterPush(workspace, example, config)

        def launch(buffer: int, i: int) -> None:
            kernel.launch(buffer, *addresses[i], TIMEOUT_NS, torch.cuda.current_stream().cuda_stream)

        super().__init__("matmul_reduce_scatter", workspace, launch, (lefts, weights, outs))

    def check(self) -> None:
        super().check()
        size = self.workspace.layout.buffer_bytes // 4
        for buffer in range(NUM_BUFFERS):
            if self.workspace.buffer(0, buffer, (size,), torch.int32).any():
                raise RuntimeError(f"buffer {buffer} is not empty behind its use")


class ScatterProblem(RankProblem[ScatterPushConfig]):
    free = 0

    def __init__(self, row: Row, world: int, device: torch.device) -> None:
        super().__init__(row, world, device)
        assert row.K is not None
        self.m, self.k, self.n = divisible(row.M, world, "M", row), divisible(row.K, world, "K", row), row.N

    @property
    def received(self) -> int:
        return (self.world - 1) * self.m * self.n * self.row.dtype.itemsize

    @property
    def problem(self) -> MatmulReduceScatterProblem:
        spec = device_spec_of(self.device)
        return MatmulReduceScatterProblem(self.m, self.n, self.k, self.world, self.num_sms, spec=spec)

    def ranked(self) -> list[tuple[float, ScatterPushConfig]]:
        return [*rank_scatter_pushes(self.problem)]

    def layout(self, config: ScatterPushConfig) -> Layout:
        return scatter_push_layout(config, self.problem)

    def trial(self, rooms: list[Workspace[Layout]], configs: list[ScatterPushConfig]) -> Trial:
        world, m, n, k, dtype, device = self.world, self.m, self.n, self.k, self.row.dtype, self.device
        sets = sets_of((world * m * k + k * n) * dtype.itemsize, device)
        lefts = [random_tensor((1, world, m, k), dtype, device) for _ in range(sets)]
        weights = [random_tensor((k, n), dtype, device) / k**0.5 for _ in range(sets)]
        products = [torch.empty(world * m, n, dtype=dtype, device=device) for _ in range(sets)]
        outs = [torch.empty(m, n, dtype=dtype, device=device) for _ in range(sets)]

        def product(i: int) -> None:
            torch.mm(lefts[i].view(world * m, k), weights[i], out=products[i])

        def expected() -> list[Tensor]:
            return [lefts[0][0].double().sum(0) @ weights[0].double()]

        candidates: list[Alone] = [
            Scatter(room, config, lefts, weights, outs, self.num_sms)
            for room, config in zip(rooms, configs, strict=True)
        ]
        return Trial(product, candidates, outs[:1], expected, sets)

    def text(self, config: ScatterPushConfig) -> str:
        return f"{config.tile.block_m}x{config.tile.block_n} raster_group {config.raster_group}"
