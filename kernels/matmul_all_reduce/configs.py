"""The configuration of kernel.cu, and the matmuls for which it is used. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..device.comm.exchange_time import exchange_time_us
from ..device.comm.ll_exchange import BLOCKS, WARP, ExchangeLayout, up
from ..device.device_spec import H200, DeviceSpec
from ..device.gemm.gemm_tiles import matmul_us

MOST_ROWS = 16
GROUP = 32  #: columns
_WARPS = 16
# Bytes of B, by groups of a strip, up to which the kernel beats cuBLAS with an all-reduce after it, between 2 H200
# (bench/results/h200-x2-few-rows.txt): one launch less saves _LAUNCH us, and cuBLAS reads a large B up to 7 % faster.
_MOST_BYTES = {1: 96 << 20, 2: 32 << 20}
_LAUNCH = 2.0


@dataclass(frozen=True)
class MatmulAllReduceConfig:
    """``blocks`` of ``warps``, each with a strip of ``groups`` of GROUP columns. The same on all ranks."""

    groups: int
    blocks: int
    warps: int = _WARPS

    def layout(self, m: int, world_size: int) -> ExchangeLayout:
        """A workspace for matmuls of M rows in one launch."""
        return ExchangeLayout(world_size, up(self.groups * m * GROUP // 8, 2 * WARP), self.blocks)


def choose_matmul_all_reduce(m: int, n: int, num_sms: int) -> MatmulAllReduceConfig | None:
    """The configuration for A [M, K] and B [K, N]; None if there are too many rows or columns. All ranks choose alike.

    ``num_sms``: blocks at most. They keep their SMs while they wait for a peer.
    """
    all_groups = -(-n // GROUP)
    groups = -(-all_groups // min(BLOCKS, num_sms))
    if not 1 <= m <= MOST_ROWS or groups not in _MOST_BYTES:
        return None
    return MatmulAllReduceConfig(groups, -(-all_groups // groups))


def few_rows_kernel_is_profitable(config: MatmulAllReduceConfig, n: int, k: int) -> bool:
    """Whether it is predicted to beat a matmul with an all-reduce after it, for B [K, N] of 16 bits."""
    return 2 * n * k <= _MOST_BYTES[config.groups]


def estimate_few_rows_us(m: int, n: int, k: int, world_size: int, spec: DeviceSpec = H200) -> float:
    """Microseconds of the kernel for A [M, K] and B [K, N] of 16 bits: a product and an all-reduce, in one launch."""
    return matmul_us(m, n, k, spec) - _LAUNCH + exchange_time_us((world_size - 1) * m * n * 2)
