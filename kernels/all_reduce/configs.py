"""What the all-reduce kernels need in memory, and which form and grid a size gets. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

FORMS = ("one_shot", "two_shot")
VECTOR = 16  #: bytes that travel in one slot
BLOCKS = 132  #: the largest grid: one block for each multiprocessor of an H100 or H200
THREADS = 512  #: the largest block
WARP = 32
MAX_WORLD_SIZE = 8
MAX_SLOTS = 1024  #: of a block, for each half and sender: a launch of one_shot then moves up to 2 MiB

# From how many bytes of input on two_shot is faster. Two ranks send as much in either form, so never there.
# Where no measurement stands, from (W - 1) * bytes / 300 GB/s against 2 / W of that and one more trip.
_TWO_SHOT_FROM = {3: 512 << 10, 4: 192 << 10, 5: 144 << 10, 6: 104 << 10, 7: 80 << 10, 8: 64 << 10}


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Config:
    """``form``: the kernel, "one_shot" or "two_shot". ``blocks``, ``threads``: what its grid may have at most."""

    form: str
    blocks: int = BLOCKS
    threads: int = THREADS

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form: is {self.form!r}, must be one of {FORMS}")
        if not 1 <= self.blocks <= BLOCKS:
            raise ValueError(f"blocks: is {self.blocks}, must be from 1 to {BLOCKS}")
        if self.threads % WARP or not WARP <= self.threads <= THREADS:
            raise ValueError(f"threads: is {self.threads}, must be a multiple of {WARP} up to {THREADS}")


@lru_cache(maxsize=4096)
def choose(nbytes: int, world_size: int) -> Config:
    """The configuration for an input of ``nbytes`` on ``world_size`` ranks; the same on every rank."""
    two_shot = world_size in _TWO_SHOT_FROM and nbytes >= _TWO_SHOT_FROM[world_size]
    return Config("two_shot" if two_shot else "one_shot")


@dataclass(frozen=True)
class Layout:
    """Where things lie in an all-reduce's workspace, in 32-bit words from its start; all of it starts as zeros.

    ``[control words][EPOCH of each block][slots: block, half, sender, index]``. Takes the place of
    ``symm_mem.Layout`` in a ``Workspace``.

    Attributes: ``slots``: vectors that a block takes from one sender in one use.
    """

    world_size: int
    slots: int = MAX_SLOTS

    BROKEN = 0  #: not 0 once a wait has expired; every later wait gives up at once
    EPOCHS = 64  #: + block: uses of the block's slots that this rank has left
    SLOTS = EPOCHS + 192  #: the first slot

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size: is {self.world_size}, must be from 1 to {MAX_WORLD_SIZE}")
        if self.slots % (2 * WARP) or not 2 * WARP <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots: is {self.slots}, must be a multiple of 64 up to {MAX_SLOTS}")

    @property
    def bytes(self) -> int:
        return 4 * self.SLOTS + BLOCKS * 2 * self.world_size * self.slots * VECTOR

    @property
    def words(self) -> int:
        """Words that must be zero before the first use: all."""
        return self.bytes // 4

    def describe(self, word: int) -> str:
        """What a word is, for an error message about a wait for it."""
        if word < self.SLOTS:
            return f"word {word}"
        row, _ = divmod((word - self.SLOTS) * 4 // VECTOR, self.slots)
        row, sender = divmod(row, self.world_size)
        return f"use count of the payload of rank {sender} for block {row // 2} (half {row % 2})"

    def vectors(self, config: Config) -> int:
        """Vectors that one launch can move: of the input in one_shot, of each rank's part in two_shot."""
        room = self._room(config)
        step = min(config.threads, room)
        return config.blocks * (room // step) * step

    def grid(self, vectors: int, config: Config) -> tuple[int, int]:
        """Blocks and threads for that many. No block goes without a vector: each must hear from every peer."""
        warps = -(-vectors // WARP)
        blocks = min(config.blocks, warps)
        return blocks, min(config.threads, self._room(config), -(-warps // blocks) * WARP)

    def _room(self, config: Config) -> int:
        return self.slots if config.form == "one_shot" else self.slots // 2


def layout_for(max_nbytes: int, world_size: int) -> Layout:
    """A workspace that takes an input of ``max_nbytes`` in one launch if it is not above 2 MiB; else in several."""
    for_each_block = -(-max_nbytes // (VECTOR * BLOCKS))
    return Layout(world_size, min(MAX_SLOTS, _up(max(for_each_block, 1), 2 * WARP)))


def bytes_needed(max_nbytes: int, world_size: int) -> int:
    """Bytes of that workspace."""
    return layout_for(max_nbytes, world_size).bytes
