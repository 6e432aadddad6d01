"""Launches kernel.cu: ``out = sum over ranks of x`` for any contiguous CUDA tensors, piece after piece."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from ..device.program import Function, Program, Watch
from .configs import FORMS, VECTOR, Config, Layout, choose

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
REDUCE_OPS = ("sum", "avg")
SOURCE = Path(__file__).with_name("kernel.cu")


class Place(Protocol):
    """A ``Workspace`` made with this folder's ``Layout``."""

    layout: Layout
    address: int
    span: int
    rank: int
    record: int


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("watch", Watch),
        ("span", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
        ("epochs", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("average", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
    )


@cache
def program(world_size: int, dtype: torch.dtype) -> Program:
    """kernel.cu for one world size and dtype."""
    return Program(SOURCE, defines={"WORLD_SIZE": world_size, "DTYPE": DTYPES[dtype]})


@cache
def _function(world_size: int, dtype: torch.dtype, form: str, device: torch.device) -> Function:
    with torch.cuda.device(device):
        return program(world_size, dtype).function(form)


def load(world_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load both forms, without a launch."""
    for form in FORMS:
        _function(world_size, dtype, form, device)


def launch(
    place: Place,
    x: torch.Tensor,
    out: torch.Tensor,
    reduce_op: str,
    timeout_ns: int,
    stream: int,
    config: Config | None = None,
) -> None:
    """``out = sum over ranks of x``, the same bits on every rank; sums in float32, in rank order, rounded once.

    Every rank makes the same calls on a workspace, in one order and on one stream at a time. Safe to capture
    in a CUDA graph. The current device must be x's.

    Args:
        x, out: contiguous, of the same dtype and number of elements, at any address; out may be x.
        reduce_op: "sum", or "avg": divided by the number of ranks.
        timeout_ns: nanoseconds until a wait for a peer expires, see the workspace's record.
        stream: a CUstream as an integer.
        config: what ``choose`` says, if None; the same on every rank.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it must be.
        RuntimeError: the kernel cannot be compiled or launched.
    """
    layout = place.layout
    _check(x, out, reduce_op, layout)
    numel, width = x.numel(), x.element_size()
    config = config or choose(numel * width, layout.world_size)
    parts = layout.world_size if config.form == "two_shot" else 1
    step = layout.vectors(config) * parts * VECTOR // width
    x_at, out_at = x.data_ptr(), out.data_ptr()
    params = _Params(
        watch=Watch(place.address, place.record, timeout_ns, place.rank),
        span=place.span,
        capacity=layout.slots,
        epochs=Layout.EPOCHS,
        slots=Layout.SLOTS,
        average=reduce_op == "avg",
        aligned=(x_at | out_at) % VECTOR == 0,
    )
    for start in range(0, numel, step):
        length = min(step, numel - start)
        vectors = -(-length * width // (VECTOR * parts))
        params.x, params.out = x_at + start * width, out_at + start * width
        params.numel, params.vectors = length, vectors
        blocks, threads = layout.grid(vectors, config)
        function = _function(layout.world_size, x.dtype, config.form, x.device)
        function.launch(blocks, threads, params, stream)


def _check(x: torch.Tensor, out: torch.Tensor, reduce_op: str, layout: Layout) -> None:
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"reduce_op: is {reduce_op!r}, must be 'sum' or 'avg'")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: is {x.dtype}, must be float32, bfloat16 or float16")
    if out.dtype != x.dtype:
        raise TypeError(f"out: is {out.dtype}, must be {x.dtype} like x")
    if out.numel() != x.numel():
        raise ValueError(f"out: has {out.numel()} elements, must have {x.numel()} like x")
    if out.device != x.device:
        raise ValueError(f"out: lies on {out.device}, must lie on {x.device} like x")
    for name, tensor in (("x", x), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: has strides {tensor.stride()}, must be contiguous")
    if layout.world_size < 2:
        raise ValueError("the workspace's group has one rank, must have 2 to 8")
