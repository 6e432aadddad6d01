"""Which tile a product gets, and that every choice fits the machine: pure functions, no GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.device.gemm_tiles import MOST_SHARED, TILES, estimate_us, pick
from weft.kernels.matmul_reduce_scatter import configs as scatter

SIZES = st.integers(1, 5000)
RANKS = st.integers(2, 8)
SMS = st.integers(2, 132)


@given(SIZES, st.lists(SIZES, min_size=1, max_size=4), SIZES, RANKS, SMS)
def test_all_gather_matmul_fits_and_has_a_flag_for_each_piece(
    m: int, ns: list[int], k: int, world_size: int, num_sms: int
) -> None:
    config = gather.choose_push(m, ns, k, world_size, num_sms)
    assert config == gather.choose_push(m, ns, k, world_size, num_sms)
    assert config.tile.shared(config.ring_bytes) <= MOST_SHARED
    assert 1 <= config.group <= -(-m // config.tile.block_m)
    pieces = (config.tile.block_m // config.piece_rows) * (config.unit_columns // config.piece_columns)
    assert pieces <= 32, "a lane waits for each piece of a unit"
    assert 2 <= config.ring_bytes // (config.piece_rows * config.piece_columns * 2) <= 8, (
        "barriers of the ring"
    )
    layout = gather.push_layout(m, k, world_size, config)
    assert layout.flags_per_rank * config.piece_rows * config.piece_columns >= m * k
    assert layout.half_bytes == world_size * m * k * 2, (
        "twice the gathered bytes for both halves, and no more"
    )


@given(SIZES, SIZES, SIZES, RANKS, SMS, st.integers(1, 3))
def test_matmul_reduce_scatter_fits_and_has_a_slot_for_each_peer(
    m: int, n: int, k: int, world_size: int, num_sms: int, batches: int
) -> None:
    config = scatter.choose_bulk(m, n, k, world_size, num_sms, batches)
    assert config.tile.shared(config.staged_bytes) <= MOST_SHARED
    assert config.tile.warpgroup_n % (32 * config.rounds) == 0
    nbytes, flags = scatter.bulk_needs(m, n, config, world_size, batches)
    assert flags * config.tile.part_bytes * (world_size - 1) == nbytes
    assert nbytes >= (world_size - 1) * batches * m * n * 2


@pytest.mark.parametrize(("m", "n", "k"), [(1024, 1024, 1024), (4096, 2048, 8192)])
def test_a_half_takes_no_more_than_the_peers_results(m: int, n: int, k: int) -> None:
    nbytes, _ = scatter.bulk_needs(m, n, scatter.choose_bulk(m, n, k, 4, 132), 4)
    assert nbytes == 3 * m * n * 2


# Measured on two H200: the tile that won, for shards of m rows.
@pytest.mark.parametrize(
    ("m", "n", "k", "block"),
    [
        (256, 3072, 4096, (128, 96)),
        (512, 3072, 4096, (128, 192)),
        (256, 5120, 8192, (128, 192)),
        (256, 14336, 4096, (128, 256)),
        (2048, 3072, 4096, (128, 256)),
        (4096, 28672, 8192, (128, 256)),
    ],
)
def test_the_choice_without_tuning_is_what_was_fastest(
    m: int, n: int, k: int, block: tuple[int, int]
) -> None:
    tile = gather.choose_push(m, [n], k, 2, 132).tile
    assert (tile.block_m, tile.block_n) == block


@given(SIZES, SIZES, SMS)
def test_no_tile_is_thought_faster_than_the_one_picked(m: int, n: int, num_sms: int) -> None:
    tile, time = pick(lambda t: -(-m // t.block_m), [n], 512, num_sms)
    assert tile in TILES
    assert time == min(estimate_us(t, -(-m // t.block_m), [n], 512, num_sms) for t in TILES)


def test_it_steps_aside_where_little_is_gathered() -> None:
    assert not gather.push_pays(1, [2560], 8192, 4, 132)
    assert gather.push_pays(512, [2560], 8192, 4, 132)
    assert scatter.bulk_pays(512, 8192, 2048, 4, 132)
