"""Launches one_shot.cu, and cuBLAS's matmuls after it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Workspace
from ..device.comm.ll_exchange import VECTOR, ExchangeLayout, ExchangeSlots, slots_of
from ..device.gemm import one_shot
from ..device.gemm.gemm import Defines
from ..device.gemm.one_shot import OneShotConfig
from ..device.jit.empty import empty_on
from ..device.jit.program import Program
from . import OP
from .cuda_kernel import row_stride

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        ("a", ctypes.c_uint64),
        ("gathered", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("stride", ctypes.c_uint32),
        ("scale_vectors", ctypes.c_uint32),
        ("side_by_side", ctypes.c_uint32),
    )


_A = _Params.a.offset
# Of a and gathered, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("2Q").pack_into


def one_shot_gather_defines(world_size: int, rank: int) -> Defines:
    """What one_shot.cu is compiled with: any dtype of 16 bits, it only moves them."""
    return (("DTYPE", "bfloat16"), ("WORLD_SIZE", world_size), ("RANK", rank))


class AllGatherMatmulOneShot:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``config.layout``, the same call site on every rank.
        a: an example of the shard, [m, K] of 16 bits as ``cuda_kernel.can_take`` wants it. Every call gets one of these
            sizes and strides.
        config: of ``configs.choose_one_shot_gather``, the same on every rank.
        split_k: shards lie side by side: what is gathered is [m, W * K], the Bs are [W * K, N_i].

    Raises:
        ValueError: the workspace is too small.
    """

    params = _Params  #: the twin of what the kernel takes
    more_defines: Defines = ()

    def __init__(
        self,
        workspace: Workspace[ExchangeLayout],
        a: torch.Tensor,
        config: OneShotConfig,
        *,
        split_k: bool = False,
    ) -> None:
        (m, k), size = a.shape, workspace.world_size
        self.workspace = workspace
        self._rows, self._k = (m, size * k) if split_k else (size * m, k)
        self._empty, self._timeout_ns = empty_on(a.device), 0
        elements = VECTOR // a.element_size()
        p = self._params = self.params(slots_of(workspace))
        p.vectors, p.columns, p.stride = config.vectors, k // elements, row_stride(a) // elements
        p.side_by_side = split_k
        program, layout = self.program(size, workspace.rank), workspace.layout
        self._launch, self._grids = one_shot.launch_of(program, "all_gather_one_shot", p, config, layout)

    @classmethod
    def program(cls, world_size: int, rank: int) -> Program:
        """That which is launched."""
        defines = (*one_shot_gather_defines(world_size, rank), *cls.more_defines)
        return one_shot.one_shot_program(SOURCE, defines)

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """An exchange, and the products.

        Args:
            tensors: the local shard, in any number of dimensions, and the Bs, each [K, N_i].
            results: the products [W, m, N_i], with ``split_k`` [m, N_i]: each a whole storage, whatever its sizes and
                strides say.
            stream: the current one, a CUstream as an integer.

        Raises:
            PeerTimeout, CallAbandoned: as ``Workspace.raise_if_broken``.
        """
        a, *bs = tensors
        gathered = self._empty((self._rows, self._k), (self._k, 1), a.dtype)
        # Three frames: this and two more, on the fast path and on the slow one.
        self.workspace.raise_if_broken(OP, inside=3, grids=self._grids)
        try:
            self.launch(a.data_ptr(), gathered.data_ptr(), timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise
        self.workspace.launched()
        for b, result in zip(bs, results, strict=True):
            torch.mm(gathered, b, out=self._matrix(result, b.shape[1]))

    def _matrix(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """The storage of a result as [rows, columns]."""
        return x if x.dim() == 2 else x.as_strided((self._rows, columns), (columns, 1))

    def launch(self, a: int, gathered: int, timeout_ns: int, stream: int) -> None:
        """The exchange alone, from the address of the shard to that of the gathered ones."""
        with self.workspace.lock:
            p = self._params
            if timeout_ns != self._timeout_ns:
                self._timeout_ns = p.slots.watch.timeout_ns = timeout_ns
            _put_addresses(p, _A, a, gathered)
            self._launch(stream)
