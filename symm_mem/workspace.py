"""A workspace: what one call site owns on the heap, at the same offset on every rank.

It holds control words, flags and two halves of data. Calls take the halves in turn. Nothing is ever
reset: every control word and flag counts uses of a half, has one writer and only grows, with
wrap-around, so a captured CUDA graph goes on counting when it is replayed.

Use ``e`` of half ``h`` (``e = EPOCH[h] + 1``) runs like this on every rank:

====================  ==============================================================================
may I overwrite?      rank p's half h is free for use e once ``done(h)[p] >= e - 1`` in *my* words: p
                      has written that it left use e - 1. It is looked at before the first store to p.
data, then flag       I store data into p's half h, then ``flags(h)[me][i] = e`` in p's words (release,
                      system scope). p reads the data after it saw ``flags(h)[me][i] == e`` (acquire).
I am done             when nothing of my half h is read any more: ``EPOCH[h] = e`` in my words, then
                      ``done(h)[me] = e`` in everybody's words (release, system scope).
====================  ==============================================================================

Data may announce itself instead (``Layout.announced``): the halves are empty, all zeros, before the first use, no word
that is sent is zero, and who takes a word puts the zero back before it is done. Then there are no flags.

A flag cannot be past e before p is done. It may be older by any number of uses, in which calls had less to say. So it
is compared for equality, where ``>=`` with wrap-around would take one of 2**31 uses ago for a later one. (Triton's
kernels, those of float32, compare ``>=``: equality made one of them spill.)

A rank that takes the same half twice in a row is right, too: it only waits longer. So the half may be
chosen on the host and frozen into a graph.

A use that does not come to its end, because a wait in it expired or an exception left it, leaves the ranks at
different counts, and what was made of it is worth nothing. None of the group's workspaces then takes a call on this
rank (fault.py) until all ranks have reset the group together: then every word is zero again on every rank, before any
rank goes on.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from .calls import Calls, Grids, running
from .errors import CallAbandoned, PeerTimeout, WeftError, describe
from .fault import WORD, Fault, fault_of
from .findings import Noted
from .sites import call_site
from .spin import Expired, spin
from .timeouts import get_timeout

if TYPE_CHECKING:
    from .captured import CapturedGraph
    from .heap import Heap

HALVES = 2
OUTGROWN = "outgrown"  #: in ``prepared``, of a captured graph: a smaller one that its earlier nodes write to
_ALIGN = 256
_MOST_PREPARED = 4096  # of a few KiB each: a program whose sizes change all the time makes one for each


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Layout:
    """Where things lie in a workspace: 32-bit words from its start, the same on every rank.

    Attributes:
        announced: what is sent into a half announces itself.
        staging_bytes: behind the halves, of the own rank alone; nothing of it lives longer than a kernel.
    """

    world_size: int
    flags_per_rank: int
    half_bytes: int
    announced: bool = False
    staging_bytes: int = 0

    # Own words: only the own rank reads and writes them.
    EPOCH = 8  #: + half: uses of the half that this rank has left
    TICKET = 16  #: + half: uses of the half that this rank's pushes have begun
    LEFT = 24  #: + half: blocks that have left the running kernel; the last one puts it back to 0
    PACE = 32  #: two words: the time at which what this rank's kernels have asked to send will have left
    _DONE = 64

    def done(self, half: int) -> int:
        """First of ``world_size`` words; word ``p`` is written by rank p: uses that p has left."""
        return self._DONE + half * self.world_size

    def flags(self, half: int) -> int:
        """First of ``[world_size][flags_per_rank]`` words; row ``p`` is written by rank p."""
        first = _up(self._DONE + HALVES * self.world_size, 64)
        return first + half * self.world_size * self.flags_per_rank

    @property
    def words(self) -> int:
        return self.half(HALVES if self.announced else 0) // WORD

    def half(self, half: int) -> int:
        """Byte offset of a half from the workspace's start."""
        return _up(self.flags(HALVES) * WORD, _ALIGN) + half * _up(self.half_bytes, _ALIGN)

    @property
    def staging(self) -> int:
        """Byte offset of the own rank's memory."""
        return self.half(HALVES)

    @property
    def bytes(self) -> int:
        return self.staging + _up(self.staging_bytes, _ALIGN)

    def holds(self, wanted: Layout) -> bool:
        """Whether calls that want the other one find room in this one."""
        return self == self.joined(wanted)

    def joined(self, other: Layout) -> Layout:
        """Room for the calls of both, which are of one kind."""
        flags, half = max(self.flags_per_rank, other.flags_per_rank), max(self.half_bytes, other.half_bytes)
        return replace(
            other,
            flags_per_rank=flags,
            half_bytes=half,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
        )

    def half_of(self, word: int) -> int | None:
        """The half that a 'done' word or a flag belongs to, or what announces itself."""
        for half in range(HALVES):
            if (
                word - self.done(half) in range(self.world_size)
                or word - self.flags(half) in range(self.world_size * self.flags_per_rank)
                or self._is_payload(word, half)
            ):
                return half
        return None

    def _is_payload(self, word: int, half: int) -> bool:
        return self.announced and word * WORD - self.half(half) in range(self.half_bytes)

    def describe(self, word: int) -> str:
        """What a word is, for an error message."""
        for half in range(HALVES):
            if (i := word - self.flags(half)) in range(self.world_size * self.flags_per_rank):
                return f"flag {i % self.flags_per_rank} of rank {i // self.flags_per_rank} (half {half})"
            if word - self.done(half) in range(self.world_size):
                return f"'done' of rank {word - self.done(half)} (half {half})"
            if self._is_payload(word, half):
                return f"use count of the payload at byte {word * WORD - self.half(half)} (half {half})"
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


