"""Launches one_shot.cu, which says what it does, behind cuBLAS's product."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import one_shot
from ..device.gemm import DTYPES, Defines
from ..device.half import Half, watch
from ..device.one_shot import VECTOR, OneShotConfig
from ..device.program import Watch
from .configs import Epilogue, one_shot_needs

SOURCE = Path(__file__).parent / "one_shot.cu"


class _Params(ctypes.Structure):
    """The twin of ``Params`` in one_shot.cu."""

    _fields_ = (
        ("watch", Watch),
        ("half", Half),
        ("c", ctypes.c_uint64),
        ("inbox", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("average", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def defines(dtype: torch.dtype, world_size: int, epilogue: Epilogue) -> Defines:
    """What one_shot.cu is compiled with for partial results of ``dtype``."""
    return (
        ("DTYPE", DTYPES[dtype][0]),
        ("WORLD_SIZE", world_size),
        ("OUT_FLOAT32", int(epilogue.out_dtype == torch.float32)),
        ("BIAS", int(epilogue.bias)),
        ("RESIDUAL", int(epilogue.residual)),
    )


class MatmulReduceScatterOneShot:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``configs.one_shot_needs``, the same call site on every rank.
        a, b: examples of the operands: A [1, W, m, K] and B [K, N] of 16 bits. Every call gets tensors of these sizes,
            strides and dtype.
        config: of ``configs.choose_one_shot``, the same on every rank.
        epilogue: what becomes of the sum. Every call gets the bias and the residual that it names, contiguous.

    Raises:
        ValueError: the workspace is too small.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        a: torch.Tensor,
        b: torch.Tensor,
        config: OneShotConfig,
        epilogue: Epilogue,
    ) -> None:
        (_, size, m, _), n, layout = a.shape, b.shape[1], workspace.layout
        nbytes, flags = one_shot_needs(m, n, size, config)
        if layout.flags_per_rank < flags or layout.half_bytes < nbytes:
            raise ValueError(f"workspace: {layout} is too small for results of {m} x {n} {a.dtype}")
        self.workspace, self._epilogue = workspace, epilogue
        self._partial, self._size = (size * m, n), size
        self._parts = a.shape[1:], a.stride()[1:]
        self._rows = _rows(a)
        elements = VECTOR // a.element_size()
        self._params = []
        for half in (0, 1):
            p = _Params(watch(workspace), Half.of(workspace, half))
            p.inbox = workspace.address + layout.half(half)
            p.vectors, p.columns, p.average = m * n // elements, n // elements, epilogue.average
            self._params.append(p)
        program = one_shot.program(SOURCE, defines(a.dtype, size, epilogue))
        self._launches = one_shot.launches(program, "reduce_scatter_one_shot", self._params, config)

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """The product, and a whole use of a half.

        Args:
            tensors: A, in any number of dimensions; B; and what the epilogue adds.
            results: out, with as many elements as [m, N], contiguous.
            stream: the current one, a CUstream as an integer.
        """
        partial = self._product(tensors[0], tensors[1])
        half = self.workspace.next_half()
        try:
            terms = [term.data_ptr() for term in tensors[2:]]
            self.launch(half, partial.data_ptr(), terms, results[0].data_ptr(), timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        partial = a.new_empty(self._partial)
        if self._rows is None:
            parts = a.as_strided(*self._parts)
            torch.bmm(parts, b.expand(self._size, -1, -1), out=partial.view(self._size, -1, b.shape[1]))
        else:  # into given memory, also because autocast would have its way with other products
            torch.mm(a if a.dim() == 2 else a.as_strided(*self._rows), b, out=partial)
        return partial

    def launch(
        self, half: int, partial: int, terms: Sequence[int], out: int, timeout_ns: int, stream: int
    ) -> None:
        """The use of the half alone, from the addresses of the partial result [W, m, N] and of what the epilogue adds,
        to that of out [m, N]."""
        with self.workspace.lock:
            p = self._params[half]
            p.c, p.out, p.watch.timeout_ns = partial, out, timeout_ns
            if self._epilogue.bias:
                p.bias = terms[0]
            if self._epilogue.residual:
                p.residual = terms[-1]
            self._launches[half](stream)


def _rows(a: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of A [1, W, m, K] as [W * m, K]; None where its rows do not lie at one distance."""
    try:
        rows = a.view(-1, a.shape[-1])
    except RuntimeError:
        return None
    return rows.shape, rows.stride()
