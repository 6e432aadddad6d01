"""Launches kernel.cu on fp8 operands with their scales, or what does it around torch's product."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.comm.ll_exchange import VECTOR, ExchangeLayout
from ..device.gemm.one_shot import OneShotConfig
from ..device.gemm.scaling import ScaledTensors, ScaleKind, Scales, ScalesParams, block_product, scaled_mm_out
from ..device.jit.program import Defines, fields
from . import configs, one_shot_kernel
from .configs import MOST_BS, GatherPushConfig, GatherScales
from .copied_products import SCALED_OP as OP
from .cuda_kernel import AllGatherMatmulPush, _Params


class _ScaledParams(_Params):
    """The twin of ``Params`` in kernel.cu for fp8 operands."""

    _fields_ = (  # type: ignore[assignment]  # after those of its base
        *fields(ctypes.c_uint64, "own_scales scales arriving"),
        *fields(ctypes.c_int32, "blocks of_blocks"),
        ("of_b", ScalesParams * MOST_BS),
    )


class AllGatherScaledMatmulPush(AllGatherMatmulPush):
    """The same of fp8 operands: an example of a call with up to MOST_BS Bs, and of scales."""

    params = _ScaledParams

    def __init__(
        self,
        workspace: Workspace[Layout],
        call: configs.GatherKernelCall,
        scales: GatherScales,
        config: GatherPushConfig,
    ) -> None:
        scaled, (m, k), size = call.scaled, call.a.shape, workspace.world_size
        assert scaled is not None
        super().__init__(workspace, call, config)
        self._count = len(call.bs)
        self._has_bias = [bias is not None for bias in scales.biases]
        of_all = scaled.kind is ScaleKind.ROWS and not scaled.travels
        self._own_scales = 4 * m * workspace.rank if of_all else 0
        blocks = scaled.blocks(k)
        for p in self._params:
            p.blocks = blocks
            p.of_blocks = 0 if scaled.kind is ScaleKind.TENSOR else blocks * m
            p.arriving = p.data + size * m * k * 2 if scaled.travels else 0
            for i, b in enumerate(scales.bs):
                if scaled.kind is ScaleKind.BLOCKS:
                    p.of_b[i].b_block, p.of_b[i].b_column = b.stride()

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole epoch of the buffer.

        Args:
            operands: addresses of the local shard, of the Bs, and of the scales' tensors.
            results: as for ``AllGatherMatmulPush``.
        """
        a_scale, *rest = operands[self._count + 1 :]
        with self.workspace.lock:
            p = self._params[buffer]
            p.own_scales = a_scale + self._own_scales
            p.scales = p.arriving or a_scale
            biases = iter(rest[self._count :])
            for i, has_bias in enumerate(self._has_bias):
                p.of_b[i].b = rest[i]
                p.of_b[i].bias = next(biases) if has_bias else 0
            super().launch(buffer, operands, results, timeout_ns, stream)


class _OneShotParams(one_shot_kernel._Params):
    """The twin of ``Params`` in one_shot.cu with SCALED."""

    _fields_ = (  # type: ignore[assignment]  # after those of its base
        *fields(ctypes.c_uint64, "scales gathered_scales"),
    )


_SCALES = _OneShotParams.scales.offset


class AllGatherScaledMatmulOneShot(one_shot_kernel.AllGatherMatmulOneShot):
    """This op as one exchange of rows and scales, and torch's scaled product after it; ``scales``: of the example."""

    op = OP
    params = _OneShotParams
    more_defines: ClassVar[Defines] = {"SCALED": 1}

    def __init__(
        self,
        workspace: Workspace[ExchangeLayout],
        example: configs.GatherKernelCall,
        scales: GatherScales,
        config: OneShotConfig,
    ) -> None:
        assert example.scaled is not None
        self._biased = [bias is not None for bias in scales.biases]
        self._scaled, self._size = example.scaled, workspace.world_size
        super().__init__(workspace, example, config)
        self._params.scale_vectors = self._scaled.sent_bytes(*example.a.shape) // VECTOR

    def _put(self, *addresses: int) -> None:
        super()._put(*addresses[:2])
        one_shot_kernel._put_pair(self._params, _SCALES, *addresses[2:])

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """As of its base, with more tensors after the Bs: the scales of A, of torch's shape, and of each B; and the
        biases that there are."""
        scaled = self._scaled
        a, bs, a_scale, b_scales, biases = ScaledTensors.of(tensors, self._biased)
        gathered = self._empty((self._rows, 2 * self._k), (2 * self._k, 1), scaled.types[0])
        scales = a_scale
        if scaled.travels:  # one number to each row, or those of blocks [W, S, m]
            numbers = self._rows * scaled.blocks(self._k)
            scales = self._empty((numbers, 1), (1, 1), torch.float32)
        elif scaled.kind is ScaleKind.ROWS:
            scales = a_scale.reshape(self._rows, 1)
        self._exchange([x.data_ptr() for x in (a, gathered, a_scale, scales)], timeout_ns, stream)
        self.workspace.launched()
        if scaled.kind is ScaleKind.BLOCKS:
            by_rank = scales.view(self._size, -1, self._rows // self._size)
            scales = by_rank.movedim(0, 1).reshape(-1, self._rows).t()
        for b, b_scale, bias, result in zip(bs, b_scales, biases, results, strict=True):
            out = self._matrix(result, b.shape[1])
            if scaled.kind is ScaleKind.BLOCKS:
                of_blocks = Scales(scaled.kind, scales, b_scale[: scales.shape[1]])
                block_product(gathered, b, of_blocks, bias, out)
                continue
            scaled_mm_out(scaled, gathered, b, (scales, b_scale), bias, out)
