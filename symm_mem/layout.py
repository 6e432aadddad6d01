"""Where things lie in a workspace: control words, flags and two buffers of data, at the same offsets on every rank."""

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
    """Where things lie in a workspace: 32-bit words from its start, the same on every rank.

    Attributes:
        announced: what is sent into a buffer announces itself.
        staging_bytes: behind the buffers, of the own rank alone; nothing of it lives longer than a kernel.
    """

    world_size: int
    flags_per_rank: int
    buffer_bytes: int
    ll_protocol: bool = False
    staging_bytes: int = 0

    # Own words: only the own rank reads and writes them.
    EPOCH = 8  #: + buffer: uses of the buffer that this rank has left
    TICKET = 16  #: + buffer: uses of the buffer that this rank's pushes have begun
    LEFT = 24  #: + buffer: blocks that have left the running kernel; the last one puts it back to 0
    PACE = 32  #: two words: the time at which what this rank's kernels have asked to send will have left
    _DONE = 64

    def done(self, buffer: int) -> int:
        """First of ``world_size`` words; word ``p`` is written by rank p: uses that p has left."""
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
        """Byte offset of the own rank's memory."""
        return self.buffer(NUM_BUFFERS)

    @property
    def bytes(self) -> int:
        return self.staging + _up(self.staging_bytes, _ALIGN)

    def holds(self, wanted: Layout) -> bool:
        """Whether calls that want the other one find room in this one."""
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

    def buffer_of(self, word: int) -> int | None:
        """The buffer that a 'done' word or a flag belongs to, or what announces itself."""
        for buffer in range(NUM_BUFFERS):
            if (
                word - self.done(buffer) in range(self.world_size)
                or word - self.flags(buffer) in range(self.world_size * self.flags_per_rank)
                or self._is_payload(word, buffer)
            ):
                return buffer
        return None

    def _is_payload(self, word: int, buffer: int) -> bool:
        return self.ll_protocol and word * WORD - self.buffer(buffer) in range(self.buffer_bytes)

    def describe(self, word: int) -> str:
        """What a word is, for an error message."""
        for buffer in range(NUM_BUFFERS):
            if (i := word - self.flags(buffer)) in range(self.world_size * self.flags_per_rank):
                return f"flag {i % self.flags_per_rank} of rank {i // self.flags_per_rank} (buffer {buffer})"
            if word - self.done(buffer) in range(self.world_size):
                return f"'done' of rank {word - self.done(buffer)} (buffer {buffer})"
            if self._is_payload(word, buffer):
                return (
                    f"use count of the payload at byte {word * WORD - self.buffer(buffer)} (buffer {buffer})"
                )
        return f"word {word}"


class AnyLayout(Protocol):
    """What a workspace must know of its layout. It begins with control words."""

    @property
    def bytes(self) -> int: ...

    @property
    def words(self) -> int:
        """32-bit words from the start on that are zero before the first use."""
        ...

    def describe(self, word: int) -> str: ...
