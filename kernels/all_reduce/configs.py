"""The form and grid of an all-reduce, and its workspace. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..device.collective.rounds import EPOCH_BYTES, CollectiveLaunch, by_rounds
from ..device.comm import ll_exchange
from ..device.comm.exchange_time import all_reduce_time_us
from ..device.comm.ll_exchange import BLOCKS, THREADS, VECTOR, WARP, ExchangeLayout, up

FORMS = ("one_shot", "two_shot")
MAX_BYTES = EPOCH_BYTES  #: of the input in one epoch of the slots; two_shot takes more in several epochs

# From how many KiB of input on two_shot is faster. Two ranks send as much in either form; there it is less that is
# received and kept. Measured on 2 and 4 H200; else from (W - 1) * bytes / 300 GB/s against 2 / W of that and one trip.
_TWO_SHOT_FROM = {2: 4096, 3: 512, 4: 192, 5: 144, 6: 104, 7: 80, 8: 64}
_TWO_SHOT_FROM_MANY = 32


@dataclass(frozen=True)
class AllReduceConfig:
    """How an all-reduce is run.

    Attributes:
        form: of FORMS.
        blocks, threads: what the grid of a kernel may have at most.
        in_turn: each rank sends to one peer after the other.
    """

    form: str
    blocks: int = BLOCKS
    threads: int = THREADS
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form: is {self.form!r}, must be one of {FORMS}")
        ll_exchange.check_grid(self.blocks, self.threads)


@lru_cache(maxsize=4096)
def choose_all_reduce(nbytes: int, world_size: int, num_sms: int = BLOCKS) -> AllReduceConfig:
    """The configuration for an input of ``nbytes`` on ``world_size`` ranks; the same on every rank.

    ``num_sms``: blocks at most. They keep their SMs while they wait for a peer, which may wait for what
    another stream of this rank has to compute first.
    """
    two_shot_from = _TWO_SHOT_FROM.get(world_size, _TWO_SHOT_FROM_MANY) << 10
    return AllReduceConfig("two_shot" if nbytes >= two_shot_from else "one_shot", min(BLOCKS, num_sms))


def estimate_all_reduce_us(nbytes: int, world_size: int, config: AllReduceConfig | None = None) -> float:
    """Microseconds of an all-reduce of ``nbytes``; by the chosen configuration if none is given."""
    return all_reduce_time_us(nbytes, world_size, (config or choose_all_reduce(nbytes, world_size)).form)


def _slots_per_vector(config: AllReduceConfig) -> int:
    """Slots of each sender that one vector takes: two_shot has results, too."""
    return 2 if config.form == "two_shot" else 1


def all_reduce_layout(nbytes: int, world_size: int, config: AllReduceConfig) -> ExchangeLayout:
    """A workspace that takes an input of ``nbytes`` in one epoch if it is not above MAX_BYTES; else in several."""
    parts = world_size if config.form == "two_shot" else 1
    vectors = -(-min(nbytes, MAX_BYTES) // (VECTOR * parts))
    slots = ll_exchange.slots_for(vectors, config.blocks, config.threads)
    return ExchangeLayout(world_size, up(slots, 2 * WARP) * _slots_per_vector(config), config.blocks)


def vectors(layout: ExchangeLayout, config: AllReduceConfig) -> int:
    """Vectors that one epoch can move: of the input in one_shot, of each rank's part in two_shot."""
    room = layout.slots // _slots_per_vector(config)
    step = min(config.threads, room)
    return config.blocks * (room // step) * step


def all_reduce_grid(count: int, layout: ExchangeLayout, config: AllReduceConfig) -> tuple[int, int]:
    """Blocks and threads for that many. No block goes without a vector."""
    return ll_exchange.exchange_grid(
        count, layout.slots // _slots_per_vector(config), config.blocks, config.threads
    )


def launch(count: int, layout: ExchangeLayout, config: AllReduceConfig) -> CollectiveLaunch:
    """The launch that moves ``count`` vectors: of the input in one_shot, of each rank's part in two_shot.

    Raises:
        ValueError: they do not fit into one epoch, which is all that one_shot has; or the layout is for fewer blocks,
            or has too few slots.
    """
    if config.blocks > layout.blocks:
        raise ValueError(f"workspace: is for {layout.blocks} blocks, must be for {config.blocks}")
    blocks, threads = all_reduce_grid(count, layout, config)
    if config.form == "two_shot":
        room = layout.slots // _slots_per_vector(config)
        rounds = by_rounds(count, layout.world_size, blocks, threads, room)
        if rounds is not None:
            threads, epochs = rounds
            return CollectiveLaunch("two_shot_rounds", blocks, threads + WARP, epochs)
    elif count > (most := vectors(layout, config)):
        raise ValueError(f"numel: is {count} vectors, must be at most {most} in one_shot")
    return CollectiveLaunch(config.form, blocks, threads)
