"""Ranks compare calls before anything is launched: the first one of each op, and in the checked mode all of them.

Every rank has a page that all ranks of the group can read (rank_pages.py). Before a call each rank writes what it is
about to do and counts up; it reads what the others wrote once they have counted as far, and the first rank that differs
from rank 0 is named on every rank. So at every call a rank's host waits for the others', within the group's deadline;
nothing is enqueued on a stream, so a captured graph is checked at its capture and its replays cost nothing.

A page has two places for texts, used in turn: docs/protocol.md#call-check has the proof.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from ..call_site import call_site, text
from ..switches import is_on
from .fault import fault_of
from .rank_pages import RankPages

if TYPE_CHECKING:
    from ..heap.heap import Heap

_PLACE = 4096  # bytes of a text, with its digest in front
_DIGEST = 16

_first_calls: bool | None = None


def compares_first_calls() -> bool:
    """Whether the first call of each op is compared: unless WEFT_CHECK=0."""
    global _first_calls
    if _first_calls is None:
        is_on("WEFT_CHECK")  # refuses what is neither 0 nor 1
        _first_calls = os.environ.get("WEFT_CHECK") != "0"
    return _first_calls


def call_check_of(heap: Heap) -> CallCheck:
    """The heap's call check; made by all ranks together at the first call."""
    return heap.make_once("call_check", CallCheck, "make the call check")


class CallCheck:
    """The pages of one group's ranks."""

    def __init__(self, heap: Heap) -> None:
        self._lock, self._fault = heap.lock, fault_of(heap)
        self._pages = RankPages(heap, 2, _PLACE, ("the call check", "its count of checked calls"))
        self._calls = 0
        #: Ops of which a call was compared: the same on all ranks.
        self.compared: set[str] = set()
        heap.users.add(self)

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        self.compared.clear()
        self._calls = 0

    def compare(
        self, op: str, said: str, remark: str = "", *, begins: bool = True, what: str | None = None
    ) -> None:
        """Every rank must say the same of its next call.

        Args:
            op: for the error of a rank that does not come.
            said: what is compared.
            begins: this is the first that is said of the call.
            remark: what is shown along with it and may differ.
            what: which call it is, for errors; default its number.

        Raises:
            RankMismatch: on every rank, naming the first rank that differs from rank 0.
            PeerTimeout: a rank did not come, or has posted an abort notice; until the group is reset.
        """
        where = f" at {site}" if (site := text(call_site())) else ""
        with self._lock:
            self._fault.raise_if_broken(op)
            self._calls += begins
            digest = hashlib.blake2b(said.encode(), digest_size=_DIGEST).digest()
            with self._fault.whole(op):  # the others may take this rank to make the call
                self._pages.post(digest + f"{said}{remark}{where}".encode())
                self._pages.compare(op, what or f"call {self._calls}", _DIGEST)