L = TypeVar("L", bound=AnyLayout)


class Workspace(Generic[L]):
    """Memory of a layout on a heap. Rank p's copy of address x lies at ``x + (p - rank) * span``.

    Making one is collective over the heap's group: all ranks ask for the same layout in the same order.

    Its tensors do not keep it alive: whoever uses them holds the workspace. (A tensor's way to its storage is hidden
    from Python's garbage collector, which could not free a workspace that its own tensors keep.)

    Args:
        graph: it belongs to this one alone, whose replays repeat the calls that were captured.
        fault: what breaks along with it; default all of the heap.

    Attributes:
        prepared: what launchers have made for calls of this workspace, until a reset: an error may have come to a part
            of the ranks before they had made theirs, and ranks make them together.
        copy_streams: those that launchers keep for as long as it lives.
    """

    def __init__(
        self,
        heap: Heap,
        layout: L,
        tag: str,
        *,
        graph: CapturedGraph | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.heap = heap
        self.graph = graph
        self.fault = fault or fault_of(heap)
        self.layout = layout
        self.rank = heap.rank
        self.world_size = heap.world_size
        self.span = heap.span
        self.block = heap.allocate(layout.bytes, tag, zero=layout.words * WORD)
        self.address = heap.address(self.rank) + self.block.offset
        self.words = self.words_of(self.rank)
        #: CPU ranks hold it through a call: threads take turns. One that Ctrl-C has kept from letting go of it goes on.
        self.lock = threading.RLock()
        self.prepared: Noted[Any, Any] = Noted()
        self.copy_streams: dict[Any, Any] = {}
        self._turn = 0
        self._has_halves = isinstance(layout, Layout)
        self._calls = Calls(HALVES, lambda: get_timeout(heap.group_name), graph is not None)
        self.fault.knows(self.address, layout, self._calls)
        heap.users.add(self)

    def raise_if_broken(self, op: str | None = None, inside: int = 0, grids: Grids = ()) -> None:
        """Where a wait has expired, in whatever workspace of the group, this rank makes no more calls.

        Args:
            op: the call that is about to be made, if one is.
            inside: so many frames above this one are weft's, and there is another one above those, for certain.
            grids: blocks of each launch of that call, where they push.

        Raises:
            PeerTimeout: in the words of that wait, until the group is reset.
            CallAbandoned: likewise, of a call that another exception ended.
        """
        fault = self.fault
        if fault.error is not None or fault.written.value:
            fault.raise_if_broken()
        if op is not None:
            self._calls.begins(op, call_site(inside + 2), grids)
            if not self._has_halves and running.inside:
                running.workspace = self

    def launched(self) -> None:
        """The call has nothing left to do that a peer may wait for: an exception in the rest of it breaks nothing."""
        running.workspace = None

    def expired(self, op: str, peer: int, word: int, expected: int, waited: Expired) -> WeftError:
        """The error of a CPU rank's wait, also that of all later calls."""
        error = PeerTimeout(
            *(op, self.heap.group_name, self.rank, peer, self.layout.describe(word), expected),
            *(waited.seen, waited.seconds, self._calls.site, waited.ended, waited.blames),
        )
        return self.fault.breaks(error)

    def word(self, rank: int, index: int) -> ctypes.c_uint32:
        """A word of rank's copy, on the CPU."""
        return ctypes.c_uint32.from_address(self.address + (rank - self.rank) * self.span + WORD * index)

    def abandon(self, cause: BaseException) -> None:
        """An exception has ended a call half-way: no more calls, because the peers may have seen a part of it."""
        if isinstance(cause, WeftError):
            self.fault.breaks(cause.again())
        else:
            calls, group = self._calls, self.heap.group_name
            self.fault.breaks(CallAbandoned(calls.op, group, self.rank, describe(cause), calls.site))

    def forget(self) -> None:
        """As new: the heap is being reset, and the words are zero on every rank."""
        self._turn = 0
        self._calls.forget()
        if self.graph is None:  # a captured graph runs what was made for it
            self.prepared.clear()

    def keep(self, key: Any, made: Any) -> None:
        """Note in ``prepared`` what a launcher has made. Where there are too many, all others are forgotten: each rank
        makes them anew by itself."""
        # A captured graph runs what was made for it.
        if self.graph is None and len(self.prepared) >= _MOST_PREPARED:
            self.prepared.clear()
        self.prepared[key] = made

    def let_go(self) -> list[int]:
        """Of what refers to it and to what it has outgrown, so that their memory is dropped with the last one who holds
        them; the numbers of their blocks."""
        outgrown: Workspace[L] | None = self.prepared.get(OUTGROWN)
        self.prepared.clear()
        self.copy_streams.clear()
        return [self.block.number, *(outgrown.let_go() if outgrown is not None else ())]

    def next_half(self) -> int:
        """The half that the next call uses: the halves take turns."""
        self._turn ^= 1
        self._calls.takes(self._turn)
        if running.inside:  # from here on that call must come to its end, or the group is broken
            running.workspace = self
        return self._turn

    def words_of(self, rank: int) -> torch.Tensor:
        """Rank's control words and flags as an int32 tensor; and halves that hold zeros at first."""
        return self.heap.tensor(rank, self.block.offset, (self.layout.words,), torch.int32, None)

    def half(
        self: Workspace[Layout], rank: int, half: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A contiguous view of the start of rank's half."""
        return self.heap.tensor(rank, self.block.offset + self.layout.half(half), shape, dtype, None)


class HostUse:
    """One use of a half by a CPU rank: the protocol above in plain stores, whose order x86-64 keeps.

        with HostUse(workspace, "an_op") as use:
            ...

    The end of the body is the end of the use. An exception in it breaks the group: the use has no end then.
    Raises PeerTimeout from its waits, in words that name ``op``.
    """

    def __init__(self, workspace: Workspace[Layout], op: str) -> None:
        workspace.raise_if_broken(op)
        self.ws, self.op = workspace, op
        self.half = workspace.next_half()
        self.epoch = (self.ws.word(workspace.rank, Layout.EPOCH + self.half).value + 1) & 0xFFFFFFFF
        self._timeout = get_timeout(workspace.heap.group_name)

    def __enter__(self) -> HostUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.ws.abandon(error)

    def _wait(self, peer: int, index: int, expected: int, *, exactly: bool = False) -> None:
        ws, address = self.ws, self.ws.address + WORD * index
        process = ws.heap.rendezvous.processes[peer]
        farewell = ws.fault.farewell(peer)
        try:
            # Of the two threads of a call one may have failed, or a call in another workspace: nothing is worth a wait.
            told = process, farewell, ws.raise_if_broken
            spin(address, expected, self._timeout, *told, exactly=exactly)
        except Expired as e:
            raise ws.expired(self.op, peer, index, expected, e).again() from None

    def _flag(self, writer: int, i: int) -> int:
        return self.ws.layout.flags(self.half) + writer * self.ws.layout.flags_per_rank + i

    def wait_free(self, peer: int) -> None:
        """Until peer's half may be overwritten."""
        self._wait(peer, self.ws.layout.done(self.half) + peer, (self.epoch - 1) & 0xFFFFFFFF)

    def post(self, peer: int, i: int) -> None:
        """Tell peer that what belongs to flag ``i`` lies in its half."""
        self.ws.word(peer, self._flag(self.ws.rank, i)).value = self.epoch

    def wait(self, peer: int, i: int) -> None:
        """Until what belongs to flag ``i`` of peer lies in the own half."""
        self._wait(peer, self._flag(peer, i), self.epoch, exactly=True)

    def leave(self) -> None:
        """Nothing of the own half is read any more."""
        ws = self.ws
        self.ws.word(ws.rank, Layout.EPOCH + self.half).value = self.epoch
        for rank in range(ws.world_size):
            self.ws.word(rank, ws.layout.done(self.half) + ws.rank).value = self.epoch
