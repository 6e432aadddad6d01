"""Errors between ranks, and what is said before there is one. Every message names the ranks and values it is about."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import Self

from .call_site import call_site, text

PATIENT = 2.0  #: seconds that a rank is waited for through the store without a word
SILENT = 30.0  #: seconds that a rank is waited for without a warning

_log = logging.getLogger("weft.symm_mem")
_warned: dict[tuple[str, int, int], float] = {}  # of group, rank and level, when


class WeftError(RuntimeError):
    """Base of weft's own errors. They can be pickled, so a launcher may hand them on.

    >>> import torch.distributed as dist
    >>> from weft import symm_mem
    >>> try:
    ...     x = symm_mem.empty(4 + dist.get_rank())
    ... except symm_mem.WeftError as error:
    ...     print(type(error).__name__)
    RankMismatch
    """

    #: Whether every rank has this error, each in another place, so that none of them takes the step that it was at.
    out_of_step = False
    _fields: tuple[tuple[Any, ...], dict[str, Any]]  # of which it is made

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        made = super().__new__(cls, *fields)
        made._fields = fields, named
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        fields, named = self._fields
        return partial(type(self), **named), fields, self.__dict__

    def again(self, op: str | None = None) -> WeftError:
        """A copy of the error without its traceback, for a state in which every call is refused.

        >>> from weft import symm_mem
        >>> symm_mem.RankMismatch("empty", "0", 1, "20 bytes", "16 bytes").again()
        RankMismatch("empty in group '0': rank 1 asked for 20 bytes, rank 0 for 16 bytes")

        Args:
            op: what is refused now, where the error is about that.
        """
        fields, named = self._fields
        return type(self)(*fields, **named)


@dataclass(frozen=True)
class PeerWait:
    """A wait of ``rank`` for ``peer``: of which call (``op``, ``site``), until which word or message (``flag``) is what
    is ``expected``. ``causes``: why it may not have come, for one who does not know more."""

    op: str
    group: str
    rank: int
    peer: int
    flag: str
    expected: object
    site: str | None = None
    causes: str = ""


@dataclass(frozen=True)
class WaitOutcome:
    """What a wait that failed saw last, and after how many ``seconds``; whether it was given up early, because the
    peer's process has ``ended`` or because the peer takes no further part and ``blames`` a rank for it."""

    seen: object
    seconds: float
    ended: bool = False
    blames: int | None = None


class PeerTimeout(WeftError):
    """A wait on another rank passed its deadline, or can no longer succeed.

    >>> import torch.distributed as dist
    >>> from weft import symm_mem
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> peers = symm_mem.rendezvous(symm_mem.empty(4))
    >>> symm_mem.set_timeout(0.1)
    >>> try:
    ...     peers.wait((rank + 1) % W)  # which puts nothing
    ... except symm_mem.PeerTimeout as error:
    ...     print(error.op, error.peer == (rank + 1) % W, error.expected, error.seen)
    wait True 1 0
    >>> symm_mem.set_timeout(300)
    >>> symm_mem.reset()  # on all ranks, before the group can be used again

    On CUDA the context lives: kernels of that group end, and the error is raised at its next call or by ``check``.

    Attributes:
        op: what waited.
        group: the group's name.
        rank: who waited.
        peer: the rank waited for.
        flag: which word or message.
        expected: the value waited for.
        seen: the value at the deadline.
        seconds: how long it waited.
        site: file and line of the call outside weft; None where nobody called.
        ended: whether the wait ended early because the peer's process has.
        blames: where the wait ended early because the peer takes no further part, the rank that it blames: itself after
            an exception; else None.
        culprit: the rank at fault, as far as this one knows.
    """

    def __init__(self, wait: PeerWait, outcome: WaitOutcome) -> None:
        w, o = wait, outcome
        if o.ended:
            more = ", and its process has ended"
        elif o.blames is not None:
            more = f", and it has given up{'' if o.blames == w.peer else f' on rank {o.blames}'}"
        else:
            more = ""
        causes = f"; {w.causes}" if w.causes and not more else ""
        super().__init__(
            f"{w.op}: rank {w.rank} of group {w.group!r} waited {round(o.seconds, 3):g} s for rank {w.peer}: "
            f"{w.flag} is {o.seen}, expected {w.expected}{more}{_called_at(w.site)}{causes}"
        )
        self.op, self.group, self.rank, self.peer, self.site = w.op, w.group, w.rank, w.peer, w.site
        self.flag, self.expected, self.seen, self.seconds = w.flag, w.expected, o.seen, o.seconds
        self.ended, self.blames = o.ended, o.blames
        self.culprit = w.peer if o.blames is None else o.blames


class RankMismatch(WeftError):
    """Ranks of one group asked for different things at the same step. Every rank raises it.

    >>> import torch.distributed as dist
    >>> from weft import symm_mem
    >>> try:
    ...     x = symm_mem.empty(4 + dist.get_rank())
    ... except symm_mem.RankMismatch as error:
    ...     print(error.rank)
    1

    Attributes:
        what: at which step.
        group: the group's name.
        rank: the first one that differs from rank 0.
        value: what it asked for.
        expected: what rank 0 asked for.
    """

    def __init__(self, what: str, group: str, rank: int, value: str, expected: str) -> None:
        super().__init__(f"{what} in group {group!r}: rank {rank} asked for {value}, rank 0 for {expected}")
        self.what, self.group = what, group
        self.rank, self.value, self.expected = rank, value, expected


