"""Launches kernel.cu for any contiguous CUDA tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...symm_mem.backends import cuda_state
from ..device.collective.combine import CombinedSum, CombineLauncher, CombineSource
from ..device.collective.launch import reduction_program
from ..device.comm.exchange_launcher import ExchangeLauncher
from ..device.comm.ll_exchange import DTYPES, VECTOR, ExchangeSlots, ExchangeWorkspace, in_turn, slots_of
from ..device.jit.program import Function, Program, fields
from . import configs
from .configs import AllReduceConfig, choose_all_reduce

REDUCE_OPS = ("sum", "avg", "max", "min")
SOURCE = Path(__file__).with_name("kernel.cu")


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("slots", ExchangeSlots),
        *fields(ctypes.c_uint64, "x out numel"),
        *fields(ctypes.c_uint32, "vectors aligned"),
    )


class _CombineParams(_Params):
    """The same with CHOICES."""

    _fields_: ClassVar[Any] = (("combine", CombineSource),)


_X = _Params.x.offset
# Of x and out, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("2Q").pack_into


all_reduce_program = partial(reduction_program, SOURCE)  #: kernel.cu for one rank, dtype and operation


def _function(program: Program, name: str, device: torch.device) -> Function:
    with cuda_state.state.make_current(device):
        return program.function(name)


class AllReduceLauncher(ExchangeLauncher[_Params]):
    """This op: ``out`` = what all ranks' ``x`` make together, the same bits on every rank: in float32, in rank order.

    Its operand is x, its result is out: contiguous tensors, aligned like their elements; out may be x.

    Args:
        place: a workspace with room for ``configs.all_reduce_layout``; the same call site on every rank.
        numel: elements of x, 1 or more.
        reduce_op: "sum", "avg" (divided by the number of ranks), "max" or "min".
        config: the same on every rank; if None, that of ``choose_all_reduce``.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it must be.
    """

    def __init__(
        self,
        place: ExchangeWorkspace,
        numel: int,
        dtype: torch.dtype,
        reduce_op: str,
        device: torch.device,
        config: AllReduceConfig | None = None,
    ) -> None:
        layout, width = place.layout, dtype.itemsize
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"reduce_op: is {reduce_op!r}, must be one of {', '.join(REDUCE_OPS)}")
        if dtype not in DTYPES:
            raise TypeError(f"x: is {dtype}, must be float32, bfloat16 or float16")
        config = config or choose_all_reduce(numel * width, layout.world_size)
        super().__init__()
        parts = layout.world_size if config.form == "two_shot" else 1
        count = -(-numel * width // (VECTOR * parts))
        launch = configs.launch(count, layout, config)
        self.grids = (launch.blocks,) * launch.epochs
        program = all_reduce_program(layout.world_size, place.rank, dtype, reduce_op)
        if config.in_turn:
            program = in_turn(program)
        # Whole vectors at aligned addresses are a kernel of their own.
        for aligned in (False, True):
            whole = aligned and numel * width == count * VECTOR * parts
            name = launch.kernel if whole else f"{launch.kernel}_any"
            function = _function(program, name, device)
            params = _Params(slots_of(place), 0, 0, numel, count, aligned)
            self._prepare(function, launch.blocks, launch.threads, params)

    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        (x,), (out,) = operands, results
        aligned = (x | out) % VECTOR == 0
        _put_addresses(self._params[aligned], _X, x, out)
        return self._launches[aligned]


def combine_all_reduce_launcher(
    place: ExchangeWorkspace, wanted: CombinedSum, config: AllReduceConfig
) -> CombineLauncher:
    """The all-reduce of what is put together. ``place``, ``config``: as of an AllReduceLauncher.

    Raises:
        ValueError: the workspace is too small.
    """
    layout, vectors = place.layout, wanted.tokens * wanted.vectors
    parts = layout.world_size if config.form == "two_shot" else 1
    count = -(-vectors // parts)
    launch = configs.launch(count, layout, config)
    program = all_reduce_program(layout.world_size, place.rank, *wanted.defined)
    function = program.function(launch.kernel if vectors == count * parts else f"{launch.kernel}_any")
    params = _CombineParams(slots_of(place), 0, 0, wanted.tokens * wanted.hidden, count, 1)
    params.combine = wanted.source
    return CombineLauncher(params, _CombineParams.out.offset, function, launch)
