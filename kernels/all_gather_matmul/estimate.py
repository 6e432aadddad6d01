"""A call, its configurations on Hopper, and their predicted times. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ..device.comm.copy_engine import CALL_US, PEER_US, STARTS_US
from ..device.comm.ll_exchange import up
from ..device.device_spec import H200, DeviceSpec
from ..device.gemm import gemm_tiles
from ..device.gemm.operands import ALIGNMENT
from ..device.gemm.scaling import ScaledProducts

RASTER_GROUP = 4  # pairs of rows of tiles: what a wave reads stays in the L2 cache
_PUT = 0.7  # of memory bandwidth, that torch's copy of strided rows gets: not fitted
_MOST_WAVES = 256  # of one prediction; the waves of longer matmuls are taken several at once


@dataclass(frozen=True)
class AllGatherMatmulProblem:
    """Shards A [m, K] and Bs [K, N_i], or with ``split_k``, where shards lie side by side, Bs [W * K, N_i]. What is
    estimated is estimated for products of 16 bits.

    Attributes:
        num_sms: SMs to use. spec: of which device.
        return_A: the gathered A is returned, too.
        scaled: the operands are fp8, two of them each number here.
        itemsize: bytes of a number.
        copies: copy engines are preferred, also where kernel.cu runs.
        exchanged: each rank gets rows of its own; with ``split_k``.
    """

    m: int
    ns: tuple[int, ...]
    k: int
    world_size: int
    num_sms: int
    split_k: bool = False
    return_A: bool = False
    spec: DeviceSpec = H200
    scaled: ScaledProducts | None = None
    itemsize: int = 2
    copies: bool = False
    exchanged: bool = False

    @property
    def has_gemm(self) -> bool:
        """Whether kernel.cu takes such numbers, and runs on the device."""
        return self.spec.has_gemm and self.itemsize == 2

    @property
    def moved(self) -> int:
        """Bytes that a rank receives."""
        return (self.world_size - 1) * self.m * self.k * self.itemsize

    @property
    def rows(self) -> int:
        """Of a product."""
        return self.m if self.split_k else self.world_size * self.m

    def tiles(self, tile: gemm_tiles.Tile) -> tuple[int, int]:
        """Rows of a shard and columns of all Bs."""
        return -(-self.m // tile.block_m), sum(-(-n // tile.block_n) for n in self.ns)


CHUNK_COLUMNS = 64


@dataclass(frozen=True)
class GatherPushConfig:
    """The configuration of kernel.cu.

    Attributes:
        comm_sms: SMs that send first, and compute when all is sent; 0: every block sends while it computes.
        group: rows of tiles of each rank that are sent and multiplied together.
        chunk_rows: of a chunk of CHUNK_COLUMNS, which is sent with one flag.
        k_chunk_columns: of a k-chunk, which is waited for as a whole.
        raster_group, remote_raster_group: pairs of local rows of tiles, and of the peers', in a raster group.
        split_k: shards lie side by side along K; then no row is all local.
        exchanged: each rank gets rows of its own.
        skipped_steps: tiles that the others compute while the communication SMs send.
        first_wave: steps of the first wave, all of local rows; 0: a full wave.
        scaled: the operands are fp8.
    """

    tile: gemm_tiles.Tile
    comm_sms: int
    group: int
    chunk_rows: int = 64
    k_chunk_columns: int = 1024
    raster_group: int = RASTER_GROUP
    remote_raster_group: int = RASTER_GROUP
    split_k: bool = False
    skipped_steps: int = 0
    first_wave: int = 0
    scaled: ScaledProducts | None = None
    exchanged: bool = False


@dataclass(frozen=True)
class _Costs:
    """Of estimate_gather_push_us, in microseconds: a launch; between two tiles; how much slower matmuls are while the
    same blocks send; until sent data is seen. ``rates``: bytes per microsecond, by communication SMs. ``feels``: how
    much longer tiles take that load twice as much for what they multiply. ``eases``: how much less is hindered, for
    each 1.0 by which a tile's loads are less than _MUCH."""

    launch: float
    tile_ends: float
    hinders: float
    seen: float
    rates: dict[int, float]
    feels: float = 0.0
    eases: float = 0.0


