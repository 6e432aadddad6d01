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

import torch.distributed as dist

from ..call_cache import invalidate_calls
from ..call_site import call_site, text
from ..switches import is_on
from .fault import fault_of
from .rank_pages import RankPages

if TYPE_CHECKING:
    from ..heap.heap import Heap

_PLACE = 4096  # bytes of a text, with its digest in front
_DIGEST = 16

_on: bool | None = None
_first_calls: bool | None = None


def is_checked() -> bool:
    """Whether calls are compared across ranks.

    >>> from weft import symm_mem
    >>> symm_mem.set_checked(False)
    >>> symm_mem.is_checked()
    False

    What ``set_checked`` said counts, else WEFT_CHECK, else whether TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch
    compares calls, too.
    """
    global _on
    if _on is None:
        _on = is_on("WEFT_CHECK", default=dist.get_debug_level() == dist.DebugLevel.DETAIL)
    return _on


def compares_first_calls() -> bool:
    """Whether the first call of each op is compared: unless WEFT_CHECK=0."""
    global _first_calls
    if _first_calls is None:
        is_on("WEFT_CHECK")  # refuses what is neither 0 nor 1
        _first_calls = os.environ.get("WEFT_CHECK") != "0"
    return _first_calls


def set_checked(on: bool) -> None:
    """Compare each call of an op across ranks before it is launched, or the first ones only, in all groups.

    >>> import torch, torch.distributed as dist
    >>> from weft import symm_mem
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> symm_mem.set_checked(True)
    >>> try:
    ...     y = one_shot_all_reduce(torch.ones(2 + dist.get_rank()), "sum", None)
    ... except symm_mem.RankMismatch as error:
    ...     print(error)
    call 1 in group '0': rank 1 asked for ...
    >>> symm_mem.set_checked(False)

    All ranks must say so between the same calls. A call that differs raises RankMismatch on every rank, and names the
    first rank that differs from rank 0, the number of the call, and both calls with their file and line. The hosts of
    the ranks wait for each other at every call. A captured graph is checked at its capture, its replays are not. The
    group is usable afterwards.

    The first call of each op on a group's heap, and the first one after a reset, is compared outside of the checked
    mode, too. WEFT_CHECK=0 turns that off, WEFT_CHECK=1 is the checked mode, and so is
    TORCH_DISTRIBUTED_DEBUG=DETAIL where WEFT_CHECK is not set; all ranks must have the same.

    Args:
        on: whether to compare.

    Raises:
        TypeError: ``on`` is not a bool.
    """
    global _on
    if not isinstance(on, bool):
        raise TypeError(f"on: is {on!r}, must be True or False")
    _on = on
    invalidate_calls()


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
