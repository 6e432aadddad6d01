"""In how many epochs of a launch vectors are moved: the host's side of rounds.cuh. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..comm.ll_exchange import (
    BLOCKS,
    THREADS,
    VECTOR,
    WARP,
    ExchangeLayout,
    at_once,
    check_grid,
    exchange_grid,
    slots_for,
    up,
    workers,
)

#: Of all ranks' vectors that a rank receives in one epoch. More take more of L2 than they gain
#: (bench/results/h200-x2-all-reduce-large.txt), fewer wait for credits (h100-x2-chunks.txt).
EPOCH_BYTES = 16 << 20


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
        check_grid(self.blocks, self.threads)


@lru_cache(maxsize=4096)
def choose_rounds(world_size: int, num_sms: int = BLOCKS, *, exact: bool) -> RoundsConfig:
    """The configuration on ``world_size`` ranks; the same on every rank.

    ``num_sms``: blocks at most. They keep their SMs while they wait for a peer, which may wait for what another stream
    of this rank has to compute first.
    """
    return RoundsConfig(epoch_of(world_size), min(BLOCKS, num_sms), exact=exact)


def epoch_of(world_size: int) -> int:
    """What ``RoundsConfig.epoch`` is best: EPOCH_BYTES from all ranks, or two chunks."""
    return max(EPOCH_BYTES // VECTOR // world_size, 2 * _chunk(world_size, BLOCKS, workers(world_size)))


def _chunk(world_size: int, blocks: int, threads: int) -> int:
    """Vectors of the largest chunk: what all threads of a grid take at once."""
    return at_once(world_size) * blocks * threads


def by_rounds(count: int, world_size: int, blocks: int, threads: int, room: int) -> tuple[int, int] | None:
    """Threads of a block that send, and epochs of a launch that moves ``count`` vectors to each peer by rounds; None
    where one epoch takes them, in two chunks at most: by rounds, these gain nothing.

    Args:
        threads: of a block, at most.
        room: slots of a sender that data takes in one epoch.

    Raises:
        ValueError: ``room`` is too little.
    """
    one_epoch = blocks * (room // threads) * threads
    threads = min(threads, workers(world_size))
    if count <= min(one_epoch, 2 * _chunk(world_size, blocks, threads)):
        return None
    if room < 2 * WARP:
        raise ValueError(f"room: is {room} slots, must be {2 * WARP} or more to go by rounds")
    threads = min(threads, room // 2 // WARP * WARP)
    return threads, _epochs(count, world_size, blocks, threads, room // threads)


def _epochs(count: int, world_size: int, blocks: int, threads: int, passes: int) -> int:
    """The twin of ``weft::Chunks`` in rounds.cuh."""
    if count <= passes * threads * blocks:
        return 1
    of_chunk = min(at_once(world_size), passes // 2)
    chunks = -(-count // (of_chunk * threads * blocks))
    return -(-chunks // (passes // of_chunk))


def rounds_layout(count: int, world_size: int, config: RoundsConfig) -> ExchangeLayout:
    """A workspace with room for ``count`` vectors to each peer, in one epoch or more."""
    room = _wanted_room(count, config)
    return ExchangeLayout(
        world_size, up(room + -(-room // 4) if config.exact else room, 2 * WARP), config.blocks
    )


def _wanted_room(count: int, config: RoundsConfig) -> int:
    return max(2 * WARP, slots_for(min(count, config.epoch), config.blocks, config.threads))


@dataclass(frozen=True)
class CollectiveLaunch:
    """The kernel, of those for whole vectors, its grid, and of how many epochs it is; ``room``: slots of a sender that
    data takes in one of them, where the kernel asks."""

    kernel: str
    blocks: int
    threads: int
    epochs: int = 1
    room: int = 0


def rounds_launch(count: int, layout: ExchangeLayout, config: RoundsConfig) -> CollectiveLaunch:
    """The launch that moves ``count`` vectors to each peer.

    Raises:
        ValueError: the layout is for fewer blocks, or has too few slots.
    """
    if config.blocks > layout.blocks:
        raise ValueError(f"workspace: is for {layout.blocks} blocks, must be for {config.blocks}")
    room = layout.slots * 4 // 5 // WARP * WARP if config.exact else layout.slots
    room = min(room, _wanted_room(count, config))
    blocks, threads = exchange_grid(count, room, config.blocks, config.threads)
    rounds = by_rounds(count, layout.world_size, blocks, threads, room)
    if rounds is None:
        return CollectiveLaunch("one_shot", blocks, threads, room=room)
    threads, epochs = rounds
    return CollectiveLaunch("rounds", blocks, threads + WARP, epochs, room)