# Fitted to measurements on 2 and 4 H200: where all blocks send, where some do, and of shards of the last dimension.
_ALL_OF_TWO = _Costs(1.0, 1.9, 0.0, 8.0, {0: 333e3})
_SOME_OF_TWO = _Costs(4.1, 0.2, 0.0, 5.4, {8: 229e3, 12: 330e3, 16: 329e3})
_ALONG_K_OF_TWO = _Costs(0.6, 1.7, 0.13, 3.5, {0: 360e3}, feels=0.1)
_ALL = _Costs(14.0, 1.8, 0.4, 0.0, {0: 294e3}, eases=1.14)
_SOME = _Costs(14.0, 1.6, 0.0, 3.6, {8: 294e3, 12: 294e3, 16: 275e3})
_MUCH = 1.15  # a little less than what 128 x 192 loads
PUSHERS = 11  # warps of a communication SM that push, in kernel.cu
# Bytes per microsecond to which it limits all warps, between two ranks and between more.
LINK_RATE_OF_TWO, LINK_RATE = 345e3, 328e3
FIT_ROWS = 64  # of the chunks that the costs above were fitted to, between two ranks and four
# Data is seen earlier by this share of the time that smaller chunks save (bench/results/h200-x1-pieces.txt).
_EARLIER = 0.73


def _chunk_us(config: GatherPushConfig, world_size: int, num_sms: int) -> float:
    """Microseconds from a chunk's first bytes to its last."""
    chunk, pushers = config.chunk_rows * CHUNK_COLUMNS * 2, config.comm_sms * PUSHERS or num_sms
    return chunk * (world_size - 1) * pushers / (LINK_RATE_OF_TWO if world_size == 2 else LINK_RATE)


