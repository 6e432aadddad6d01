"""The host's side of gemm.cuh: operands, defines, and launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from ..jit.program import Defines, Program
from .gemm_tiles import BLOCK_K, MOST_SHARED, Tile
from .operands import is_transposed
from .tensor_map import Boxes

THREADS = 384  # of a block
_THREADS_WITH_TENSOR_MEMORY = 512
_CLUSTER = 2  # blocks

DTYPES = {torch.bfloat16: ("bfloat16", '"bf16"'), torch.float16: ("float16", '"f16"')}


def is_whole(bs: Sequence[torch.Tensor], tile: Tile) -> bool:
    """Whether one box, of whole groups of 64 columns, has all the columns of a tile of any of these B."""
    return tile.block_n % 64 == 0 and all(b.shape[1] % 64 == 0 for b in bs)


def gemm_defines(tile: Tile, bs: Sequence[torch.Tensor], *, split_k: bool = False) -> Defines:
    """What gemm.cuh is compiled with for these B [K, N_i] and their like, all of one order.

    ``split_k``: each B is a stack of parts along K.
    """
    b = bs[0]
    name, product = DTYPES[b.dtype]
    return {
        "DTYPE": name,
        "PRODUCT_TYPE": product,
        "BM": tile.block_m,
        "BN": tile.block_n,
        "STAGES": tile.stages,
        "B_ROWS": 0 if is_transposed(b) else 1,
        "B_WHOLE": int(is_whole(bs, tile)),
        "SPLIT_K": int(split_k),
    }


def boxes_of_b(b: torch.Tensor, tile: Tile, whole: bool) -> Boxes:
    """Of B [K, N], or with ``split_k`` in ``gemm_defines`` of a stack of such [P, K, N]: what one block of a cluster
    loads. ``whole``: as ``is_whole`` has it for all B of a launch.

    A stack is a dimension of its own: where a stage goes past the end of one it is filled with zeros, not with rows of
    the next.
    """
    if b.dim() == 3:
        one = boxes_of_b(b[0], tile, whole)
        return Boxes(b.dtype, (b.shape[0], *one.shape), (b.stride(0), *one.strides), (1, *one.box))
    (k, n), half = b.shape, BLOCK_K // 2
    if is_transposed(b):
        return Boxes(b.dtype, (n, k), b.t().stride(), (tile.block_n // 2, BLOCK_K))
    if whole:
        return Boxes(b.dtype, (n // 64, k, 64), (64, b.stride(0), 1), (-(-tile.block_n // 64), half, 64))
    return Boxes(b.dtype, (k, n), b.stride(), (half, 64))


def boxes_of_rows(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], tile: Tile) -> Boxes:
    """Of A, as [batch, part, m, K]."""
    return Boxes(dtype, shape, strides, (1, 1, tile.block_m, BLOCK_K))


def threads_of(program: Program) -> int:
    """Of a block."""
    return _THREADS_WITH_TENSOR_MEMORY if program.arch.startswith("sm_10") else THREADS


def launches(
    program: Program, name: str, params: Sequence[ctypes.Structure], num_sms: int, shared: int
) -> list[Callable[[int], None]]:
    """A launch for each argument, on a stream: whole clusters on ``num_sms`` SMs, as many as find room at once.

    Raises:
        ValueError: ``shared`` bytes of shared memory are more than a block may have.
    """
    if shared > MOST_SHARED:
        raise ValueError(f"shared: is {shared} bytes, must be at most {MOST_SHARED}")
    function = program.function(name, shared=shared)
    threads = threads_of(program)
    clusters = min(num_sms // _CLUSTER, function.most_clusters(_CLUSTER, threads, shared))
    return [function.bound(clusters * _CLUSTER, threads, p, shared) for p in params]
