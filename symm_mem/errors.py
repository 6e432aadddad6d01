"""What can go wrong between ranks. Every message names the ranks and values it is about."""

from __future__ import annotations


class WeftError(RuntimeError):
    """Base of weft's own errors."""


class PeerTimeout(WeftError):
    """A wait on another rank passed its deadline.

    Attributes: ``op`` (what waited), ``group``, ``rank`` (who waited), ``peer`` (the rank waited for),
    ``flag`` (which word or message), ``expected``, ``seen``, ``seconds`` (how long).
    """

    def __init__(
        self,
        op: str,
        group: str,
        rank: int,
        peer: int,
        flag: str,
        expected: object,
        seen: object,
        seconds: float,
    ) -> None:
        super().__init__(
            f"{op}: rank {rank} of group {group!r} waited {seconds:g} s for rank {peer}: "
            f"{flag} is {seen}, expected {expected}"
        )
        self.op, self.group, self.rank, self.peer = op, group, rank, peer
        self.flag, self.expected, self.seen, self.seconds = flag, expected, seen, seconds


class RankMismatch(WeftError):
    """Ranks of one group asked for different things at the same step.

    Attributes: ``rank`` (the first one that differs from rank 0), ``value`` (what it asked for),
    ``expected`` (what rank 0 asked for).
    """

    def __init__(self, what: str, group: str, rank: int, value: str, expected: str) -> None:
        super().__init__(f"{what} in group {group!r}: rank {rank} asked for {value}, rank 0 for {expected}")
        self.rank, self.value, self.expected = rank, value, expected


class HeapUnavailable(WeftError):
    """The group's ranks cannot address each other's memory; the message says why."""