class CallAbandoned(WeftError):
    """A call on this rank was ended half-way by an exception of another kind; peers may have seen part of it.

    >>> import signal
    >>> from weft import symm_mem
    >>> peers = symm_mem.rendezvous(symm_mem.empty(4))
    >>> def interrupt(*_):
    ...     raise KeyboardInterrupt
    >>> before = signal.signal(signal.SIGALRM, interrupt)
    >>> try:
    ...     _ = signal.setitimer(signal.ITIMER_REAL, 0.1)  # Ctrl-C, as it were
    ...     peers.wait(peers.rank)  # for a put that does not come
    ... except KeyboardInterrupt:
    ...     pass
    >>> try:
    ...     peers.barrier()
    ... except symm_mem.CallAbandoned as error:
    ...     print(error.op, error.cause)
    wait KeyboardInterrupt
    >>> _ = signal.signal(signal.SIGALRM, before)
    >>> symm_mem.reset()  # on all ranks, before the group can be used again

    Attributes:
        op: what was left.
        group: the group's name.
        rank: this one.
        culprit: this one, too.
        cause: the exception in words.
        site: file and line of the call outside weft; None where nobody called.
    """

    def __init__(self, op: str, group: str, rank: int, cause: str, site: str | None = None) -> None:
        super().__init__(
            f"{op}: rank {rank} of group {group!r} left a call half-way: {cause}{_called_at(site)}; "
            "symm_mem.reset on all ranks makes the group usable again"
        )
        self.op, self.group, self.rank, self.cause, self.site = op, group, rank, cause, site
        self.culprit = rank


class ForkedProcess(WeftError):
    """A process that was forked from a rank used what belongs to that rank: a group's memory, signals or store.

    >>> import os
    >>> from weft import symm_mem
    >>> x = symm_mem.empty(4)
    >>> if (child := os.fork()) == 0:  # a data loader's worker, say
    ...     try:
    ...         symm_mem.rendezvous(x)
    ...     except symm_mem.ForkedProcess as error:
    ...         os._exit(0 if error.child == os.getpid() else 1)
    ...     os._exit(2)
    >>> os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    0

    Attributes:
        op: what was refused.
        group: the group's name.
        rank: that of the process that joined the group.
        parent: the id of that process.
        child: the id of this process.
        site: file and line of the call outside weft; None where nobody called.
    """

    def __init__(
        self, op: str, group: str, rank: int, parent: int, child: int, site: str | None = None
    ) -> None:
        super().__init__(
            f"{op}: this process, {child}, was forked from process {parent}, which joined group {group!r} as rank "
            f"{rank}: a forked child is no rank; make what it needs before the fork, use the 'spawn' start method, or "
            f"let the child join a group of its own{_called_at(site)}"
        )
        self.op, self.group, self.rank = op, group, rank
        self.parent, self.child, self.site = parent, child, site

    def again(self, op: str | None = None) -> WeftError:
        site = text(call_site())
        return ForkedProcess(op or self.op, self.group, self.rank, self.parent, self.child, site)


class HeapUnavailable(WeftError):
    """The group's ranks cannot address each other's memory; the message says why.

    >>> import torch
    >>> from weft import symm_mem
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> try:
    ...     x = symm_mem.empty(4)
    ... except symm_mem.HeapUnavailable as error:
    ...     print(error)  # ops work all the same, unfused
    >>> y = one_shot_all_reduce(torch.ones(4), "sum", None)

    Ranks on several hosts, GPUs without peer access, two ranks on one GPU, a group without processes.
    """


def name_late_rank(wait: PeerWait, seconds: float) -> None:
    """A rank has not come for so many ``seconds``: a warning from ``SILENT`` on, progress before. Of several waits for
    it the first one says so."""
    level = logging.WARNING if seconds > SILENT else logging.INFO
    now, whom = time.time(), (wait.group, wait.peer, level)
    if now - _warned.get(whom, 0.0) < SILENT:
        return
    _warned[whom] = now
    since = time.strftime("%H:%M:%S", time.localtime(now - seconds))
    said = (
        f"{wait.op}: rank {wait.rank} of group {wait.group!r} has waited {seconds:.0f} s for rank {wait.peer}, "
        f"since {since}{_called_at(wait.site)}"
    )
    if level == logging.WARNING:
        _log.warning(said)
    else:
        tell_progress(_log, said, speaks=wait.rank == int(wait.peer == 0))


def tell_progress(log: logging.Logger, text: str, *, speaks: bool | None = None) -> None:
    """A line at INFO; on stderr where that is a terminal and the program has set up no logging for weft.

    Args:
        speaks: whether this is the one rank that says it, the others at DEBUG; None: rank 0 does.
    """
    if speaks is None:
        speaks = not (dist.is_initialized() and dist.get_rank())
    level = logging.INFO if speaks else logging.DEBUG
    is_terminal = getattr(
        sys.stderr, "isatty", bool
    )()  # a program may have put something else there, or nothing
    if not speaks or log.hasHandlers() or logging.getLogger("weft").level or not is_terminal:
        log.log(level, text)
    else:
        print(f"weft: {text}", file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An exception as one line: its kind, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _called_at(site: str | None) -> str:
    return f" (called at {site})" if site else ""
