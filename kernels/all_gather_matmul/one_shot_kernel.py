"""Launches one_shot.cu, and cuBLAS's matmuls after it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from ...symm_mem.workspace import Workspace
from ..device.comm.ll_exchange import VECTOR, ExchangeLayout, ExchangeSlots, slots_of
from ..device.gemm import one_shot
from ..device.gemm.one_shot import OneShotConfig
from ..device.jit import program
from ..device.jit.empty import empty_on
from ..device.jit.program import Defines, Program, fields
from . import OP
from .configs import GatherKernelCall
from .cuda_kernel import row_stride

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "a gathered"),
        *fields(ctypes.c_uint32, "vectors columns stride scale_vectors side_by_side"),
    )


_A = _Params.a.offset
_put_pair = struct.Struct("2Q").pack_into


class AllGatherMatmulOneShot(one_shot.OneShotCall):
    """This op. ``example``: a call of the sizes and strides that every call has, of 16 bits; ``config``: of
    ``configs.choose_one_shot_gather``."""

    op = OP
    params = _Params  #: the twin of what the kernel takes
    more_defines: ClassVar[Defines] = {}

    def __init__(
        self, workspace: Workspace[ExchangeLayout], example: GatherKernelCall, config: OneShotConfig
    ) -> None:
        a, size = example.a, workspace.world_size
        m, k = a.shape
        self._rows, self._k = (m, size * k) if example.split_k else (size * m, k)
        self._empty, elements = empty_on(a.device), VECTOR // a.element_size()
        p = self.params(slots_of(workspace))
        p.vectors, p.columns, p.stride = config.vectors, k // elements, row_stride(a) // elements
        p.side_by_side = example.split_k
        super().__init__(workspace, config, self.program(size, workspace.rank), "all_gather_one_shot", p)

    @classmethod
    def program(cls, world_size: int, rank: int) -> Program:
        """That which is launched, of any dtype of 16 bits: it only moves them."""
        ranks = {"WORLD_SIZE": world_size, "RANK": rank}
        return program.program_of(SOURCE, DTYPE="bfloat16", **ranks, **cls.more_defines)

    def _put(self, *addresses: int) -> None:
        _put_pair(self._params, _A, *addresses)

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """An exchange, and the products.

        Args:
            tensors: the local shard, in any number of dimensions, and the Bs, each [K, N_i].
            results: the products [W, m, N_i], with ``split_k`` [m, N_i]: each a whole storage, whatever its sizes and
                strides say.
            stream: the current one, a CUstream as an integer.
        """
        a, *bs = tensors
        gathered = self._empty((self._rows, self._k), (self._k, 1), a.dtype)
        self._exchange((a.data_ptr(), gathered.data_ptr()), timeout_ns, stream)
        self.workspace.launched()
        for b, result in zip(bs, results, strict=True):
            torch.mm(gathered, b, out=self._matrix(result, b.shape[1]))

    def _matrix(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """The storage of a result as [rows, columns]."""
        return x if x.dim() == 2 else x.as_strided((self._rows, columns), (columns, 1))
