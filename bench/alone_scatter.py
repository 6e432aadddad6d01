"""Matmul + reduce-scatter of one rank alone (alone.py).

What rank 0 stores at its peers mirror.cu stores in its half as well, as what they would have stored there: the sum is
then that of all rank 0's own products. It comes as long after rank 0's stores as that kernel takes, 1 to 1.5 us as
links do, and no faster than links bring it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from alone_rank import TIMEOUT_NS, Alone, Problem, Trial
from parts import divisible, random_tensor, sets_of
from registry import Row
from torch import Tensor
from weft.kernels.device import gemm
from weft.kernels.device.half import Half
from weft.kernels.device.program import Program, Watch
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, PushConfig, push_layout, push_ranked
from weft.kernels.matmul_reduce_scatter.cuda_kernel import MatmulReduceScatterPush, defines
from weft.symm_mem import Workspace
from weft.symm_mem.workspace import HALVES, Layout

# Bytes a nanosecond that all peers together send to a rank, as between H200s.
RATE_OF_TWO, RATE = 356, 330
BLOCKS, THREADS = 4, 1024  # of mirror.cu, a multiprocessor each
FOLLOWED = 2  # sending warps by a warp of it


class Params(ctypes.Structure):
    """The twin of ``Params`` in mirror.cu."""

    _fields_ = (
        ("watch", Watch),
        ("half", Half),
        ("inbox", ctypes.c_uint64),
        ("batches", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("band", ctypes.c_int32),
        ("clusters", ctypes.c_int32),
        ("rate", ctypes.c_uint32),
    )


def program(kernel: gemm.Defines) -> Program:
    """For what kernel.cu is compiled with."""
    return Program(Path(__file__).parent / "mirror.cu", defines=dict(kernel))


class Scatter(Alone):
    """A candidate with operands of its own: A [1, W, m, K] and B [K, N]."""

    def __init__(
        self,
        workspace: Workspace[Layout],
        config: PushConfig,
        lefts: Sequence[Tensor],
        weights: Sequence[Tensor],
        outs: Sequence[Tensor],
        num_sms: int,
    ) -> None:
        addresses = [
            ((a.data_ptr(), b.data_ptr()), (out.data_ptr(),))
            for a, b, out in zip(lefts, weights, outs, strict=True)
        ]
        (_, size, m, _), b, epilogue = lefts[0].shape, weights[0], Epilogue(lefts[0].dtype)
        kernel = MatmulReduceScatterPush(workspace, lefts[0], b, config, epilogue, num_sms=num_sms)
        function = program(defines(b, config, size, 0, epilogue)).function("mirror")

        def launch(half: int, i: int) -> None:
            kernel.launch(half, *addresses[i], TIMEOUT_NS, torch.cuda.current_stream().cuda_stream)

        clusters = num_sms // 2
        assert 4 * clusters <= BLOCKS * THREADS // 32 * FOLLOWED, "warps that nobody follows"
        given = [params(workspace, half, config, m, b.shape[1], clusters) for half in range(HALVES)]
        mirrors = [function.bound(BLOCKS, THREADS, p) for p in given]
        super().__init__("matmul_reduce_scatter", workspace, launch, mirrors, (lefts, weights, outs))

    def cleared(self, half: int) -> None:
        """What the peers took: as they would have done in memory of their own."""
        for peer in range(1, self.workspace.world_size):
            self._words(peer, half).zero_()

    def check(self) -> None:
        super().check()
        for half in range(HALVES):
            if self._words(0, half).any():
                raise RuntimeError(f"half {half} is not empty behind its use")

    def _words(self, rank: int, half: int) -> Tensor:
        slots = self.workspace.world_size - 1
        # A peer's other slots are what its other peers send: nobody does.
        size = self.workspace.layout.half_bytes // (1 if rank == 0 else slots) // 4
        return self.workspace.half(rank, half, (size,), torch.int32)


def params(w: Workspace[Layout], half: int, config: PushConfig, m: int, n: int, clusters: int) -> Params:
    """For rank 0's results [m, N], which so many clusters compute."""
    clock = Watch.of(w, TIMEOUT_NS)
    clock.words = w.address + w.span  # rank 1's, whose kernels do not run
    inbox, rate = w.address + w.layout.half(half), RATE_OF_TWO if w.world_size == 2 else RATE
    return Params(clock, Half.of(w, half), inbox, 1, m, n, config.band, clusters, rate)


class ScatterProblem(Problem[PushConfig]):
    free = BLOCKS

    def __init__(self, row: Row, world: int, device: torch.device) -> None:
        super().__init__(row, world, device)
        assert row.K is not None
        self.m, self.k, self.n = divisible(row.M, world, "M", row), divisible(row.K, world, "K", row), row.N

    @property
    def received(self) -> int:
        return (self.world - 1) * self.m * self.n * self.row.dtype.itemsize

    def ranked(self) -> list[tuple[float, PushConfig]]:
        return push_ranked(self.m, self.n, self.k, self.world, self.num_sms)

    def layout(self, config: PushConfig) -> Layout:
        return push_layout(self.m, self.n, config, self.world, self.num_sms)

    def trial(self, rooms: list[Workspace[Layout]], configs: list[PushConfig]) -> Trial:
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

    def text(self, config: PushConfig) -> str:
        c = config
        staged = "" if c.staged else " not staged"
        return f"{c.tile.block_m}x{c.tile.block_n} band {c.band}{staged}"
