"""A workspace: what one call site owns on the heap, at the same offset on every rank.

It holds control words, flags and two data buffers, which calls take in turn. Words and flags count epochs of a buffer:
each has one writer and only grows, modulo 2^32, so a captured CUDA graph goes on counting when it is replayed.
docs/protocol.md#workspace-protocol says what happens in an epoch, and why that is right.

With ``Layout.ll_protocol`` data is its own flag: buffers are zero at first, no word that is sent is zero, and the
receiver zeroes what it has read before it is done.

An epoch that does not end, because a wait in it expired or an exception left it, breaks the group on this rank
(failure/fault.py) until all ranks reset it together.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from . import flight_recorder
from .call_cache import CachedDict
from .call_site import calling, site_from
from .errors import CallAbandoned, PeerTimeout, PeerWait, WaitOutcome, WeftError, describe
from .failure.call_log import CallLog, Grids, running
from .failure.fault import fault_of
from .layout import WORD, AnyLayout, Layout
from .timeouts import ThreadLock, get_timeout

if TYPE_CHECKING:
    from .heap.captured import CapturedGraph
    from .heap.heap import Heap

OUTGROWN = "outgrown"  #: in ``prepared``, of a captured graph: a smaller one that its earlier nodes write to
_MOST_PREPARED = 4096  # of a few KiB each: a program with ever new sizes makes one for each
_word = ctypes.c_uint32.from_address
_MOST_VIEWS = 256  # of a buffer: likewise


L = TypeVar("L", bound=AnyLayout)


class Workspace(Generic[L]):
    """Memory of a layout on a heap. Rank p's copy of address x lies at ``x + (p - rank) * span``.

    Making one is collective over the heap's group: all ranks ask for the same layout in the same order.

    Its tensors do not keep it alive: whoever uses them holds the workspace. (Python's garbage collector does not see a
    tensor's reference to its storage, and could not free a workspace that its own tensors keep.)

    Args:
        graph: the captured graph that it belongs to alone, whose replays repeat the calls that were captured.
        replayed: captured graphs may use it, whether it belongs to one or not.

    Attributes:
        meets: whether ranks wait for each other where they make something for ``prepared``.
        prepared: what launchers have made for calls of this workspace, until a reset: ranks make them together, and an
            error may have reached some ranks before they had made theirs.
        started: calls that are between their start and their wait, by their buffers, until a reset.
        copy_streams: the streams that launchers keep for as long as it lives.
        last_buffer: that of the last call.
        host_words: of a CPU rank's epochs, by buffer.
    """

    meets = True

    def __init__(
        self, heap: Heap, layout: L, tag: str, *, graph: CapturedGraph | None = None, replayed: bool = False
    ) -> None:
        self.heap = heap
        self.graph = graph
        self.replayed = replayed or graph is not None
        self.fault = fault_of(heap)
        self.layout = layout
        self.rank = heap.rank
        self.world_size = heap.world_size
        self.span = heap.span
        self.block = heap.allocate(layout.bytes, tag, zero=layout.words * WORD)
        self.address = heap.address(self.rank) + self.block.offset
        #: Control words and flags as an int32 tensor, with the LL protocol the buffers, too.
        self.words = heap.tensor(self.rank, self.block.offset, (layout.words,), torch.int32, None)
        #: CPU ranks hold it through a call: threads take turns. Reentrant: Ctrl-C may keep one from releasing it.
        self.lock = ThreadLock(
            f"a workspace of group {heap.group_name!r}", lambda: get_timeout(heap.group_name)
        )
        self.prepared: CachedDict[Any, Any] = CachedDict()
        self.started: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.copy_streams: dict[Any, Any] = {}
        #: Of a CPU rank that waits: op, rank, word, and what is expected there.
        self.waiting: tuple[str, int, int, int] | None = None
        self.last_buffer = 0
        self.host_words: dict[int, _BufferWords] = {}
        self._is_double_buffered = isinstance(layout, Layout)
        shared = replayed and graph is None
        self._calls = CallLog(lambda: get_timeout(heap.group_name), self.replayed, shared)
        self.fault.knows(self.address, layout, self._calls)
        heap.users.add(self)

    def raise_if_broken(self, op: str | None = None, inside: int = 0, grids: Grids = ()) -> None:
        """Refuse a call where a wait has expired on this rank, in any workspace of the group.

        Args:
            op: the call that is about to be made, if any.
            inside: how many frames above this one are certainly weft's; another one is above those.
            grids: blocks of each launch of that call, if it uses the LL exchange.

        Raises:
            PeerTimeout: in the words of that wait, until the group is reset.
            CallAbandoned: likewise, of a call that another exception ended.
            ForkedProcess: this process was forked from the rank's.
        """
        fault = self.fault
        if fault.error is not None or fault.written.value:
            fault.raise_if_broken(op)
        if op is not None:
            self._calls.begins(op, site_from(sys._getframe(inside + 1)) or calling.site, grids)
            if not self._is_double_buffered and running.inside:
                running.workspace = self

    def begins(self, op: str) -> None:
        """A CPU rank's call begins: from here on it must come to its end, or the group is broken."""
        self.raise_if_broken(op, 2)
        if running.inside:
            running.workspace = self

    def record_launch(self, op: str, shape: flight_recorder.CallShape | None) -> None:
        """A call like one before was launched; for the flight recorder, if that is on."""
        flight_recorder.launched(op, self.heap.group_name, shape, self._calls.last_site)

    def launched(self) -> None:
        """The call has done all that a peer may wait for: an exception in the rest of it breaks nothing."""
        running.workspace = None

    def about(self, waiting: tuple[str, int, int, int], seconds: float) -> PeerWait:
        """A CPU rank's wait, after so many seconds."""
        op, peer, word, expected = waiting
        flag, site, causes = self.layout.describe(word), self._calls.site, self.fault.causes(seconds)
        return PeerWait(op, self.heap.group_name, self.rank, peer, flag, expected, site, causes)

    def still_waiting(self, seconds: float) -> PeerTimeout | None:
        """The error of a thread that did not want to wait longer than ``seconds`` for the call that another one makes
        here. That call goes on."""
        if (waiting := self.waiting) is None:
            return None
        seen = self.word(self.rank, waiting[2]).value
        return PeerTimeout(self.about(waiting, seconds), WaitOutcome(seen, seconds))

    def word(self, rank: int, index: int) -> ctypes.c_uint32:
        """A word of rank's copy, on the CPU."""
        return _word(self.address + (rank - self.rank) * self.span + WORD * index)

    def abandon(self, cause: BaseException) -> None:
        """Refuse further calls: an exception has ended one half-way, and peers may have seen part of it."""
        if isinstance(cause, WeftError):
            self.fault.breaks(cause.again())
        else:
            calls, group = self._calls, self.heap.group_name
            self.fault.breaks(CallAbandoned(calls.op, group, self.rank, describe(cause), calls.site))

    def reset_state(self) -> None:
        """Back to the initial state: the heap is being reset, and the words are zero on every rank."""
        self.last_buffer = 0
        self._calls.reset_state()
        if not self.replayed:  # a captured graph runs what was made for it
            self.prepared.clear()
            self.started = WeakValueDictionary()

    def keep(self, key: Any, made: Any) -> None:
        """Keep in ``prepared`` what a launcher has made. When there are too many, all others are dropped, and each rank
        makes them again by itself."""
        # A captured graph runs what was made for it.
        if not self.replayed and len(self.prepared) >= _MOST_PREPARED:
            self.prepared.clear()
        self.prepared[key] = made

    def release(self) -> list[int]:
        """Drop the references to it and to what it has outgrown, so that their memory goes with the last holder.
        Returns the numbers of their blocks."""
        outgrown: Workspace[L] | None = self.prepared.get(OUTGROWN)
        self.prepared.clear()
        self.started = WeakValueDictionary()
        self.copy_streams.clear()
        return [self.block.number, *(outgrown.release() if outgrown is not None else ())]

    def next_buffer(self) -> int:
        """The buffer that the next call uses; they alternate."""
        return self.take_buffer(self.last_buffer ^ 1)

    def take_buffer(self, buffer: int) -> int:
        """The next call uses this buffer, as on all ranks."""
        self.last_buffer = buffer
        self._calls.takes(buffer)
        if running.inside:  # from here on that call must come to its end, or the group is broken
            running.workspace = self
        return buffer

    def buffer(
        self: Workspace[Layout], rank: int, buffer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A contiguous view of the start of rank's buffer."""
        return self.heap.tensor(rank, self.block.offset + self.layout.buffer(buffer), shape, dtype, None)


class _BufferWords:
    """A buffer's words as a CPU rank's epochs use them, and views of its data: made once, not at each call.

    Attributes:
        epoch: this rank's count; done: indices of the words in which peers say that they are done, by rank.
        left: the word in which this rank says so, in each rank's copy.
        flags: index of the first flag of each rank.
        slots: views of the data, by rank, shape and dtype.
    """

    def __init__(self, ws: Workspace[Layout], buffer: int) -> None:
        layout, ranks = ws.layout, range(ws.world_size)
        self.epoch = ws.word(ws.rank, Layout.EPOCH + buffer)
        self.done = [layout.done(buffer) + rank for rank in ranks]
        self.left = [ws.word(rank, layout.done(buffer) + ws.rank) for rank in ranks]
        self.flags = [layout.flags(buffer) + rank * layout.flags_per_rank for rank in ranks]
        self.slots: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}


class HostEpoch:
    """One epoch of a buffer on a CPU rank: the protocol in plain stores, whose order x86-64 keeps.

        with HostEpoch(workspace, "an_op") as epoch:
            ...

    The end of the body ends the epoch. An exception in it breaks the group, and the epoch does not end.
    Its waits raise PeerTimeout, which names ``op``. ``buffer``: which one, as on all ranks; default the next one.
    """

    def __init__(self, workspace: Workspace[Layout], op: str, buffer: int | None = None) -> None:
        workspace.raise_if_broken(op)
        self.ws, self.op = workspace, op
        self.buffer = workspace.take_buffer(workspace.last_buffer ^ 1 if buffer is None else buffer)
        words = workspace.host_words.get(self.buffer)
        if words is None:
            words = workspace.host_words[self.buffer] = _BufferWords(workspace, self.buffer)
        self._words = words
        self.epoch = (words.epoch.value + 1) & 0xFFFFFFFF

    def __enter__(self) -> HostEpoch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.ws.abandon(error)

    def slots(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view of the start of rank's buffer."""
        views, key = self._words.slots, (rank, shape, dtype)
        found = views.get(key)
        if found is None:
            if len(views) >= _MOST_VIEWS:
                views.clear()
            found = views[key] = self.ws.buffer(rank, self.buffer, shape, dtype)
        return found

    def _wait(self, peer: int, index: int, expected: int, exactly: bool) -> None:
        if profiler._is_profiler_enabled:  # for pictures of a call (weft.passes.timeline)
            with record_function(f"weft:waits for rank {peer}"):
                self._spin(peer, index, expected, exactly)
        else:
            self._spin(peer, index, expected, exactly)

    def _spin(self, peer: int, index: int, expected: int, exactly: bool) -> None:
        ws = self.ws
        ws.waiting = waiting = self.op, peer, index, expected
        about = partial(ws.about, waiting)
        ws.lock.goes_on()
        try:
            ws.fault.wait_until(ws.address + WORD * index, expected, peer, about, exactly=exactly)
        finally:
            ws.waiting = None

    def wait_free(self, peer: int) -> None:
        """Until peer's buffer may be overwritten."""
        index, expected = self._words.done[peer], (self.epoch - 1) & 0xFFFFFFFF
        seen = _word(self.ws.address + WORD * index).value
        if (seen - expected) & 0xFFFFFFFF >= 0x80000000 or profiler._is_profiler_enabled:  # as in ``reached``
            self._wait(peer, index, expected, exactly=False)

    def post(self, peer: int, i: int) -> None:
        """Set flag ``i`` at peer: its data lies in peer's buffer."""
        ws = self.ws
        place = ws.address + (peer - ws.rank) * ws.span + WORD * (self._words.flags[ws.rank] + i)
        _word(place).value = self.epoch

    def wait(self, peer: int, i: int) -> None:
        """Until the data of peer's flag ``i`` lies in the local buffer."""
        index = self._words.flags[peer] + i
        if _word(self.ws.address + WORD * index).value != self.epoch or profiler._is_profiler_enabled:
            self._wait(peer, index, self.epoch, exactly=True)

    def leave(self) -> None:
        """End the epoch: nothing of the local buffer is read any more."""
        self._words.epoch.value = self.epoch
        for word in self._words.left:
            word.value = self.epoch
