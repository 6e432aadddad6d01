"""matmul_reduce_scatter's A as kernels take it: the same rows in the same order, and no copy where strides allow."""

from __future__ import annotations

import pytest
import torch
from weft.fused_ops.dispatch.staging import Staging
from weft.fused_ops.ops.matmul_reduce_scatter import _parts
from weft.kernels.device.gemm.gemm_tiles import TILES
from weft.kernels.device.gemm.operands import why_not

SIZE = 3


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


# A, the scattered dimension, and whether it can be taken as it lies.
CASES: dict[str, tuple[torch.Tensor, int, bool]] = {
    "matrix": (bfloat16(15, 16), 0, True),
    "padded rows": (bfloat16(15, 24)[:, :16], 0, True),
    "every other row": (bfloat16(30, 16)[::2], 0, True),
    "inner": (bfloat16(2, 15, 16), 1, True),
    "inner, padded": (bfloat16(4, 15, 24)[1:3, :, 8:], 1, True),
    "inner, of permuted": (bfloat16(15, 2, 16).transpose(0, 1), 1, True),
    "outer": (bfloat16(6, 128, 16), 0, True),
    "outer, cut": (bfloat16(6, 300, 16)[:, 8:264], 0, True),
    "outer, of permuted": (bfloat16(128, 6, 16).transpose(0, 1), 0, True),
    "outer, few rows": (bfloat16(6, 100, 16), 0, True),
    "outer, few rows, cut": (bfloat16(6, 100, 16)[:, :90], 0, False),
    "outer of 4-D, cut": (bfloat16(6, 2, 200, 16)[:, :, :128], 0, True),
    "middle of 4-D": (bfloat16(1, 6, 256, 16), 1, True),
    "middle of 4-D, cut": (bfloat16(1, 6, 300, 16)[:, :, :256], 1, True),
    "behind a batch, cut": (bfloat16(2, 6, 300, 16)[:, :, :256], 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_parts(name: str) -> None:
    A, dim, as_it_lies = CASES[name]
    staging = Staging()
    parts = staging.take("A", A, lambda x: _parts(x, dim, SIZE))
    staging.copy()
    assert (staging.reason == "") is as_it_lies
    own = parts.shape[0] * parts.shape[2]
    for w, chunk in enumerate(A.chunk(SIZE, dim)):
        # The result is written as [L, m, N]: L and m in the order of the op's own result.
        assert torch.equal(parts[:, w].reshape(own, 16), chunk.reshape(own, 16))
    assert (parts.untyped_storage().data_ptr() == A.untyped_storage().data_ptr()) is as_it_lies
    assert why_not(parts, bfloat16(16, 8)) is None


@pytest.mark.parametrize("name", CASES)
def test_how_it_is_cut_does_not_depend_on_strides(name: str) -> None:
    A, dim, _ = CASES[name]
    parts = Staging().take("A", A, lambda x: _parts(x, dim, SIZE))
    assert parts.shape == _parts(A.contiguous(), dim, SIZE).shape


def test_no_tile_is_cut_off_that_was_whole() -> None:
    heights = {t.block_m for t in TILES}
    assert all(128 % height == 0 for height in heights), heights
