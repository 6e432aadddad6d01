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
from ..device.gemm.one_shot import OneShotConfig
from ..device.gemm.scaling import ScaleKind, scaled_mm_out
from ..device.jit import program
from ..device.jit.empty import empty_on
from ..device.jit.program import Program, fields
from . import OP
from .configs import SCALED_OP, Epilogue, ScatterKernelCall

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "c out bias residual"),
        *fields(ctypes.c_uint32, "vectors columns"),
        *fields(ctypes.c_int32, "average reserved"),
    )


_C = _Params.c.offset
_put_addresses = struct.Struct("4Q").pack_into


class MatmulReduceScatterOneShot(one_shot.OneShotCall):
    """This op. ``example``: a call of the sizes, strides and dtype that every call has, of 16 or 32 bits and one
    product; each gets the bias and the residual that its epilogue names, contiguous. ``config``: of
    ``configs.choose_one_shot_scatter``."""

    op = OP

    def __init__(
        self, workspace: Workspace[ExchangeLayout], example: ScatterKernelCall, config: OneShotConfig
    ) -> None:
        a, size, epilogue = example.a, workspace.world_size, example.epilogue
        m, n = a.shape[2], example.columns(size)
        self._epilogue, self._split_n, self._scaled = epilogue, example.split_n, example.scaled
        self._partial, self._size, self._empty = (size * m, n), size, empty_on(a.device)
        self._parts = a.shape[1:], a.stride()[1:]
        self._rows = None if example.split_n else _rows(a)
        self._dtype = sent_as(example)
        elements = VECTOR // self._dtype.itemsize
        p = _Params(slots_of(workspace))
        p.vectors, p.columns, p.average = config.vectors, n // elements, epilogue.average
        made = self.program(self._dtype, epilogue, (size, workspace.rank))
        super().__init__(workspace, config, made, "reduce_scatter_one_shot", p)

    @staticmethod
    def program(dtype: torch.dtype, epilogue: Epilogue, ranks: tuple[int, int]) -> Program:
        """That which is launched for partial results of ``dtype``. ``ranks``: how many, and which this is."""
        size, rank = ranks
        return program.program_of(
            SOURCE,
            DTYPE=DTYPES[dtype],
            WORLD_SIZE=size,
            RANK=rank,
            OUT_FLOAT32=int(epilogue.out_dtype == torch.float32),
            BIAS=int(epilogue.bias),
            RESIDUAL=int(epilogue.residual),
        )

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """The product, and an exchange.

        Args:
            tensors: A, in any number of dimensions; B; and what the epilogue adds.
            results: out, with as many elements as [m, N], contiguous.
            stream: the current one, a CUstream as an integer.
        """
        given = self._product(tensors), results[0], *tensors[2:]
        self._exchange([x.data_ptr() for x in given], timeout_ns, stream)

    def _product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b = tensors[:2]
        partial = self._empty(self._partial, (self._partial[1], 1), self._dtype)
        if self._rows is None:
            parts = a.as_strided(*self._parts)
            columns = partial.shape[1]
            if self._split_n:
                parts = parts.expand(self._size, -1, -1)
                bs = b.unflatten(1, (self._size, columns)).movedim(1, 0)
            else:
                bs = b.expand(self._size, -1, -1)
            torch.bmm(parts, bs, out=partial.view(self._size, -1, columns))
        else:  # into given memory, also because autocast would change other matmuls
            torch.mm(a if a.dim() == 2 else a.as_strided(*self._rows), b, out=partial)
        return partial

    def _put(self, *addresses: int) -> None:
        """Of the partial result [W, m, N], of out [m, N], and of what the epilogue adds."""
        partial, out, *terms = addresses
        bias = terms[0] if self._epilogue.bias else 0
        residual = terms[-1] if self._epilogue.residual else 0
        _put_addresses(self._params, _C, partial, out, bias, residual)


class ScaledMatmulReduceScatterOneShot(MatmulReduceScatterOneShot):
    """The same of fp8 operands, after ``torch._scaled_mm``.

    ``call`` then takes A, in any number of dimensions; B; their scales, of torch's shapes; and the bias, if there is
    one.
    """

    op = SCALED_OP

    def _product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b, a_scale, b_scale, *bias = tensors
        scaled, (m, n) = self._scaled, self._partial
        assert scaled is not None
        partial = self._empty((m, n), (n, 1), self._dtype)
        rows = a.reshape(m, a.shape[-1])
        if scaled.kind is ScaleKind.ROWS:
            a_scale = a_scale.reshape(m, 1)
        scaled_mm_out(scaled, rows, b, (a_scale, b_scale), bias[0] if bias else None, partial)
        return partial


def sent_as(call: ScatterKernelCall) -> torch.dtype:
    """That of partial results."""
    return call.a.dtype if call.scaled is None else call.epilogue.out_dtype


def _rows(a: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of A [1, W, m, K] as [W * m, K]; None where its rows do not lie at one distance."""
    try:
        rows = a.view(-1, a.shape[-1])
    except RuntimeError:
        return None
    return rows.shape, rows.stride()
