"""The tiles that gemm.cuh can be compiled for, and predictions of their time: a table, and pure functions over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....symm_mem.backends.cuda_state import HOPPER_SMS
from ..device_spec import H100, H200, DeviceSpec
from .scaling import ScaledProducts, unfused_product_us

BLOCK_K = 64
MOST_SHARED = 227 * 1024  # bytes a block may have
# Measured between H200s: bytes that a GPU receives and sends per microsecond, and multiply-adds.
LINK, MULTIPLY_ADDS = 364e3, 350e6
_BARRIERS = 384  # bytes, rounded up
_ALIGNMENT = 1024
# Microseconds of cuBLAS around a matmul, and between the end of one and the next.
_PRODUCT_LAUNCH, _NEXT_LAUNCH = 4.0, 2.5
_SCALES = 15.0  # of one more collective, for scales, which then are put in order (on H100)
_LEAST_A_ROW = 0.0015  # microseconds for each of K, however narrow: tiles are not split along K
# Of memory bandwidth by clock and width: what cuBLAS gets that reads one large operand (4.3e6 of 4.9e6 bytes per
# microsecond on H200, 3.0e6 of 3.35e6 on H100), and what these kernels get of a B that they read once, and more often.
_READ, _STREAMED, _AGAIN = 0.9, 0.85, 0.7
# How much longer a stage takes on H100: measured with one rank of 2, 4 and 8 alone (bench/results/h100-x1-alone.txt).
# The likely cause is the smaller L2 cache: tiles that are not named load little, and took 0.97 to 1.07. 64 x 128 was
# not among them: a guess between the others.
_ON_H100 = {(128, 128): 1.02, (64, 256): 1.12, (64, 128): 1.1, (128, 96): 1.2, (128, 160): 1.16}


@dataclass(frozen=True)
class Tile:
    """A tile of the matmul: ``block_m`` x ``block_n``, and how many stages of depth 64 lie in shared memory.

    ``stage_us``: microseconds of a stage when all SMs work, fitted to whole kernels on H200s.
    """

    block_m: int
    block_n: int
    stages: int
    stage_us: float

    @property
    def part_numbers(self) -> int:
        """Of a compute warpgroup's accumulator fragment of a finished tile: half of its numbers."""
        return self.block_m * self.block_n // 2

    @property
    def warpgroup_columns(self) -> int:
        """Of the two compute warpgroups each has half of the rows, or of 64 rows half of the columns."""
        return self.block_n if self.block_m == 128 else self.block_n // 2

    @property
    def loads(self) -> float:
        """What it loads for each of its numbers, as a multiple of what 128 x 256 does. (Of B it loads one half, the
        other block of its cluster the other one.)"""
        return (self.block_m + self.block_n / 2) / (self.block_m * self.block_n) * 128

    def felt(self, feels: float) -> float:
        """How much longer it takes during communication, which costs ``feels`` for twice the loads."""
        return 1 + feels * (self.loads - 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        columns = -(-self.block_n // 64) * 64
        stage = (self.block_m + columns) * BLOCK_K * 2
        return self.stages * stage + _BARRIERS + _ALIGNMENT

    def on(self, spec: DeviceSpec) -> Tile:
        """The tile on another device."""
        less = (H200.l2 - spec.l2) / (H200.l2 - H100.l2)
        longer = (_ON_H100.get((self.block_m, self.block_n), 1.0) - 1) * max(0.0, less)
        return replace(self, stage_us=self.stage_us * (1 + longer))


TILES = (
    Tile(128, 256, 4, 0.72),
    Tile(128, 192, 5, 0.55),
    Tile(128, 128, 6, 0.368),
    Tile(64, 256, 5, 0.362),
    Tile(64, 128, 6, 0.258),
    Tile(128, 96, 5, 0.34),
    # Other widths, for matmuls whose last wave of the tiles above is not full.
    Tile(128, 160, 5, 0.465),
    Tile(128, 224, 4, 0.65),
)
# Their rows are lanes of tensor memory, of which they fill half.
_IN_TENSOR_MEMORY = ((128, 128), (128, 192), (128, 256))
# Its accumulators leave a thread no registers for an epilogue that does more than store them.
WIDEST = Tile(128, 320, 4, 0.92)

# ``stage_us`` between two ranks, measured with the current kernels, which take warp numbers from shuffles. That above
# is older, and what choices between more ranks are fitted to. The widest takes 3 % less than above, on H100
# (bench/results/h100-x2-sustained.txt) as with one H200 of two (h200-x1-tiles.txt).
_STAGES_OF_TWO = {(64, 256): 0.382, (128, 320): 0.89}


def tiles_of(tensor_memory: bool) -> tuple[Tile, ...]:
    """Those that sm100/ can be compiled for, or all of TILES."""
    return tuple(t for t in TILES if not tensor_memory or (t.block_m, t.block_n) in _IN_TENSOR_MEMORY)


def suited(
    m: int, n: int, k: int, world_size: int, *, stores_only: bool = False, spec: DeviceSpec = H200
) -> list[Tile]:
    """Candidates for [m, K] @ [K, N]. Long matmuls want tiles that load little for what they multiply.

    ``stores_only``: all that an epilogue does is to store a tile.
    """
    every = (*TILES, WIDEST) if stores_only and not spec.tensor_memory else tiles_of(spec.tensor_memory)
    tiles = [tile for tile in every if tile.block_m == 128 or m * n * k < 50e9]
    if world_size == 2:
        tiles = [replace(t, stage_us=_STAGES_OF_TWO.get((t.block_m, t.block_n), t.stage_us)) for t in tiles]
    return [tile.on(spec) for tile in tiles]


def suited_to(tiles: Sequence[Tile], scaled: ScaledProducts | None) -> list[Tile]:
    """Those of them that fp8 operands can have, with the time that their stages take."""
    if scaled is None:
        return list(tiles)
    taken = [tile for tile in tiles if scaled.takes_columns(tile.warpgroup_columns)]
    return [replace(tile, stage_us=tile.stage_us * scaled.slowdown) for tile in taken]


def estimate_us(tile: Tile, rows: int, ns: Sequence[int], k: int, num_sms: int) -> float:
    """Microseconds that a matmul takes by itself.

    Args:
        rows: of tiles, in all.
        ns: columns of each B; no tile lies in two of them.
    """
    return waves(tile, rows, ns, num_sms) * -(-k // BLOCK_K) * tile.stage_us


def waves(tile: Tile, rows: int, ns: Sequence[int], num_sms: int) -> int:
    """Tiles that an SM computes one after the other; arguments as of ``estimate_us``."""
    steps = -(-rows // 2) * sum(-(-n // tile.block_n) for n in ns)  # of clusters of two blocks
    return -(-steps // max(1, num_sms // 2))


def matmul_us(m: int, n: int, k: int, spec: DeviceSpec = H200) -> float:
    """Microseconds of cuBLAS's matmul [m, K] @ [K, N] in 16 bits.

    A plain model of what was measured on H200s and H100s.
    """
    return matmuls_us(m, [n], k, spec)


def matmuls_us(m: int, ns: Sequence[int], k: int, spec: DeviceSpec = H200) -> float:
    """The same of a matmul with each of several B, one after the other."""
    rate = _READ * spec.memory
    busy = sum(max(2 * m * n * k / 720e6, 2 * k * n / rate, k * _LEAST_A_ROW) for n in ns)
    return busy + _PRODUCT_LAUNCH + _NEXT_LAUNCH * (len(ns) - 1)


def product_us(m: int, n: int, k: int, world_size: int, spec: DeviceSpec = H200) -> float:
    """Microseconds of the matmul [m, K] @ [K, N] by itself, to compare with what tiles do during communication: that of
    cuBLAS, which is taken to be as fast as the best of TILES would be."""
    tiles = suited(m, n, k, world_size, spec=spec)
    best = min(estimate_us(tile, -(-m // tile.block_m), [n], k, HOPPER_SMS) for tile in tiles)
    tiled = max(best, 2 * k * n / (_READ * spec.memory)) + _NEXT_LAUNCH
    return min(matmul_us(m, n, k, spec), tiled)


def streamed_us(size: int, times: int, spec: DeviceSpec) -> float:
    """Microseconds in which memory gives a kernel of ours ``size`` bytes, so many ``times`` where the L2 cache cannot
    keep them in between."""
    if times == 1 or 2 * size <= spec.l2:
        return size / (_STREAMED * spec.memory)
    return size * times / (_AGAIN * spec.memory)


def unfused_us(
    m: int, n: int, k: int, moved: int, spec: DeviceSpec = H200, scaled: ScaledProducts | None = None
) -> float:
    """Microseconds of cuBLAS's matmul [m, K] @ [K, N] in 16 bits and NCCL's collective after or before it.

    A plain model of what was measured on H200s; it decides only whether fusing is profitable.

    Args:
        moved: bytes that a rank receives.
        scaled: the operands are fp8, two of them each number here.
    """
    product = 1.05 * matmul_us(m, n, k, spec)
    if scaled is not None:
        product = unfused_product_us(scaled, 2 * m * n * k) or product * scaled.torch_slowdown
        product += _SCALES if scaled.travels else 0
    return product + nccl_us(moved)


def nccl_us(moved: float) -> float:
    """Microseconds of NCCL's collective of which a rank receives so many bytes, likewise."""
    return 22 + moved / 330e3
