"""The layout of a workspace: control words, flags and two data buffers, at the same offsets on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

WORD = 4  #: bytes of a control word or flag
NUM_BUFFERS = 2
_ALIGN = 256


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Layout:
    """The layout of a workspace, in 32-bit words from its start, the same on every rank.

    Attributes:
        ll_protocol: data is its own flag (docs/protocol.md#ll-protocol).
        staging_bytes: local memory after the buffers; its contents do not outlive a kernel.
    """

    world_size: int
    flags_per_rank: int
    buffer_bytes: int
    ll_protocol: bool = False
    staging_bytes: int = 0

    # Local words: only this rank reads and writes them.
    EPOCH = 8  #: + buffer: epochs of the buffer that this rank has ended
    EPOCH_TICKET = 16  #: + buffer: the epoch of the buffer for which this rank's copy engines send
    LEFT = 24  #: + buffer: blocks of the running kernel that have left the buffer; the last one sets it back to 0
    LIMITER_CLOCK = (
        32  #: two words: the rate limiter's clock, when all that this rank's kernels send has left
    )
    DRAWN = 40  #: + buffer: what blocks of the running kernel have drawn; the last one sets it back to 0
    _DONE = 64

    def done(self, buffer: int) -> int:
        """First of ``world_size`` words; word ``p`` is written by rank p: epochs that p has ended."""
        return self._DONE + buffer * self.world_size

    def flags(self, buffer: int) -> int:
        """First of ``[world_size][flags_per_rank]`` words; row ``p`` is written by rank p."""
        first = _up(self._DONE + NUM_BUFFERS * self.world_size, 64)
        return first + buffer * self.world_size * self.flags_per_rank

    @property
    def words(self) -> int:
        return self.buffer(NUM_BUFFERS if self.ll_protocol else 0) // WORD

    def buffer(self, buffer: int) -> int:
        """Byte offset of a buffer from the workspace's start."""
        return _up(self.flags(NUM_BUFFERS) * WORD, _ALIGN) + buffer * _up(self.buffer_bytes, _ALIGN)

    @property
    def staging(self) -> int:
        """Byte offset of the local staging memory."""
        return self.buffer(NUM_BUFFERS)

    @property
    def bytes(self) -> int:
        return self.staging + _up(self.staging_bytes, _ALIGN)

    def holds(self, wanted: Layout) -> bool:
        """Whether this layout has room for calls that need the other one."""
        return self == self.joined(wanted)

    def joined(self, other: Layout) -> Layout:
        """Room for the calls of both, which are of one kind."""
        flags, buffer = (
            max(self.flags_per_rank, other.flags_per_rank),
            max(self.buffer_bytes, other.buffer_bytes),
        )
        return replace(
            other,
            flags_per_rank=flags,
            buffer_bytes=buffer,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
        )

    def counter_of(self, word: int) -> int | None:
        """The buffer that a 'done' word, a flag, or a word of LL data belongs to."""
        return next((buffer for buffer in range(NUM_BUFFERS) if self._part(buffer, word)), None)

    def describe(self, word: int) -> str:
        """What a word is, for an error message."""
        buffer = self.counter_of(word)
        return f"word {word}" if buffer is None else f"{self._part(buffer, word)} (buffer {buffer})"

    def _part(self, buffer: int, word: int) -> str | None:
        """What a word of a buffer is; None: it is none."""
        if (i := word - self.flags(buffer)) in range(self.world_size * self.flags_per_rank):
            return f"flag {i % self.flags_per_rank} of rank {i // self.flags_per_rank}"
        if (rank := word - self.done(buffer)) in range(self.world_size):
            return f"'done' of rank {rank}"
        byte = word * WORD - self.buffer(buffer)
        return (
            f"epoch of the data at byte {byte}"
            if self.ll_protocol and byte in range(self.buffer_bytes)
            else None
        )


class AnyLayout(Protocol):
    """What a workspace needs of its layout, which begins with control words."""

    @property
    def bytes(self) -> int: ...

    @property
    def words(self) -> int:
        """32-bit words from the start on that are zero before the first use."""
        ...

    def counter_of(self, word: int) -> int | None:
        """What counts the epochs of a word, as calls take it (``CallLog``): a buffer, or a block."""
        ...

    def describe(self, word: int) -> str: ...
