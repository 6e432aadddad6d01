"""The configuration of matmul_reduce_scatter: which kernel, its tile and tile order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

import torch

from ...symm_mem.layout import Layout
from ..device.comm.copy_engine import CALL_US, PEER_US, STARTS_US, CopiedConfig
from ..device.comm.ll_exchange import ExchangeLayout
from ..device.device_spec import H200, DeviceSpec, device_spec_of
from ..device.gemm import gemm_tiles, one_shot
from ..device.gemm.one_shot import OneShotConfig
from ..device.gemm.scaling import ScaledProducts, ScaleKind

SCALED_OP = "fused_scaled_matmul_reduce_scatter"  #: of fp8 operands
APART_OP = "fused_matmul_all_to_all"  #: of products that are not summed
MOST_PRODUCTS = 4  # that kernel.cu adds
# Rows of a rank from which on wide raster groups are as fast or up to 4 % faster; with 1024 rows 8 to 30 % slower.
# (Between 2 ranks, bench/results/h100-x2-sustained.txt. Between 4 2 to 4 % faster, in one row of six 2 % slower.)
_TALL = 2048
# Of fp8 operands, two numbers each, without scales of blocks: K from which on wide raster groups are up to 2 % faster;
# how much longer tiles take that load twice as much, between two; the share of what is predicted that torch's product
# takes (bench/results/h100-x2-scaled-scatter-choices.txt).
_LONG_SCALED, _SCALED_FEELS, _SCALED_PRODUCT = 3584, 0.25, 0.96
# Columns of a warpgroup whose partial results are sent in float32: with more, registers are spilled.
_SENT_WIDE = 192
_SUMMED = 0.7  # of memory bandwidth, that torch's sum of the parts gets: not fitted
# Of the all-reduce after a matmul, measured on 2 and 4 H200: microseconds, and bytes a microsecond.
_ALL_REDUCE_LAUNCH, _ALL_REDUCE_LINK = 2.5, 310e3
_MOST_WORKSPACE = 1 << 30  # bytes, of a sum for all ranks


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the local part of the sum: divided by the number of ranks or not; a ``bias`` [N] and a
    ``residual`` [L, m, N] of the operands' dtype added in float32, if there are; rounded to ``out_dtype``, that of the
    operands, or kept as it is in float32. ``to_all``: sent to all ranks, for an all-reduce; of the operands' dtype,
    with nothing added. ``apart``: not summed, for an all-to-all; likewise."""

    out_dtype: torch.dtype
    average: bool = False
    bias: bool = False
    residual: bool = False
    to_all: bool = False
    apart: bool = False


@dataclass(frozen=True)
class ScatterPushConfig:
    """The configuration of kernel.cu.

    Attributes:
        raster_group: pairs of rows of tiles in a raster group; local rows follow those for the peers in chunks of as
            many rows of tiles.
        split_n: ranks own columns of B, not rows of A.
        scaled: the operands are fp8.
    """

    tile: gemm_tiles.Tile
    raster_group: int
    split_n: bool = False
    scaled: ScaledProducts | None = None


