"""Launches one_shot.cu, which says what it does, and cuBLAS's products behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import one_shot
from ..device.gemm import Defines
from ..device.half import Half, watch
from ..device.one_shot import VECTOR, OneShotConfig
from ..device.program import Watch
from .configs import one_shot_layout
from .cuda_kernel import row_stride

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("watch", Watch),
        ("half", Half),
        ("a", ctypes.c_uint64),
        ("inbox", ctypes.c_uint64),
        ("gathered", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("stride", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def defines(world_size: int) -> Defines:
    """What one_shot.cu is compiled with."""
    return (("WORLD_SIZE", world_size),)


class AllGatherMatmulOneShot:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``configs.one_shot_layout``, the same call site on every rank.
        a: an example of the shard, [m, K] of 16 bits as ``cuda_kernel.can_take`` wants it. Every call gets one of these
            sizes and strides.
        config: of ``configs.choose_one_shot``, the same on every rank.

    Raises:
        ValueError: the workspace is too small.
    """

    def __init__(self, workspace: Workspace[Layout], a: torch.Tensor, config: OneShotConfig) -> None:
        (m, k), size, layout = a.shape, workspace.world_size, workspace.layout
        needed = one_shot_layout(m, k, size, config)
        if layout.flags_per_rank < needed.flags_per_rank or layout.half_bytes < needed.half_bytes:
            raise ValueError(f"workspace: {layout} is too small for shards of {m} x {k} {a.dtype}")
        self.workspace, self._rows, self._k = workspace, size * m, k
        elements = VECTOR // a.element_size()
        self._params = []
        for half in (0, 1):
            p = _Params(watch(workspace), Half.of(workspace, half))
            p.inbox = workspace.address + layout.half(half)
            p.vectors, p.columns, p.stride = m * k // elements, k // elements, row_stride(a) // elements
            self._params.append(p)
        program = one_shot.program(SOURCE, defines(size))
        self._launches = one_shot.launches(program, "all_gather_one_shot", self._params, config)

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """A whole use of a half, and the products.

        Args:
            tensors: the own shard, in any number of dimensions, and the Bs, each [K, N_i].
            results: the products [W, m, N_i], and behind them the gathered shards [W, m, K] if they are wanted: each a
                whole storage, whatever its sizes and strides say.
            stream: the current one, a CUstream as an integer.
        """
        a, *bs = tensors
        gathered = results[-1] if len(results) > len(bs) else a.new_empty((self._rows, self._k))
        half = self.workspace.next_half()
        try:
            self.launch(half, a.data_ptr(), gathered.data_ptr(), timeout_ns, stream)
            rows = self._matrix(gathered, self._k)
            for b, result in zip(bs, results, strict=False):
                torch.mm(rows, b, out=self._matrix(result, b.shape[1]))
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise

    def _matrix(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """The storage of a result as [W * m, columns]."""
        return x if x.dim() == 2 else x.as_strided((self._rows, columns), (columns, 1))

    def launch(self, half: int, a: int, gathered: int, timeout_ns: int, stream: int) -> None:
        """The use of the half alone, from the address of the shard to that of the gathered ones [W, m, K]."""
        with self.workspace.lock:
            p = self._params[half]
            p.a, p.gathered, p.watch.timeout_ns = a, gathered, timeout_ns
            self._launches[half](stream)
