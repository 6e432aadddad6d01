"""What has broken a group on this rank: one word, one record and one error, which all its workspaces share.

What an expired wait leaves is invalid, and so is all that is computed from it, in whatever workspace. So a wait
that expires in any of them sets one word. Kernels of the group that begin on this rank afterwards send nothing and give
up their waits at once; the peers miss the data and report this rank. Only the first wait writes the record, and every
call and ``check`` repeats it until all ranks reset the group. Other groups have words of their own, and go on.

The words lie at the same offset on every rank: abort notices stand among them. docs/protocol.md#poison-on-error
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import flight_recorder, forks
from ..bootstrap.processes import has_ended
from ..call_site import call_site, text
from ..errors import CallAbandoned, PeerTimeout, PeerWait, WaitOutcome, WeftError, describe
from ..layout import WORD
from ..switches import is_checked
from ..timeouts import get_timeout
from .spin_wait import PeerLiveness, spin

if TYPE_CHECKING:
    from ..heap.heap import Heap
    from ..layout import AnyLayout
    from .call_log import CallLog

_RECENT = 60.0  # seconds before a wait in which calls of other threads count as concurrent with it
_WAIT_FREE, _ABORTED = 2, 3  # kinds of a record, see kernels/device/ptx/sync.cuh


@dataclass(frozen=True)
class WaitRecord:
    """What a kernel writes of the first wait that expires, after a word that says that it did (sync.cuh)."""

    workspace: int  # its address
    peer: int
    word: int
    expected: int
    seen: int
    kind: int
    when: int  # nanoseconds since 1970


class Fault:
    """The words of one heap on every rank, the record of this rank, and its error. Making one is collective.

    Attributes:
        address: of the local words. Rank p's lie at ``address + (p - rank) * span``.
        words: the local ones, int32 [WORDS].
        record: address of the record, in pinned host memory; 0 on the CPU, where waits raise by themselves. A kernel
            writes ``[1 once written, address of its workspace, peer, word, expected, seen, kind, when]``.
        error: what this rank's calls are refused with.
        broken_at: when that happened, in nanoseconds since 1970, as GPUs count them, too.
    """

    # Local word: only this rank reads and writes it.
    BROKEN = 0  #: not 0 once a wait has expired: 1 + the rank that was waited for in vain
    # Rank p writes + p: 1 + the rank it blames, once it takes no more calls. On CUDA only before copies that are
    # enqueued already.
    ABORT_NOTICE = 32
    MAX_ABORT_NOTICES = 32
    WORDS = ABORT_NOTICE + MAX_ABORT_NOTICES

    def __init__(self, heap: Heap) -> None:
        size = self.WORDS * WORD
        self.block = heap.allocate(size, "words of a fault", zero=size)
        self.address = heap.address(heap.rank) + self.block.offset
        self.words = heap.tensor(heap.rank, self.block.offset, (self.WORDS,), torch.int32, None)
        self._heap = heap
        self._record = heap.backend.new_record()
        self.record = 0 if self._record is None else self._record.data_ptr()
        #: not 0 once the record is written
        self.written = ctypes.c_int64() if self._record is None else ctypes.c_int64.from_address(self.record)
        self.error: WeftError | None = None
        self.broken_at = 0
        # By address, also of workspaces that are gone: their last kernels may still run.
        self._places: dict[int, tuple[AnyLayout, CallLog]] = {}
        heap.users.add(self)
        forks.tell(self)

    def forked(self) -> None:
        """This process is a child of the rank's: it makes no call, and the rank's peers do not hear of it."""
        self.error, self.broken_at = self._heap.owner.refusal("a call"), time.time_ns()

    def knows(self, address: int, layout: AnyLayout, calls: CallLog) -> None:
        """Register the workspace at this address: how to read the records of its kernels."""
        self._places[address] = layout, calls

    def raise_if_broken(self, op: str | None = None) -> None:
        """Raise what has broken the group on this rank, in the same words until it is reset.

        ``op``: the call that asks.
        """
        if self.error is None and self.written.value:
            assert self._record is not None
            self.error = self._read(WaitRecord(*self._record.tolist()[1:]))
            flight_recorder.failed(self.error)
        if self.error is not None:
            raise self.error.again(op)

    def _read(self, record: WaitRecord) -> PeerTimeout:
        heap, self.broken_at = self._heap, record.when
        peer, word, expected, seen = record.peer, record.word, record.expected, record.seen
        name, site, flag, seconds, blames = "a call", None, f"word {word}", 0.0, None
        if record.workspace in self._places:
            layout, calls = self._places[record.workspace]
            # A wait for memory to become free expects the count of the epoch before.
            epoch = expected + (record.kind == _WAIT_FREE)
            name, site = calls.find(layout.counter_of(word), epoch)
            flag, seconds = layout.describe(word), getattr(name, "seconds", calls.seconds)
        if record.kind == _ABORTED:  # nothing was waited for; what it says is 1 + the rank that it blames
            flag, expected, seconds, blames = f"abort notice of rank {peer}", 0, 0.0, seen - 1
        ended = blames is None and has_ended(heap.rendezvous.processes[peer])
        causes = self.causes(seconds)
        wait = PeerWait(name, heap.group_name, heap.rank, peer, flag, expected, site, causes)
        return PeerTimeout(wait, WaitOutcome(seen, seconds, ended, blames))

    def breaks(self, error: WeftError) -> WeftError:
        """Refuse further calls on this rank with ``error``. The first error counts; returns it."""
        if self.error is None:
            self.error, self.broken_at = error, time.time_ns()
            heap = self._heap
            if self._record is None and heap.rank < self.MAX_ABORT_NOTICES:
                blamed = getattr(error, "culprit", heap.rank)
                for rank in range(heap.world_size):
                    there = self.address + (rank - heap.rank) * heap.span
                    ctypes.c_uint32.from_address(there + WORD * (self.ABORT_NOTICE + heap.rank)).value = (
                        1 + blamed
                    )
            flight_recorder.failed(error)
        return self.error

    @contextmanager
    def whole(self, op: str) -> Iterator[None]:
        """A call that is left half-way breaks the group: the counts of the two sides would not meet again."""
        self.raise_if_broken(op)
        try:
            yield
        except WeftError:
            raise  # it has broken the group already
        except BaseException as e:
            heap = self._heap
            site = text(call_site(3))  # this, contextlib, and the method that is whole
            self.breaks(CallAbandoned(op, heap.group_name, heap.rank, describe(e), site))
            raise

    def wait_until(
        self,
        address: int,
        expected: int,
        peer: int,
        about: Callable[[float], PeerWait],
        *,
        exactly: bool = False,
    ) -> None:
        """A rank's host waits until the word at ``address``, which ``peer`` writes, has reached ``expected``.

        Args:
            about: the wait, when it has taken so many seconds.
            exactly: as for ``spin``.

        Raises:
            PeerTimeout: the rank does not come, has ended or has posted an abort notice. It breaks the group.
            WeftError: another wait, or another thread, has broken the group meanwhile.
        """
        heap = self._heap
        liveness = PeerLiveness(heap.rendezvous.processes[peer], self._abort_notice(peer), about)
        timeout = get_timeout(heap.group_name)
        outcome = spin(address, expected, timeout, liveness, self.raise_if_broken, exactly=exactly)
        if outcome is not None:
            raise self.breaks(PeerTimeout(about(outcome.seconds), outcome)).again()

    def causes(self, seconds: float) -> str:
        """Why a rank may not have come to a call for so long, as far as this one can say."""
        said = "" if is_checked() else ": WEFT_CHECK=1 names the first one that differs"
        text = f"it is late, or has made other calls, or in another order{said}"
        since = time.monotonic() - seconds - _RECENT
        threads = sorted(repr(name) for name, at in list(self._heap.callers.values()) if at > since)
        if len(threads) > 1:
            text += (
                f"; threads {', '.join(threads)} of this rank call in the group: all ranks need one order of "
            )
            text += "the calls of all threads"
        return text

    def _abort_notice(self, peer: int) -> int | None:
        """Address of the local word for the abort notice of ``peer``; None if it has none that the host can read."""
        if self._record is not None or peer >= self.MAX_ABORT_NOTICES:
            return None
        return self.address + WORD * (self.ABORT_NOTICE + peer)

    def reset_state(self) -> None:
        """Back to the initial state: the heap is being reset, and the words are zero on every rank."""
        self.error = None
        if self._record is not None:
            self._record.zero_()


def refuse_if_broken(heap: Heap) -> None:
    """To be called first of all, before ranks prepare, compare or allocate anything together for a call.

    Raises:
        WeftError: what has broken the group on this rank, until it is reset.
    """
    if heap.fault is not None:
        heap.fault.raise_if_broken()


def fault_of(heap: Heap) -> Fault:
    """The heap's; all ranks make it together, with the first memory that counts."""
    return heap.make_once("fault", Fault, "make the words of a fault")
