"""In how many epochs of a launch vectors are moved: the host's side of rounds.cuh. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.ll_exchange import (
    BLOCKS,
    THREADS,
    WARP,
    ExchangeLayout,
    at_once,
    exchange_grid,
    slots_for,
    up,
    workers,
)

EXACT_SLOTS = 1.25  #: slots for each vector where data arrives bit by bit (exact.cuh)


@dataclass(frozen=True)
class RoundsConfig:
    """How a stand-alone collective is run. The same on every rank.

    Attributes:
        epoch: vectors that a rank sends to each peer in one epoch, at most.
        blocks, threads: what the grid of a kernel may have at most.
        exact: data arrives bit by bit, for which it takes a fourth more slots (exact.cuh).
    """

    epoch: int
    blocks: int = BLOCKS
    threads: int = THREADS
    exact: bool = False

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"epoch: is {self.epoch}, must be 1 or more")
        if not 1 <= self.blocks <= BLOCKS:
            raise ValueError(f"blocks: is {self.blocks}, must be from 1 to {BLOCKS}")
        if self.threads % WARP or not WARP <= self.threads <= THREADS:
            raise ValueError(f"threads: is {self.threads}, must be a multiple of {WARP} up to {THREADS}")


def epoch_of(world_size: int) -> int:
    """What ``RoundsConfig.epoch`` is best: 16 MiB from all ranks. More take more of L2 than they gain
    (bench/results/h200-x2-all-reduce-large.txt), fewer wait for credits (h100-x2-chunks.txt)."""
    return max((1 << 20) // world_size, 2 * _chunk(world_size, BLOCKS, workers(world_size)))


def _chunk(world_size: int, blocks: int, threads: int) -> int:
    return at_once(world_size) * blocks * threads


def goes_by_rounds(count: int, world_size: int, blocks: int, threads: int) -> bool:
    """Whether so many vectors are more than two chunks: by rounds, fewer gain nothing."""
    return count > 2 * _chunk(world_size, blocks, min(threads, workers(world_size)))


def rounds_threads(world_size: int, threads: int, room: int) -> int:
    """Threads of a block that send by rounds, of ``threads`` at most: in an epoch each has two vectors or more.

    Raises:
        ValueError: ``room``, the slots of a sender, is too little.
    """
    if room < 2 * WARP:
        raise ValueError(f"room: is {room} slots, must be {2 * WARP} or more to go by rounds")
    return min(threads, workers(world_size), room // 2 // WARP * WARP)


def epochs_of(count: int, world_size: int, blocks: int, threads: int, room: int) -> int:
    """Epochs of a launch by rounds: the twin of ``weft::Chunks`` in rounds.cuh."""
    passes = room // threads
    if count <= passes * threads * blocks:
        return 1
    slots = min(at_once(world_size), passes // 2) * threads
    chunks = -(-count // (slots * blocks))
    return -(-chunks // (passes * threads // slots))


def rounds_layout(count: int, world_size: int, config: RoundsConfig) -> ExchangeLayout:
    """A workspace with room for ``count`` vectors to each peer, in one epoch or more."""
    room = _wanted_room(count, config)
    return ExchangeLayout(
        world_size, up(room + -(-room // 4) if config.exact else room, 2 * WARP), config.blocks
    )


def _wanted_room(count: int, config: RoundsConfig) -> int:
    return max(2 * WARP, slots_for(min(count, config.epoch), config.blocks, config.threads))


@dataclass(frozen=True)
class RoundsLaunch:
    """The kernel, of those for whole vectors, its grid, and of how many epochs it is; ``room``: slots of a sender that
    data takes in one of them."""

    kernel: str
    blocks: int
    threads: int
    room: int
    epochs: int = 1


def rounds_launch(count: int, layout: ExchangeLayout, config: RoundsConfig) -> RoundsLaunch:
    """The launch that moves ``count`` vectors to each peer.

    Raises:
        ValueError: the layout is for fewer blocks, or has too few slots.
    """
    if config.blocks > layout.blocks:
        raise ValueError(f"workspace: is for {layout.blocks} blocks, must be for {config.blocks}")
    room = layout.slots * 4 // 5 // WARP * WARP if config.exact else layout.slots
    room = min(room, _wanted_room(count, config))
    blocks, threads = exchange_grid(count, room, config.blocks, config.threads)
    world_size, one_epoch = layout.world_size, blocks * (room // threads) * threads
    if count <= one_epoch and not goes_by_rounds(count, world_size, blocks, threads):
        return RoundsLaunch("one_shot", blocks, threads, room)
    threads = rounds_threads(world_size, threads, room)
    epochs = epochs_of(count, world_size, blocks, threads, room)
    return RoundsLaunch("rounds", blocks, threads + WARP, room, epochs)
