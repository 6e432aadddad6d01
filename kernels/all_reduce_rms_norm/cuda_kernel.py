"""Launches kernel.cu for contiguous CUDA tensors, as many rows at a time as a workspace takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..device.collective.combine import CombineShape, CombineSource, put_operands
from ..device.comm.exchange_launcher import ExchangeLauncher
from ..device.comm.ll_exchange import (
    DTYPES,
    VECTOR,
    ExchangeSlots,
    ExchangeWorkspace,
    exchange_program,
    in_turn,
    slots_of,
)
from ..device.jit.program import Program, fields
from .configs import (
    CLUSTERS,
    MAX_WORLD_SIZE,
    AllReduceRmsNormConfig,
    all_reduce_rms_norm_layout,
    choose_all_reduce_rms_norm,
    most_vectors,
    shape,
)
from .quant import SCALE_OPS
from .reference import NormKind

SOURCE = Path(__file__).with_name("kernel.cu")


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "x residual weight bias normed sums scales"),
        ("smallest", ctypes.c_double),
        *fields(ctypes.c_uint32, "rows vectors"),
        *fields(ctypes.c_float, "eps elements offset"),
    )


class _CombineParams(_Params):
    """The same with CHOICES."""

    _fields_: ClassVar[Any] = (("combine", CombineSource),)


_X = _Params.x.offset
_COMBINE = _CombineParams.combine.offset
# From x to scales, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("7Q").pack_into


def why_no_norm_kernel(
    hidden: int, dtype: torch.dtype, world_size: int, most_cluster: int = CLUSTERS[-1]
) -> str | None:
    """Why the kernel cannot take rows of ``hidden`` elements on so many ranks; None if it can."""
    if world_size > MAX_WORLD_SIZE:
        return f"the group has {world_size} ranks, the kernel takes up to {MAX_WORLD_SIZE}"
    if hidden * dtype.itemsize % VECTOR:
        return f"rows of {hidden} x {dtype} are no multiple of {VECTOR} bytes"
    if hidden * dtype.itemsize // VECTOR > (most := most_vectors(world_size, most_cluster)):
        return f"rows of {hidden} x {dtype} are longer than {most * VECTOR} bytes"
    return None


def norm_defines(
    world_size: int, dtype: torch.dtype, share: tuple[int, int], norm: NormKind
) -> dict[str, str | int]:
    """What kernel.cu must know, in addition to the rank. ``share``: blocks of a team, and vectors of a row that a
    thread holds."""
    # In float32, and where nothing is added, the rounded sum is the sum.
    rounded = norm.round_sum or not norm.residual or dtype == torch.float32
    quant, combine = norm.quant, norm.combine or CombineShape(0, 0, False, False)
    switches = {
        "RESIDUAL": norm.residual,
        "ROUND_SUM": rounded,
        "WIDE_WEIGHT": norm.wide_weight and dtype != torch.float32,
        "OFFSET": norm.weight_offset != 0,
        "SUBTRACT_MEAN": norm.subtract_mean,
        "WEIGHT": norm.weight,
        "BIAS": norm.bias,
        "QUANT": 0 if quant is None else 1 + quant.dynamic,
        "SCALE_OP": 0 if quant is None else SCALE_OPS.index(quant.scale_op),
        "E5M2": quant is not None and quant.out_dtype == torch.float8_e5m2,
    }
    sizes = {"WORLD_SIZE": world_size, "CLUSTER": share[0], "VECTORS": share[1]}
    return {
        "DTYPE": DTYPES[dtype],
        **sizes,
        **{name: int(on) for name, on in switches.items()},
        **combine.defines,
    }


def norm_program(
    vectors: int, dtype: torch.dtype, norm: NormKind, config: AllReduceRmsNormConfig, ranks: tuple[int, int]
) -> Program:
    """That for rows of so many vectors. ``ranks``: how many, and which this is."""
    size, rank = ranks
    share = config.cluster, shape(1, vectors, size, config).per_thread
    return exchange_program(SOURCE, rank, norm_defines(size, dtype, share, norm))


class AllReduceRmsNormLauncher(ExchangeLauncher[_Params]):
    """This op: ``sums`` = the local residual + all_reduce(x), ``normed`` = their norm by the local weight and bias.

    Its operands are x, or y, slots and weights, and those of residual, weight, bias, a given scale and shared that
    there are. Its results are normed, the rows' scales if there are some, and sums. All are contiguous tensors at
    multiples of 16; sums may be residual or x, unless what is normed becomes fp8 or x is put together.

    Args:
        place: a workspace with room for ``all_reduce_rms_norm_layout``; the same call site on every rank.
        rows, hidden: x is [rows, hidden], 1 or more each; ``why_no_norm_kernel`` must be None.
        norm: what is computed.
        config: the same on every rank; if None, that of ``choose_all_reduce_rms_norm``.

    Raises:
        ValueError: the kernel does not take such rows, or the workspace is too small.
    """

    def __init__(
        self,
        place: ExchangeWorkspace,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        norm: NormKind,
        config: AllReduceRmsNormConfig | None = None,
    ) -> None:
        size = place.layout.world_size
        if (problem := why_no_norm_kernel(hidden, dtype, size)) is not None:
            raise ValueError(f"all_reduce_rms_norm: {problem}")
        vectors = hidden * dtype.itemsize // VECTOR
        config = config or choose_all_reduce_rms_norm(rows, vectors, size)
        wanted = shape(rows, vectors, size, config)
        if not place.layout.holds(needed := all_reduce_rms_norm_layout(rows, vectors, size, config)):
            raise ValueError(f"workspace: is {place.layout}, must hold {needed}")
        self._combine = combine = norm.combine
        has_scale = norm.quant is not None and not norm.quant.dynamic
        places, at = [0], 1 if combine is None else 3
        for there in (norm.residual, norm.weight, norm.bias, has_scale):
            places.append(at if there else -1)
            at += there
        self._given = itemgetter(*places)  # of the operands and a 0, which stands for what there is not
        super().__init__()
        # Of each launch, in bytes: in tensors like x, in what is normed, and in the rows' scales.
        self._offsets: list[tuple[int, int, int]] = []
        of_normed = dtype if norm.quant is None else norm.quant.out_dtype
        has_scales = norm.quant is not None and norm.quant.dynamic
        for start in range(0, rows, wanted.rows):
            count = min(wanted.rows, rows - start)
            now = shape(count, vectors, size, config)
            program = norm_program(vectors, dtype, norm, config, (size, place.rank))
            if config.in_turn:
                program = in_turn(program)
            function = program.function(config.form)
            taken = _Params if combine is None else _CombineParams
            params = taken(slots_of(place), rows=count, vectors=vectors, eps=norm.eps, elements=hidden)
            if combine is not None:
                params.combine = combine.source(rows, vectors, start)
            params.offset = norm.weight_offset
            if norm.quant is not None and norm.quant.smallest is not None:
                params.smallest = norm.quant.smallest
            self._prepare(function, now.blocks, wanted.threads, params)
            self.grids += (now.blocks,)
            elements = start * hidden
            self._offsets.append(
                (elements * dtype.itemsize, elements * of_normed.itemsize, 4 * start * has_scales)
            )

    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        x, residual, weight, bias, scale = self._given((*operands, 0))
        normed, *written, sums = results
        scales, combine = written[0] if written else scale, self._combine
        for (start, of_normed, of_scales), params in zip(self._offsets, self._params, strict=True):
            added = residual + start if residual else 0
            to = normed + of_normed, sums + start, scales + of_scales
            if combine is not None:
                put_operands(params, _COMBINE, [*operands[:3], *operands[-1:][: combine.shared]])
            _put_addresses(params, _X, x + start, added, weight, bias, *to)
        return self._launch_all if len(self._launches) > 1 else self._launches[0]

    def _launch_all(self, stream: int) -> None:
        for ready in self._launches:
            ready(stream)