def clusters_of(config: GatherPushConfig, num_sms: int) -> tuple[int, int]:
    """Of two blocks each: those that compute from the start, and all."""
    return max(1, (num_sms - config.comm_sms) // 2), max(1, num_sms // 2)


def skipped_steps_of(tile: gemm_tiles.Tile, comm_sms: int, problem: AllGatherMatmulProblem) -> int:
    """Tiles that a block computes while ``comm_sms`` SMs send. Measured with these costs between two, too."""
    tile_us = -(-problem.k // gemm_tiles.BLOCK_K) * tile.stage_us + _SOME.tile_ends
    return ceil((_SOME.launch + problem.moved / _SOME.rates[comm_sms]) / tile_us)


def _costs(config: GatherPushConfig, world_size: int) -> _Costs:
    if world_size > 2:
        return _SOME if config.comm_sms else _ALL
    if config.split_k:
        return _ALONG_K_OF_TWO
    return _SOME_OF_TWO if config.comm_sms else _ALL_OF_TWO


def estimate_gather_push_us(config: GatherPushConfig, problem: AllGatherMatmulProblem) -> float:
    """Microseconds, by a simulation of the waves of tiles and of the arriving chunks.

    All clusters are assumed to work in step; the constants are fitted to measurements on 2 and 4 H200. ``config``: of a
    tile as it is on the problem's device.
    """
    tile, k, world_size, num_sms = config.tile, problem.k, problem.world_size, problem.num_sms
    peers, moved = world_size - 1, problem.moved
    rows, columns = problem.tiles(tile)
    k_chunks = -(-k // config.k_chunk_columns)
    costs = _costs(config, world_size)
    rate = costs.rates[config.comm_sms]
    hinders = 0.0 if config.comm_sms else costs.hinders - costs.eases * max(0.0, _MUCH - tile.loads)
    row_us = moved / rows / rate
    seen = costs.seen
    if not config.split_k:  # whose chunks are unchanged
        fit_us = _chunk_us(replace(config, chunk_rows=FIT_ROWS), 2 if world_size == 2 else 4, num_sms)
        seen -= _EARLIER * (fit_us - _chunk_us(config, world_size, num_sms))
    end = moved / gemm_tiles.LINK
    others, clusters = clusters_of(config, num_sms)
    # Pairs of rows of tiles: those of the local shard alone, and those after them, which wait for the peers' rows.
    own_pairs, listed, parts = (0, 1, world_size) if config.split_k else (rows // 2, peers, 1)
    pairs = (rows * (1 if config.split_k else world_size) + 1) // 2 - own_pairs
    own = own_pairs * columns
    steps = own + pairs * columns
    at_once = -(-steps // (clusters * _MOST_WAVES))
    stage_us = tile.stage_us * tile.felt(costs.feels)
    whole_us = parts * k / gemm_tiles.BLOCK_K * stage_us
    before_last_us = (k_chunks - 1) * config.k_chunk_columns / gemm_tiles.BLOCK_K * stage_us
    now = -(-k // gemm_tiles.BLOCK_K) * stage_us + costs.tile_ends if config.first_wave else 0.0
    first, wave = config.first_wave, 0
    while first < steps:
        taken = (others if wave < config.skipped_steps else clusters) * at_once
        last, sent, height = min(steps, first + taken) - 1, 0, 0
        if last >= own:
            raster_group, inside = divmod(last - own, config.remote_raster_group * columns)
            tall = min(pairs - raster_group * config.remote_raster_group, config.remote_raster_group)
            pair = raster_group * config.remote_raster_group + min(inside, tall - 1)
            sent = min((2 * pair + 1) // (config.group * listed), (rows - 1) // config.group) * config.group
            height = min(config.group, rows - sent)
        if hinders > 0 and now < end:
            for k_chunk in [*range(k_chunks)] * parts:
                if height:
                    now = max(now, (sent + height * (k_chunk + 1) / k_chunks) * row_us + seen)
                us = min(config.k_chunk_columns, k - k_chunk * config.k_chunk_columns) / gemm_tiles.BLOCK_K
                us *= stage_us * at_once
                now += us + hinders * max(0.0, min(us, end - now))
        else:
            # k-chunks come evenly, and are multiplied so: the first or the last is waited for the longest.
            if height:
                now = max(now, (sent + height / k_chunks) * row_us + seen)
                now = max(now, (sent + height) * row_us + seen - before_last_us * at_once)
            now += whole_us * at_once
        now += costs.tile_ends * at_once
        first, wave = first + taken, wave + at_once
    raster_groups = -(-own_pairs // config.raster_group) + -(-pairs // config.remote_raster_group)
    # All Bs are read from memory once for each raster group, if no wave takes several.
    times = min(raster_groups, -(-steps // clusters))
    streamed_us = gemm_tiles.streamed_us(2 * parts * k * sum(problem.ns), times, problem.spec)
    return costs.launch + max(now, streamed_us)


def scales_offset(problem: AllGatherMatmulProblem) -> int:
    """Where a rank's scales lie after its rows, in bytes."""
    return up(problem.itemsize * problem.m * problem.k, ALIGNMENT)


def slot_bytes(problem: AllGatherMatmulProblem) -> int:
    """Of one rank's rows and of their scales, if these travel."""
    end = scales_offset(problem)
    if problem.scaled is not None:
        end += problem.scaled.sent_bytes(problem.m, problem.k)
    return up(end, ALIGNMENT)  # what torch's product takes


def estimate_copied_us(problem: AllGatherMatmulProblem) -> float:
    """Microseconds: one rank's rows are multiplied after the other's, the own first, each when they have come. Columns
    are multiplied when all have come, and the last ones are put beside the others."""
    if problem.split_k:
        others = problem.world_size - 1
        slot, whole = slot_bytes(problem), problem.world_size * problem.k
        sent = CALL_US + STARTS_US + others * (slot / gemm_tiles.LINK + PEER_US)
        put = 2 * slot / (_PUT * problem.spec.memory)
        return sent + put + gemm_tiles.matmuls_us(problem.m, problem.ns, whole, problem.spec)
    each = gemm_tiles.matmuls_us(problem.m, problem.ns, problem.k, problem.spec)
    if problem.scaled is not None:
        each *= problem.scaled.torch_slowdown
    arrival, now = CALL_US + STARTS_US, CALL_US + each
    for _ in range(problem.world_size - 1):
        arrival += slot_bytes(problem) / gemm_tiles.LINK
        now = max(now, arrival) + PEER_US + each
    return now
