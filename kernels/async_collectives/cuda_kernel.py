"""What a GPU does of an all-gather or reduce-scatter that is waited for later: comm/copy_engine.py, then kernel.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...symm_mem.backends import cuda_state
from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedPiece, engine_of
from ..device.comm.double_buffer import BufferWords
from ..device.jit.program import Program, WaitParams, fields, program_of

VECTOR = 16  #: bytes, of which a part has a multiple
_THREADS, _AT_ONCE = 512, 4  # as in kernel.cu
_BLOCKS_OF_AN_SM = 4


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("watch", WaitParams),
        ("buffer", BufferWords),
        *fields(ctypes.c_uint64, "own slots out vectors"),
    )


def async_program(world_size: int) -> Program:
    """kernel.cu for a number of ranks."""
    return program_of(Path(__file__).with_name("kernel.cu"), WORLD_SIZE=world_size)


@dataclass(frozen=True)
class AsyncProblem:
    """Calls of one kind: parts of ``part_bytes``, of which each rank gets one.

    ``reduce_op``: "" where they are gathered. ``placed``: what is gathered stays in the buffer until it is released.
    """

    part_bytes: int
    reduce_op: str
    dtype: torch.dtype
    placed: bool

    @property
    def kernel(self) -> str:
        if self.placed:
            return "arrive"
        return f"{self.reduce_op}_{str(self.dtype).removeprefix('torch.')}" if self.reduce_op else "gather"


class AsyncCollective:
    """The launches of such calls in one workspace. Made by all ranks together, as it compiles."""

    def __init__(self, workspace: Workspace[Layout], problem: AsyncProblem) -> None:
        self._engine, self._problem, self._rank = engine_of(workspace), problem, workspace.rank
        function = async_program(workspace.world_size).function(problem.kernel)
        vectors = problem.part_bytes // VECTOR
        most = _BLOCKS_OF_AN_SM * cuda_state.state.num_sms(workspace.heap.device)
        grid = max(1, min(most, -(-vectors // (_THREADS * _AT_ONCE))))
        shape = (1, 32) if problem.placed else (grid, _THREADS)
        self._params: list[_Params] = []
        self._leaves: list[Callable[[int], None]] = []
        for buffer in range(NUM_BUFFERS):
            params = _Params(WaitParams.of(workspace), BufferWords.of(workspace, buffer), vectors=vectors)
            params.slots = workspace.address + workspace.layout.buffer(buffer)
            self._params.append(params)
            self._leaves.append(acquire.end_epoch_launcher(workspace, buffer))
        self._receives = [function.bound(*shape, params) for params in self._params]

    def send(self, buffer: int, address: int, timeout_ns: int) -> None:
        """Send what lies at ``address``: the same part to each rank, or to each the one of its number."""
        rank, size, placed = self._rank, self._problem.part_bytes, self._problem.placed
        step = size if self._problem.reduce_op else 0

        def of(peer: int) -> list[CopiedPiece]:
            slot = rank if placed else rank - (rank > peer)
            return [CopiedPiece(address + peer * step, slot * size, size)]

        self._engine.start(buffer, of, timeout_ns, of(rank)[0] if placed else None)

    def receive(self, buffer: int, own: int, out: int, timeout_ns: int, stream: int) -> None:
        """Wait for the peers' parts; unless they are placed, make the result of them, and end the epoch.

        Args:
            own, out: addresses of this rank's own part and of the result.
        """
        params = self._params[buffer]
        params.own, params.out, params.watch.timeout_ns = own, out, timeout_ns
        if self._problem.placed:
            self._engine.join(buffer)  # also for its own part
            self._receives[buffer](stream)
        else:
            self._receives[buffer](stream)
            self._engine.join(buffer)

    def release(self, buffer: int, stream: int) -> None:
        """End the epoch of what was placed."""
        self._leaves[buffer](stream)
