"""Launches kernel.cu on fp8 operands with their scales."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.layout import Layout
from ...symm_mem.workspace import Workspace
from ..device.gemm.scaling import ScaleKind
from ..device.gemm.scaling_params import ScalesParams
from ..device.tuning.choice import KernelChoice, make_together
from . import configs, on_cuda
from .configs import MOST_BS, GatherPushConfig
from .cuda_kernel import AllGatherMatmulPush, EpochStep, _Params

OP = "fused_all_gather_scaled_matmul"


class _ScaledParams(_Params):
    """The twin of ``Params`` in kernel.cu for fp8 operands."""

    _fields_ = (  # type: ignore[assignment]  # behind those of its base
        ("own_scales", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("arriving", ctypes.c_uint64),
        ("blocks", ctypes.c_int32),
        ("of_blocks", ctypes.c_int32),
        ("of_b", ScalesParams * MOST_BS),
    )


class _ScaledPush(AllGatherMatmulPush):
    params = _ScaledParams


@dataclass(frozen=True, eq=False)
class GatherScales:
    """Of the operands of a call, as kernel.cu takes them; float32, contiguous.

    Attributes:
        a: one; of the own rows [S, m]; or, if they do not travel, of all ranks' rows [W, m].
        bs: of each B one; [N]; or [K / 128, N / 128] with any strides. Those of columns begin at multiples of 16 bytes.
        biases: of each B [N], at such an address, or None.
    """

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.a, *self.bs, *(bias for bias in self.biases if bias is not None)]


class AllGatherScaledMatmulPush:
    """This op on one problem and one workspace: prepared once, launched often.

    Args:
        workspace: as for ``AllGatherMatmulPush``.
        call: an example, with up to MOST_BS Bs.
        scales: examples, too.
        config: the same on every rank.
    """

    def __init__(
        self,
        workspace: Workspace[Layout],
        call: configs.GatherKernelCall,
        scales: GatherScales,
        config: GatherPushConfig,
    ) -> None:
        scaled, (m, k), size = call.scaled, call.a.shape, workspace.world_size
        assert scaled is not None
        layout, kept = workspace.layout, scaled.sent_bytes(m, k)
        if layout.buffer_bytes < size * (m * k * 2 + kept):
            raise ValueError(
                f"workspace: {layout} is too small for shards of {m} x {2 * k} numbers with scales"
            )
        self.workspace, self._scaled, self._count = workspace, scaled, len(call.bs)
        self._has_bias = [bias is not None for bias in scales.biases]
        self._own = 4 * m * workspace.rank if scaled.kind is ScaleKind.ROWS and not scaled.travels else 0
        self._push = _ScaledPush(
            workspace, call.a, call.bs, config, num_sms=call.num_sms, return_A=call.return_A
        )
        blocks = scaled.blocks(k)
        for buffer, p in enumerate(self._push._params):
            p.blocks = blocks
            p.of_blocks = 0 if scaled.kind is ScaleKind.TENSOR else blocks * m
            p.arriving = workspace.address + layout.buffer(buffer) + size * m * k * 2 if scaled.travels else 0
            for i, b in enumerate(scales.bs):
                if scaled.kind is ScaleKind.BLOCKS:
                    p.of_b[i].b_block, p.of_b[i].b_column = b.stride()
        self._step = EpochStep(True, True, slice(1, self._count + 1), slice(0, self._count))

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole epoch of the buffer.

        Args:
            operands: addresses of the local shard, of the Bs, and of the scales' tensors.
            results: as for ``AllGatherMatmulPushes``.
        """
        a_scale, *rest = operands[self._count + 1 :]
        with self.workspace.lock:
            p = self._push._params[buffer]
            p.own_scales = a_scale + self._own
            p.scales = p.arriving or a_scale
            biases = iter(rest[self._count :])
            for i, has_bias in enumerate(self._has_bias):
                p.of_b[i].b = rest[i]
                p.of_b[i].bias = next(biases) if has_bias else 0
            self._push.launch(buffer, operands[: self._count + 1], results, self._step, timeout_ns, stream)


def launch_all_gather_scaled_matmul(
    choice: KernelChoice[configs.AnyConfig],
    workspace: Workspace[Layout],
    call: configs.GatherKernelCall,
    scales: GatherScales,
    timeout_ns: int,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, in numbers of 16 bits, and the products, each [W, m, N_i].

    With ``split_k`` [m, W * K] and [m, N_i].
    """
    scaled, config = call.scaled, choice.config
    assert scaled is not None and isinstance(config, GatherPushConfig)
    key = (choice, call.return_A, scaled, tuple(bias is not None for bias in scales.biases))
    kernel: AllGatherScaledMatmulPush | None = workspace.prepared.get(key)
    if kernel is None:
        same = (OP, call.a.shape, *(b.shape for b in call.bs), config, call.num_sms, call.return_A)
        kernel = make_together(
            workspace, OP, key, same, lambda: AllGatherScaledMatmulPush(workspace, call, scales, config)
        )
    results = on_cuda.results_of(call, workspace.world_size)
    operands = [x.data_ptr() for x in (call.a, *call.bs, *scales.tensors)]
    addresses = [x.data_ptr() for x in results]
    kernel.launch(workspace.next_buffer(), operands, addresses, timeout_ns, current_stream_of(call.a))
    return (results.pop() if call.return_A else None), results
