"""Tensor maps: TMA's description of a tensor and of the boxes it is copied in.

A map holds an address, so each tensor needs its own; ``Maps`` keeps those it has met. The twin of
``weft::TensorMap`` in hopper.cuh.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from ....symm_mem.backends import cuda_state
from .operands import ALIGNMENT

TensorMap = ctypes.c_uint64 * 16

_MOST_KEPT = 256  # maps kept for each operand before all are dropped
_TYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}


@dataclass(frozen=True)
class Boxes:
    """A tensor's sizes and strides in elements, outermost dimension first, and the sizes of a box."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def encode(self, address: int) -> ctypes.Array[ctypes.c_uint64]:
        """The map of a tensor of these sizes at ``address``.

        Raises:
            RuntimeError: the driver refuses it: an address or stride that is no multiple of 16 bytes, say.
        """
        size, dimensions = self.dtype.itemsize, len(self.shape)
        # The stride of a dimension of size 1 may be anything, yet the driver checks it.
        strides = [
            ALIGNMENT if extent == 1 else stride * size
            for extent, stride in zip(self.shape[:-1], self.strides[:-1], strict=True)
        ]
        made = cuda_state.state.tensor_map(
            _TYPES[self.dtype],
            dimensions,
            address,
            [driver.cuuint64_t(extent) for extent in self.shape[::-1]],
            [driver.cuuint64_t(stride) for stride in strides[::-1]],
            [driver.cuuint32_t(extent) for extent in self.box[::-1]],
            [driver.cuuint32_t(1)] * dimensions,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return TensorMap.from_buffer_copy(made)


class Maps(dict[int, bytes]):
    """The maps of one operand, by address: ``maps[address]`` makes what is missing. For ``put_map``."""

    def __init__(self, boxes: Boxes) -> None:
        super().__init__()
        self.boxes = boxes

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_KEPT:
            self.clear()
        made = self[address] = bytes(self.boxes.encode(address))
        return made


def put_maps(count: int) -> Callable[..., None]:
    """``put(structure, offset, *maps)`` writes so many, one after the other. It costs less than ctypes' fields do."""
    return struct.Struct(f"{ctypes.sizeof(TensorMap)}s" * count).pack_into


put_map = put_maps(1)
