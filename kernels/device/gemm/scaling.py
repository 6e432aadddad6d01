"""Scales of fp8 operands, and products of what they scale.

An operand times its scales is what it stands for. Layouts are those of ``torch._scaled_mm``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch

from ..capability import BLOCK_PRODUCTS, capability_of
from ..jit.program import fields

BLOCK = 128  #: of K that has a scale of its own, and of N
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_FLOAT32 = 25e6  # multiply-adds of float32 per microsecond, of cuBLAS on H100; not measured here
_MULTIPLE = 4  # of rows and of blocks along K: torch's kernel wants 16 bytes of scales
# As torch.nn.functional.ScalingType numbers them.
_BY_1X128, _BY_128X128 = 4, 5


class ScalesParams(ctypes.Structure):
    """The twin of ``weft::Scales`` in scales.cuh."""

    _fields_ = (*fields(ctypes.c_uint64, "b bias"), *fields(ctypes.c_int32, "b_block b_column"))


class ScaleKind(Enum):
    """How finely operands A [M, K] and B [K, N] are scaled."""

    TENSOR = "tensor-wise"  #: one scale each
    ROWS = "row-wise"  #: one for each row of A and column of B
    BLOCKS = "block-wise"  #: one for 1 x 128 of A and 128 x 128 of B


@dataclass(frozen=True, eq=False)
class Scales:
    """Of A [M, K] and B [K, N], float32.

    Attributes:
        a: [1, 1], row-wise [M, 1], block-wise [M, K / 128, rounded up].
        b: [1, 1], row-wise [1, N], block-wise [K / 128, N / 128], both rounded up.
    """

    kind: ScaleKind
    a: torch.Tensor
    b: torch.Tensor

    def of_rows(self, rows: slice) -> Scales:
        """Of some rows of A."""
        return self if self.kind is ScaleKind.TENSOR else replace(self, a=self.a[rows])


class ScaledTensors(NamedTuple):
    """Of a call around torch's product: the shard, the Bs, the scales of A and of each B, and their biases or None."""

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    a_scale: torch.Tensor
    b_scales: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], biased: Sequence[bool]) -> ScaledTensors:
        """In this order, without the biases that there are not. ``biased``: whether each B has one."""
        count = len(biased)
        biases = iter(tensors[2 * count + 2 :])
        return ScaledTensors(
            *(tensors[0], tensors[1 : count + 1], tensors[count + 1], tensors[count + 2 : 2 * count + 2]),
            [next(biases) if has_bias else None for has_bias in biased],
        )


@dataclass(frozen=True)
class ScaledProducts:
    """What a kernel computes of fp8 operands, which lie as half as many numbers of 16 bits.

    Attributes:
        types: of A and B.
        promote: sums are added up in float32 after every 128 of K, not in the tensor cores.
        travels: scales of A go with it.
        torch_has_blocks: torch has a kernel for block-wise scales of so many rows (``has_block_product``).
    """

    types: tuple[torch.dtype, torch.dtype]
    kind: ScaleKind
    out_dtype: torch.dtype
    promote: bool
    travels: bool = False
    torch_has_blocks: bool = False

    @property
    def pairs(self) -> torch.dtype:
        """As which two numbers of an operand side by side are taken: the result's dtype, if that has 16 bits."""
        return torch.bfloat16 if self.out_dtype == torch.float32 else self.out_dtype

    @property
    def torch_has_it(self) -> bool:
        """Whether torch has a kernel for it, of row-wise scales in every version."""
        if self.kind is ScaleKind.BLOCKS:
            return self.torch_has_blocks
        return self.kind is ScaleKind.TENSOR or self.out_dtype == torch.bfloat16

    def takes_columns(self, columns: int) -> bool:
        """Of a warpgroup's tile: what is promoted needs twice the registers; block-wise scales are those of one block
        of B."""
        if self.kind is ScaleKind.BLOCKS:
            return columns <= BLOCK and BLOCK % columns == 0
        return columns <= (160 if self.promote else 256)

    @property
    def slowdown(self) -> float:
        """How much longer a stage of weft's kernels takes than one of 16-bit numbers of as many bytes, as it does
        without promotion (bench/results/h100-x2-scaled-matmuls.txt). Scales of blocks cost more where they arrive with
        rows."""
        if self.kind is ScaleKind.BLOCKS:
            return 1.9 if self.travels else 1.42
        return 1.2 if self.promote else 1.0

    @property
    def torch_slowdown(self) -> float:
        """The same of torch's product. With scales of blocks it took 1.06 to 1.37 times as long as with two numbers."""
        return 1.2 if self.promote else 1.0

    @property
    def defines(self) -> dict[str, str | int]:
        """What else gemm.cuh is compiled with."""
        a, b = (str(dtype).removeprefix("torch.float8_")[:4] for dtype in self.types)
        kind = list(ScaleKind).index(self.kind) + 1
        return {"FP8_TYPES": f'"{a}.{b}"', "SCALES": kind, "PROMOTE": int(self.promote)}

    def blocks(self, k: int) -> int:
        """Scales of a row of A; ``k``: of its numbers of 16 bits."""
        return blocks_of(2 * k) if self.kind is ScaleKind.BLOCKS else 1

    def sent_bytes(self, m: int, k: int) -> int:
        """Of the scales of a shard [m, k]."""
        return 4 * m * self.blocks(k) if self.travels else 0


