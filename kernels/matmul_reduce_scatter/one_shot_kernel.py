"""Launches one_shot.cu after cuBLAS's matmul."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Workspace
from ..device.comm.ll_exchange import DTYPES, VECTOR, ExchangeLayout, ExchangeSlots, slots_of
from ..device.gemm import one_shot
from ..device.gemm.gemm import Defines
from ..device.gemm.one_shot import OneShotConfig
from ..device.gemm.scaling import ScaleKind, aligned_scale
from ..device.jit.empty import empty_on
from ..device.jit.program import Program
from . import OP
from .configs import SCALED_OP, Epilogue, ScatterKernelCall

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        ("c", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("average", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


_C = _Params.c.offset
# From c to residual, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("4Q").pack_into


def one_shot_scatter_defines(dtype: torch.dtype, world_size: int, rank: int, epilogue: Epilogue) -> Defines:
    """What one_shot.cu is compiled with for partial results of ``dtype``."""
    return (
        ("DTYPE", DTYPES[dtype]),
        ("WORLD_SIZE", world_size),
        ("RANK", rank),
        ("OUT_FLOAT32", int(epilogue.out_dtype == torch.float32)),
        ("BIAS", int(epilogue.bias)),
        ("RESIDUAL", int(epilogue.residual)),
    )


class MatmulReduceScatterOneShot:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``config.layout``, the same call site on every rank.
        a, b: examples of the operands: A [1, W, m, K] and B [K, N] of 16 or 32 bits, or with ``split_n``
            [1, 1, m, K] and [K, W * N]. Every call gets tensors of these sizes, strides and dtype.
        config: of ``configs.choose_one_shot_scatter``, the same on every rank.
        epilogue: what becomes of the sum. Every call gets the bias and the residual that it names, contiguous.

    Raises:
        ValueError: the workspace is too small.
    """

    op = OP  #: what errors say

    def __init__(
        self,
        workspace: Workspace[ExchangeLayout],
        a: torch.Tensor,
        b: torch.Tensor,
        config: OneShotConfig,
        epilogue: Epilogue,
        *,
        split_n: bool = False,
    ) -> None:
        size, m = workspace.world_size, a.shape[2]
        n = b.shape[1] // size if split_n else b.shape[1]
        self.workspace, self._epilogue, self._split_n = workspace, epilogue, split_n
        self._partial, self._size, self._empty = (size * m, n), size, empty_on(a.device)
        self._timeout_ns = 0
        self._parts = a.shape[1:], a.stride()[1:]
        self._rows = None if split_n else _rows(a)
        self._dtype = self._sent_as(a, epilogue)
        elements = VECTOR // self._dtype.itemsize
        p = self._params = _Params(slots_of(workspace))
        p.vectors, p.columns, p.average = config.vectors, n // elements, epilogue.average
        program, layout = self.program(self._dtype, epilogue, (size, workspace.rank)), workspace.layout
        self._launch, self._grids = one_shot.launch_of(program, "reduce_scatter_one_shot", p, config, layout)

    @staticmethod
    def program(dtype: torch.dtype, epilogue: Epilogue, ranks: tuple[int, int]) -> Program:
        """That which is launched for partial results of ``dtype``. ``ranks``: how many, and which this is."""
        return one_shot.one_shot_program(SOURCE, one_shot_scatter_defines(dtype, *ranks, epilogue))

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """The product, and an exchange.

        Args:
            tensors: A, in any number of dimensions; B; and what the epilogue adds.
            results: out, with as many elements as [m, N], contiguous.
            stream: the current one, a CUstream as an integer.

        Raises:
            PeerTimeout, CallAbandoned: as ``Workspace.raise_if_broken``.
        """
        partial = self._product(tensors)
        # Three frames: this and two more, on the fast path and on the slow one.
        self.workspace.raise_if_broken(self.op, inside=3, grids=self._grids)
        try:
            terms = [term.data_ptr() for term in tensors[2:]]
            self.launch(partial.data_ptr(), terms, results[0].data_ptr(), timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise

    def _sent_as(self, a: torch.Tensor, epilogue: Epilogue) -> torch.dtype:
        return a.dtype

    def _product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b = tensors[:2]
        partial = self._empty(self._partial, (self._partial[1], 1), self._dtype)
        if self._rows is None:
            parts = a.as_strided(*self._parts)
            columns = partial.shape[1]
            if self._split_n:
                parts, bs = (
                    parts.expand(self._size, -1, -1),
                    b.unflatten(1, (self._size, columns)).movedim(1, 0),
                )
            else:
                bs = b.expand(self._size, -1, -1)
            torch.bmm(parts, bs, out=partial.view(self._size, -1, columns))
        else:  # into given memory, also because autocast would change other matmuls
            torch.mm(a if a.dim() == 2 else a.as_strided(*self._rows), b, out=partial)
        return partial

    def launch(self, partial: int, terms: Sequence[int], out: int, timeout_ns: int, stream: int) -> None:
        """The exchange alone, from the addresses of the partial result [W, m, N] and of what the epilogue adds, to that
        of out [m, N]."""
        with self.workspace.lock:
            p = self._params
            if timeout_ns != self._timeout_ns:
                self._timeout_ns = p.slots.watch.timeout_ns = timeout_ns
            bias = terms[0] if self._epilogue.bias else 0
            residual = terms[-1] if self._epilogue.residual else 0
            _put_addresses(p, _C, partial, out, bias, residual)
            self._launch(stream)


class ScaledMatmulReduceScatterOneShot(MatmulReduceScatterOneShot):
    """The same of fp8 operands, after ``torch._scaled_mm``.

    ``call`` then takes A, in any number of dimensions; B; their scales, of torch's shapes; and the bias, if there is
    one.
    """

    op = SCALED_OP

    def __init__(
        self, workspace: Workspace[ExchangeLayout], example: ScatterKernelCall, config: OneShotConfig
    ) -> None:
        assert example.scaled is not None
        super().__init__(workspace, example.a, example.b, config, example.epilogue)
        self._scaled = example.scaled

    def _sent_as(self, a: torch.Tensor, epilogue: Epilogue) -> torch.dtype:
        return epilogue.out_dtype

    def _product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b, a_scale, b_scale, *bias = tensors
        scaled, (m, n) = self._scaled, self._partial
        partial = self._empty((m, n), (n, 1), self._dtype)
        rows = a.reshape(m, a.shape[-1])
        if scaled.kind is ScaleKind.ROWS:
            a_scale = a_scale.reshape(m, 1)
        how = bias[0] if bias else None, None, self._dtype, not scaled.promote
        torch.ops.aten._scaled_mm.out(
            rows, b, aligned_scale(a_scale), aligned_scale(b_scale), *how, out=partial
        )
        return partial


def _rows(a: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of A [1, W, m, K] as [W * m, K]; None where its rows do not lie at one distance."""
    try:
        rows = a.view(-1, a.shape[-1])
    except RuntimeError:
        return None
    return rows.shape, rows.stride()
