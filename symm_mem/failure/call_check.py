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
from ..errors import RankMismatch
from ..switches import is_on
from .fault import fault_of
from .rank_pages import FIRST, RankPages

if TYPE_CHECKING:
    from ..heap.heap import Heap

_PLACE = 4096  #: bytes of a text, with its digest in front
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
    with heap.lock:
        if heap.call_check is None:
            with heap.rendezvous.poison_on_error("make the call check"):
                heap.call_check = CallCheck(heap)
        return heap.call_check


class CallCheck:
    """The pages of one group's ranks."""

    def __init__(self, heap: Heap) -> None:
        self._rank, self._group, self._lock = heap.rank, heap.group_name, heap.lock
        self._fault = fault_of(heap)
        self._pages = RankPages(heap, 2 * _PLACE, "the call check")
        self._count = self._calls = 0
        #: Ops of which a call was compared: the same on all ranks.
        self.compared: set[str] = set()

    def reset_state(self) -> None:
        """Count from 0 again: the heap is being reset."""
        self.compared.clear()
        self._count = self._calls = self._pages.own_count.value = 0

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
        site = text(call_site())
        where = f" at {site}" if site else ""
        with self._lock:
            self._fault.raise_if_broken(op)
            self._calls += begins
            digest = hashlib.blake2b(said.encode(), digest_size=_DIGEST).digest()
            shown = f"{said}{remark}{where}".encode()[: _PLACE - _DIGEST - 2]
            with self._fault.whole(op):  # the others may take this rank to make the call
                entries = self._post(op, digest + len(shown).to_bytes(2, "little") + shown, site)
            first = entries[0]
            for rank, entry in enumerate(entries):
                if entry[:_DIGEST] != first[:_DIGEST]:
                    raise RankMismatch(
                        what or f"call {self._calls}", self._group, rank, _shown(entry), _shown(first)
                    )

    def _post(self, op: str, entry: bytes, site: str | None) -> list[bytes]:
        self._count += 1
        count = self._count & 0xFFFFFFFF
        at, pages = FIRST + (count & 1) * _PLACE, self._pages
        pages.own[at : at + len(entry)] = entry
        pages.own_count.value = count
        flag = "its count of checked calls"
        return [page[at : at + _PLACE] for page in pages.counted(op, count, flag, site)]


def _shown(entry: bytes) -> str:
    length = int.from_bytes(entry[_DIGEST : _DIGEST + 2], "little")
    return entry[_DIGEST + 2 : _DIGEST + 2 + length].decode(errors="replace")