def unfused_product_us(scaled: ScaledProducts, multiply_adds: float) -> float | None:
    """Microseconds of an unfused product without a kernel of torch's, which is one of float32; None if there is one."""
    if scaled.kind is not ScaleKind.BLOCKS or scaled.torch_has_blocks:
        return None
    return multiply_adds / _FLOAT32


def has_block_product(rows: int, types: tuple[torch.dtype, torch.dtype], device: torch.device) -> bool:
    """Whether torch multiplies so many rows of A and B with block-wise scales there: e4m3 on Hopper, with CUDA 12.9 or
    later."""
    if rows % _MULTIPLE or set(types) != {torch.float8_e4m3fn} or device.type != "cuda":
        return False
    return offers_block_products(device)


@cache
def offers_block_products(device: torch.device) -> bool:
    """The same, of some number of rows. A device that is not there, as plans may ask about, is taken to be a Hopper."""
    if not hasattr(torch.ops.aten, "_scaled_mm_v2") or torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= (12, 9) and capability_of(device) in BLOCK_PRODUCTS


def as_pairs(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 x two by two as numbers of 16 bits, a view; of a copy where it does not lie so."""
    try:
        return x.view(dtype)
    except RuntimeError:
        return x.clone(memory_format=torch.contiguous_format).view(dtype)


def blocks_of(extent: int) -> int:
    """How many blocks of 128 there are of K or N."""
    return -(-extent // BLOCK)


def exact_product(a: torch.Tensor, b: torch.Tensor, scales: Scales) -> torch.Tensor:
    """``(a * its scales) @ (b * its scales)`` in float32, on any device: products are exact, sums are of float32."""
    if scales.kind is not ScaleKind.BLOCKS:
        return torch.mm(a.float(), b.float()).mul_(scales.a).mul_(scales.b)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for i in range(scales.a.shape[1]):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        columns = scales.b[i].repeat_interleave(BLOCK)[: b.shape[1]]
        total += torch.mm(a[:, part].float(), b[part].float()).mul_(scales.a[:, i : i + 1]).mul_(columns)
    return total


def torch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    """``a @ b + bias`` by torch's own kernel on CUDA, where it has one; on CPU exact and rounded once.

    Args:
        a, b: [M, K], and [K, N] with K contiguous.
        bias: [N] of ``out_dtype``.
        fast: accumulate in the tensor cores' own precision.
    """
    if scales.kind is ScaleKind.BLOCKS and has_block_product(a.shape[0], (a.dtype, b.dtype), a.device):
        out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
        return block_product(a.contiguous(), b, scales, bias, out)
    if not a.is_cuda or scales.kind is ScaleKind.BLOCKS:
        wide = exact_product(a, b, scales)
    elif scales.kind is ScaleKind.TENSOR:
        return _scaled_mm(a, b, scales, bias, out_dtype, fast=fast)
    elif out_dtype == torch.bfloat16:
        return _scaled_mm(a, b, _whole(scales, a.shape[0], b.shape[1]), bias, out_dtype, fast=fast)
    else:  # torch has no kernel for it
        one = scales.a.new_ones(1, 1)
        wide = _scaled_mm(a, b, Scales(ScaleKind.TENSOR, one, one), None, torch.float32, fast=fast)
        wide.mul_(scales.a).mul_(scales.b)
    return (wide if bias is None else wide.add_(bias)).to(out_dtype)


def _whole(scales: Scales, m: int, n: int) -> Scales:
    return replace(scales, a=scales.a.expand(m, 1).contiguous(), b=scales.b.expand(1, n).contiguous())


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    a, of_a, of_b = a.contiguous(), aligned_scale(scales.a), aligned_scale(scales.b)
    return torch._scaled_mm(a, b, of_a, of_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


def scaled_mm_out(
    products: ScaledProducts,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``a @ b + bias`` into ``out`` by torch's own kernel, of one scale each or of row-wise ones."""
    of_a, of_b = map(aligned_scale, scales)
    how = bias, None, products.out_dtype, not products.promote
    torch.ops.aten._scaled_mm.out(a, b, of_a, of_b, *how, out=out)


def aligned_scale(scale: torch.Tensor) -> torch.Tensor:
    """The scale as cuBLAS takes it, at a multiple of 16 bytes: one that is a part of other scales is copied."""
    # Dynamo knows no address; scales of the layers that it traces are tensors of their own.
    if torch.compiler.is_compiling() or scale.data_ptr() % 16 == 0:
        return scale
    return scale.clone()


def block_product(
    a: torch.Tensor, b: torch.Tensor, scales: Scales, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """``a @ b + bias`` with block-wise scales into ``out``, by torch's kernel, where ``has_block_product``.

    It wants scales of A with rows contiguous, and those of B with K contiguous, filled up to a multiple of four blocks.
    What lies so is not copied.
    """
    by_a, by_b = aligned_scale(scales.a.t().contiguous()).t(), aligned_scale(scales.b)
    blocks, columns = by_b.shape
    padded = -(-blocks // _MULTIPLE) * _MULTIPLE
    if padded != blocks or by_b.stride() != (1, padded):
        filled = by_b.new_zeros(columns, padded)
        filled[:, :blocks] = by_b.t()
        by_b = filled.t()
    # Scales, their kinds and how they are swizzled, of A and of B.
    how = [by_a], [_BY_1X128], list[int](), [by_b], [_BY_128X128], list[int]()
    done: torch.Tensor = torch.ops.aten._scaled_mm_v2.out(a, b, *how, bias, out.dtype, [], False, out=out)
    return done