@dataclass(frozen=True)
class MatmulReduceScatterProblem:
    """A [L, W, m, K] and B [K, N], with ``batches`` L; with ``split_n`` A [m, K] and B [K, W * N]; with ``to_all``, of
    an all-reduce, A [m, K] and B [K, N]. What is estimated is estimated for products of 16 bits.

    ``num_sms``: SMs to use, of a device as in ``spec``. ``scaled``: the operands are fp8, two of them each number here.
    ``itemsize``: bytes of a number. ``copies``: copy engines are preferred, also where kernel.cu runs.
    """

    m: int
    n: int
    k: int
    world_size: int
    num_sms: int
    batches: int = 1
    split_n: bool = False
    to_all: bool = False
    spec: DeviceSpec = H200
    scaled: ScaledProducts | None = None
    itemsize: int = 2
    copies: bool = False

    @property
    def scaled_in_epilogue(self) -> bool:
        """Whether operands are fp8 with scales that multiply finished sums: tensor-wise or row-wise ones."""
        return self.scaled is not None and self.scaled.kind is not ScaleKind.BLOCKS

    @property
    def has_gemm(self) -> bool:
        """Whether kernel.cu takes such numbers, and runs on the device."""
        return self.spec.has_gemm and self.itemsize == 2

    @property
    def rows(self) -> int:
        """Of A."""
        return self.m if self.to_all else self.world_size * self.batches * self.m

    @property
    def rows_per_rank(self) -> int:
        """Rows of a batch that a rank sums. With ``to_all`` the last ranks may have fewer."""
        return -(-self.m // self.world_size) if self.to_all else self.m

    @property
    def sent_itemsize(self) -> int:
        """Bytes of a number of a partial result, as it is sent: those of fp8 operands have the result's dtype."""
        return self.itemsize if self.scaled is None else self.scaled.out_dtype.itemsize

    @property
    def moved(self) -> int:
        """Bytes that a rank sends."""
        numbers = self.batches * self.rows_per_rank * self.n
        return (self.world_size - 1) * (1 + self.to_all) * numbers * self.sent_itemsize


@dataclass(frozen=True, eq=False)
class ScatterKernelCall:
    """What a kernel is called with.

    Attributes:
        a: [L, W, m, K]; with ``split_n`` [1, 1, m, K]; with ``epilogue.to_all`` [M, K].
        b: [K, N]; with ``split_n`` [K, W * N]. Both begin at multiples of 16 bytes.
        more: the factors A, B, A, B, ... of further products that are added, each like these but for its K.
        num_sms: SMs that it may use.
        epilogue: what becomes of the sum.
        terms: the bias and the residual that the epilogue names; with ``scaled`` the scales of A and of B, and the bias
            of each partial result if there is one. When it is launched contiguous, from multiples of 16 bytes on.
        split_n: ranks have columns of B of their own, not rows of A.
        preferred: the algorithm to take where it can be, "push", "one_shot" or "copy_engine"; None for the fastest.
        scaled: the operands are fp8, two of them each number here.
    """

    a: torch.Tensor
    b: torch.Tensor
    num_sms: int
    epilogue: Epilogue
    terms: Sequence[torch.Tensor] = ()
    split_n: bool = False
    more: Sequence[torch.Tensor] = ()
    preferred: str | None = None
    scaled: ScaledProducts | None = None

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, *self.more

    def columns(self, world_size: int) -> int:
        """Of a rank's result."""
        return self.b.shape[1] // world_size if self.split_n else self.b.shape[1]

    def problem(self, world_size: int) -> MatmulReduceScatterProblem:
        *batched, m, _ = self.a.shape
        k = sum(a.shape[-1] for a in self.factors[::2])
        return MatmulReduceScatterProblem(
            *(m, self.columns(world_size), k, world_size, self.num_sms),
            batches=batched[0] if batched else 1,
            split_n=self.split_n,
            to_all=self.epilogue.to_all,
            spec=device_spec_of(self.b.device, scaled=self.scaled is not None),
            scaled=self.scaled,
            itemsize=self.a.dtype.itemsize,
            copies=self.preferred == "copy_engine",
        )


AnyConfig: TypeAlias = ScatterPushConfig | OneShotConfig | CopiedConfig


def push_config(tile: gemm_tiles.Tile, problem: MatmulReduceScatterProblem) -> ScatterPushConfig:
    """That of a tile. A band is a wave of tiles, so what an own tile waits for was computed a wave before; of many rows
    it is wide: all of B is read once a band."""
    raster_group = max(round(problem.num_sms / 2 / -(-problem.n // tile.block_n)), 2)
    tall = problem.batches * problem.rows_per_rank >= _TALL
    if tall and problem.world_size > 2:
        raster_group *= 2
    elif tall and (problem.scaled is None or (problem.scaled_in_epilogue and problem.k >= _LONG_SCALED)):
        raster_group = 8
    return ScatterPushConfig(tile, min(raster_group, 8), split_n=problem.split_n, scaled=problem.scaled)


def choose_one_shot_scatter(problem: MatmulReduceScatterProblem) -> OneShotConfig | None:
    """The configuration of a reduce-scatter in one shot; None if that takes no such call."""
    part = problem.m * problem.n * problem.sent_itemsize
    if problem.batches != 1 or problem.world_size * part > one_shot.MOST_BYTES:
        return None
    scaled = problem.scaled
    if scaled is not None and (problem.split_n or scaled.kind is ScaleKind.BLOCKS or not scaled.torch_has_it):
        return None
    return one_shot.config(part, problem.num_sms)


def estimate_one_shot_scatter_us(problem: MatmulReduceScatterProblem) -> float:
    """Microseconds: nothing hides anything."""
    exchanged = one_shot.exchange_us(problem.moved, problem.world_size)
    slowdown = 1.0 if problem.scaled is None else _SCALED_PRODUCT * problem.scaled.torch_slowdown
    return exchanged + slowdown * gemm_tiles.matmul_us(problem.rows, problem.n, problem.k, problem.spec)


def choose_copied_scatter(problem: MatmulReduceScatterProblem) -> CopiedConfig | None:
    """The configuration; None where no such call is taken. kernel.cu is faster where it runs."""
    refused = problem.scaled is not None or (problem.has_gemm and not problem.copies)
    return None if refused else CopiedConfig()


def estimate_copied_scatter_us(problem: MatmulReduceScatterProblem) -> float:
    """Microseconds: one peer's part is multiplied after the other's, and sent during the next ones, the own one last.
    That between two ranks it is cut makes no difference here, where sending takes less time than the product."""
    size, part = problem.world_size, problem.moved / (problem.world_size - 1)
    each = gemm_tiles.matmul_us(problem.rows // size, problem.n, problem.k, problem.spec)
    sent = now = CALL_US
    for _ in range(size - 1):
        now += each
        sent = max(sent, now) + part / gemm_tiles.LINK
    summed = (size + 1) * part / (_SUMMED * problem.spec.memory)
    return max(now + each, sent + STARTS_US) + PEER_US * (size - 1) + summed


def rank_scatter_kernels(problem: MatmulReduceScatterProblem) -> list[tuple[float, AnyConfig]]:
    """All candidates with their predicted microseconds, the fastest first; none where none takes such a call.

    A pure function: all ranks choose alike.
    """
    ranked: list[tuple[float, AnyConfig]] = [*rank_scatter_pushes(problem)]
    scatter = choose_one_shot_scatter(problem)
    if scatter is not None:
        ranked.append((estimate_one_shot_scatter_us(problem), scatter))
    if (copied := choose_copied_scatter(problem)) is not None:
        ranked.append((estimate_copied_scatter_us(problem), copied))
    return sorted(ranked, key=itemgetter(0))


def scatter_layout(config: AnyConfig, problem: MatmulReduceScatterProblem) -> Layout | ExchangeLayout:
    """The workspace."""
    if isinstance(config, OneShotConfig):
        return config.layout(problem.world_size)
    if isinstance(config, CopiedConfig):
        return copied_parts_layout(problem)
    return scatter_push_layout(config, problem)


def copied_parts_layout(problem: MatmulReduceScatterProblem) -> Layout:
    """The workspace: a slot for each rank, and a flag."""
    return Layout(problem.world_size, 1, problem.world_size * problem.moved // (problem.world_size - 1))


def scatter_is_profitable(problem: MatmulReduceScatterProblem) -> bool:
    """Whether the fastest candidate is predicted to beat a matmul and a reduce-scatter after it."""
    return scatter_saves_us(problem) > 0


def scatter_saves_us(problem: MatmulReduceScatterProblem) -> float:
    """Microseconds by which it is predicted to beat that; 0 of what no kernel takes."""
    if 0 in (problem.m, problem.n, problem.k):
        return 0.0
    if not (ranked := rank_scatter_kernels(problem)):
        return 0.0
    fused, _ = ranked[0]
    product = problem.rows, problem.n, problem.k
    return gemm_tiles.unfused_us(*product, problem.moved, problem.spec, problem.scaled) - fused


@lru_cache(maxsize=4096)
def rank_scatter_pushes(problem: MatmulReduceScatterProblem) -> tuple[tuple[float, ScatterPushConfig], ...]:
    """All candidates with the microseconds that ``estimate_scatter_push_us`` predicts, the fastest first."""
    if not problem.has_gemm:
        return ()
    n, k, size = problem.n, problem.k, problem.world_size
    tiles = gemm_tiles.suited_to(
        gemm_tiles.suited(problem.rows, n, k, size, spec=problem.spec), problem.scaled
    )
    if problem.sent_itemsize > 2:
        tiles = [tile for tile in tiles if tile.warpgroup_columns <= _SENT_WIDE]
    candidates = [push_config(tile, problem) for tile in tiles]
    return tuple(sorted(((estimate_scatter_push_us(c, problem), c) for c in candidates), key=itemgetter(0)))


@dataclass(frozen=True)
class _Costs:
    """Of estimate_scatter_push_us, in microseconds: a launch; how much longer matmuls take for each microsecond of the
    sending; a wave; the sum of a tile of 128 x 256 that is sent when nothing is left to compute. ``feels``: how much
    longer tiles take that load twice as much for what they multiply. ``rate``: bytes per microsecond."""

    launch: float
    hinders: float
    feels: float
    rate: float = gemm_tiles.LINK
    each: float = 0.0
    tail: float = 0.0


# Fitted to measurements on 2 and on 4 H200. A launch between more than two has not been measured with the LL protocol:
# it is what one rank of 4 alone takes, 8 us (bench/results/h200-x1-scatter.txt), and 7 for what shows only between
# ranks. That is a guess: with flags it was 11 to 18; between two, where it was 10 to 14 with flags, it is 3.5.
_OF_TWO, _OF_MORE = _Costs(8.4, 0.3, 0.1), _Costs(15.0, 0.15, 0.2)
# With ``to_all`` twice as much is on the links, and a few rows wait for memory to give all of B. Between two: fitted to
# 17 matmuls on 2 H200 (bench/results/h200-x2-choices.txt) and 12 of one rank alone. Between more: to 12 of one rank of
# 4 alone (bench/results/h200-x1-scatter.txt), with the same guess.
_TO_ALL_OF_TWO = _Costs(6.0, 0.08, 0.28, each=2.6, tail=0.6)
_TO_ALL_OF_MORE = _Costs(17.0, 0.12, 0.46, 330e3, each=0.1, tail=4.2)
# How much longer tiles of 64 x 256 take during the sending than gemm_tiles.py says, whose figure is older: measured
# with one rank of 4 alone. (Between two that file has one of its own.)
_OF_64_ROWS = 1.02


def _costs(problem: MatmulReduceScatterProblem) -> _Costs:
    if problem.to_all:
        return _TO_ALL_OF_TWO if problem.world_size == 2 else _TO_ALL_OF_MORE
    if problem.world_size > 2:
        return _OF_MORE
    return replace(_OF_TWO, feels=_SCALED_FEELS) if problem.scaled_in_epilogue else _OF_TWO


def estimate_scatter_push_us(config: ScatterPushConfig, problem: MatmulReduceScatterProblem) -> float:
    """Microseconds. Sending begins after the first tile's main loop, and it and the matmul slow each other down."""
    tile, n, k, costs = config.tile, problem.n, problem.k, _costs(problem)
    rows = problem.world_size * _tile_rows(config, problem)
    product = gemm_tiles.estimate_us(tile, rows, [n], k, problem.num_sms) * tile.felt(costs.feels)
    if problem.world_size > 2 and tile.block_m == 64 and not problem.to_all:
        product *= _OF_64_ROWS
    first = -(-k // gemm_tiles.BLOCK_K) * tile.stage_us
    sending = problem.moved / costs.rate
    waiting = costs.each * gemm_tiles.waves(tile, rows, [n], problem.num_sms)
    waiting += costs.tail * tile.block_m * tile.block_n / (128 * 256)
    took = waiting + max(product, first + sending) + costs.hinders * min(product, sending)
    return costs.launch + max(took, gemm_tiles.streamed_us(2 * k * n, 1, problem.spec))


def sum_to_all_is_profitable(problem: MatmulReduceScatterProblem) -> bool:
    """Whether kernel.cu is predicted to beat cuBLAS's product with an all-reduce after it. Few rows have a kernel of
    their own (../matmul_all_reduce), and in between the latter is faster.

    Args:
        problem: with ``to_all``, of 16 bits.
    """
    if not (ranked := rank_scatter_pushes(problem)):
        return False
    m, n, size = problem.m, problem.n, problem.world_size
    moved = 2 * (size - 1) / size * m * n * 2
    sequential = gemm_tiles.matmul_us(m, n, problem.k, problem.spec) + _ALL_REDUCE_LAUNCH
    sequential += moved / _ALL_REDUCE_LINK
    us, config = ranked[0]
    return us < sequential and scatter_push_layout(config, problem).bytes <= _MOST_WORKSPACE


def scatter_push_layout(config: ScatterPushConfig, problem: MatmulReduceScatterProblem) -> Layout:
    """The workspace: a buffer has a slot for each peer, whole tiles; ``to_all``: and as many for their sums. What is
    staged are a tile's two parts for each block."""
    tile, slots = config.tile, (problem.world_size - 1) * (1 + problem.to_all)
    tiles = _tile_rows(config, problem) * -(-problem.n // tile.block_n)
    part = tile.part_numbers * problem.sent_itemsize
    receive_buffer = slots * tiles * 2 * part
    staging = problem.num_sms * 2 * part
    return Layout(problem.world_size, 0, receive_buffer, ll_protocol=True, staging_bytes=staging)


def _tile_rows(config: ScatterPushConfig, problem: MatmulReduceScatterProblem) -> int:
    """Rows of tiles for one rank; with ``split_n`` in whole pairs."""
    rows = problem.batches * -(-problem.rows_per_rank // config.tile.block_m)
    return rows + rows % 2 if config.split_n else rows
