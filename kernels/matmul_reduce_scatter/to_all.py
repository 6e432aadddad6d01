"""all_reduce(A @ B) by kernel.cu with ALL_REDUCE: each rank sends the sums of its rows to all ranks.

Part of fused_matmul_all_reduce, for large matmuls: few rows have a kernel of their own (../matmul_all_reduce), and in
between cuBLAS with an all-reduce after it is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from ..device.gemm import gemm_tiles
from .configs import (
    MatmulReduceScatterProblem,
    ScatterPushConfig,
    matmul_while_sending_us,
    push_config,
    scatter_push_layout,
)

# Of the all-reduce after a matmul, measured on 2 and 4 H200: microseconds, and bytes a microsecond.
_ALL_REDUCE_LAUNCH = 2.5
_ALL_REDUCE_LINK = 310e3
_MOST_WORKSPACE = 1 << 30  # bytes


def choose_sum_to_all_push(problem: MatmulReduceScatterProblem) -> tuple[ScatterPushConfig, bool]:
    """The configuration for A [m, K] and B [K, N] of 16 bits, and whether it is predicted to beat a matmul with an
    all-reduce after it. A pure function: all ranks choose alike.

    Args:
        problem: with ``to_all``.
    """
    fastest, config = fastest_sum_to_all(problem)
    size = scatter_push_layout(config, problem).bytes
    profitable = fastest < sequential_us(problem) and size <= _MOST_WORKSPACE
    return config, profitable and problem.spec.has_gemm


@lru_cache(maxsize=4096)
def fastest_sum_to_all(problem: MatmulReduceScatterProblem) -> tuple[float, ScatterPushConfig]:
    """The configuration with the fewest microseconds by ``estimate_sum_to_all_us``, and these."""
    p = problem
    tiles = gemm_tiles.suited(p.m, p.n, p.k, p.world_size, spec=p.spec)
    candidates = [push_config(tile, problem) for tile in tiles]
    return min(((estimate_sum_to_all_us(c, problem), c) for c in candidates), key=itemgetter(0))


@dataclass(frozen=True)
class _Costs:
    """Of estimate_sum_to_all_us, in microseconds: a launch; a wave; the sum of a tile of 128 x 256 that is sent when
    nothing is left to compute; how much longer matmuls take for each microsecond of the sending. ``feels``: how
    much longer tiles take that load twice as much for what they multiply. ``rate``: bytes per microsecond."""

    launch: float
    each: float
    tail: float
    hinders: float
    feels: float
    rate: float


# Between two: fitted to 17 matmuls on 2 H200 (bench/results/h200-x2-choices.txt) and 12 of one rank alone. Between
# more: to 12 of one rank of 4 alone (bench/results/h200-x1-scatter.txt), and a launch longer by 7 for what shows only
# between ranks, the same guess as for matmul_reduce_scatter.
_OF_TWO = _Costs(6.0, 2.6, 0.6, 0.08, 0.28, gemm_tiles.LINK)
_OF_MORE = _Costs(17.0, 0.1, 4.2, 0.12, 0.46, 330e3)


def estimate_sum_to_all_us(config: ScatterPushConfig, problem: MatmulReduceScatterProblem) -> float:
    """Microseconds. As for matmul_reduce_scatter, with twice as much on the links; a few rows wait for memory to give
    all of B."""
    tile, n, k, num_sms = config.tile, problem.n, problem.k, problem.num_sms
    costs = _OF_TWO if problem.world_size == 2 else _OF_MORE
    rows = problem.world_size * -(-problem.rows_per_rank // tile.block_m)
    product = matmul_while_sending_us(tile, rows, n, k, num_sms, feels=costs.feels)
    first = -(-k // gemm_tiles.BLOCK_K) * tile.stage_us
    sending = problem.moved / costs.rate
    waiting = costs.each * gemm_tiles.waves(tile, rows, [n], num_sms)
    waiting += costs.tail * tile.block_m * tile.block_n / (128 * 256)
    took = waiting + max(product, first + sending) + costs.hinders * min(product, sending)
    return costs.launch + max(took, gemm_tiles.streamed_us(2 * k * n, 1, problem.spec))


def sequential_us(problem: MatmulReduceScatterProblem) -> float:
    """Microseconds of cuBLAS's product and an all-reduce after it."""
    m, n, world_size = problem.m, problem.n, problem.world_size
    moved = 2 * (world_size - 1) / world_size * m * n * 2
    return gemm_tiles.matmul_us(m, n, problem.k, problem.spec) + _ALL_REDUCE_LAUNCH + moved / _ALL_REDUCE_LINK
