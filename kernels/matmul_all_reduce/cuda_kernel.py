"""Launches kernel.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..device.comm.exchange_launcher import ExchangeLauncher
from ..device.comm.ll_exchange import WARP, ExchangeSlots, ExchangeWorkspace, exchange_program, slots_of
from ..device.gemm.gemm import DTYPES
from ..device.gemm.operands import is_transposed, why_not
from ..device.jit.program import Defines, Program, fields
from .configs import MOST_ROWS, MatmulAllReduceConfig

SOURCE = Path(__file__).with_name("kernel.cu")
REDUCE_OPS = ("sum", "avg")


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "a b out a_stride b_stride"),
        *fields(ctypes.c_int32, "m n k reserved"),
    )


_A = _Params.a.offset
# Of a, b and out, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("3Q").pack_into


def few_rows_program(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, config: MatmulAllReduceConfig, ranks: tuple[int, int]
) -> Program:
    """kernel.cu for such operands. ``ranks``: how many, and which this is."""
    (size, rank), (name, product) = ranks, DTYPES[a.dtype]
    defines: Defines = {
        "DTYPE": name,
        "PRODUCT_TYPE": product,
        "WORLD_SIZE": size,
        "REDUCE": reduce_op,
        "B_ROWS": int(not is_transposed(b)),
        "GROUPS": config.groups,
        "WARPS": config.warps,
    }
    return exchange_program(SOURCE, rank, defines)


def why_no_few_rows_kernel(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why the kernel cannot take A [M, K] and B [K, N]; None if it can."""
    if a.dtype not in DTYPES:
        return f"no kernel takes {a.dtype}"
    return why_not(a, b)


class MatmulAllReduceLauncher(ExchangeLauncher[_Params]):
    """This op: the same bits on every rank. Its operands are A and B, its result is out [M, N], contiguous.

    Addresses are multiples of 16.

    Args:
        place: a workspace with room for ``config.layout``, the same call site on every rank.
        a, b: examples of the operands, for which ``why_no_few_rows_kernel`` is None: A [M, K] and B [K, N]. Every
            launch gets tensors of these sizes, strides and dtype.
        reduce_op: "sum" or "avg".
        config: of ``configs.choose_matmul_all_reduce``, the same on every rank.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """

    def __init__(
        self,
        place: ExchangeWorkspace,
        a: torch.Tensor,
        b: torch.Tensor,
        reduce_op: str,
        config: MatmulAllReduceConfig,
    ) -> None:
        (m, k), n, layout = a.shape, b.shape[1], place.layout
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"reduce_op: is {reduce_op!r}, must be one of {', '.join(REDUCE_OPS)}")
        if not 1 <= m <= MOST_ROWS:
            raise ValueError(f"a: has {m} rows, must have 1 to {MOST_ROWS}")
        if not layout.holds(needed := config.layout(m, layout.world_size)):
            raise ValueError(f"workspace: is {layout}, must hold {needed} for {m} rows and {config}")
        b_rows = not is_transposed(b)
        super().__init__()
        p = _Params(slots_of(place))
        # The stride of a single row may be anything.
        p.a_stride, p.b_stride = k if m == 1 else a.stride(0), b.stride(0) if b_rows else b.stride(1)
        p.m, p.n, p.k = m, n, k
        self.grids = (config.blocks,)
        program = few_rows_program(a, b, reduce_op, config, (layout.world_size, place.rank))
        self._prepare(program.function("matmul_all_reduce"), config.blocks, config.warps * WARP, p)

    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        _put_addresses(self._params[0], _A, *operands, *results)
        return self._launches[0]
