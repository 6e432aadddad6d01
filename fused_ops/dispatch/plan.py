"""The plan of a call: which algorithm it takes.

It is chosen from what is known without data: shapes, strides, dtypes, the group. So the choice is the same on every
rank and on every call. What is costly to make for it, kernels and descriptors, a workspace keeps (``prepared``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch.distributed import ProcessGroup

from ...kernels.device.capability import why_no_kernel_on
from ...symm_mem import HeapUnavailable, flight_recorder, forks
from ...symm_mem.backends import cuda_state
from ...symm_mem.call_cache import invalidate_calls
from ...symm_mem.errors import tell_progress
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import get_heap, known_heap, why_no_heap
from .call_check import compare_first_call, compare_plan, plan_is_compared, take_begun


@dataclass(frozen=True)
class Plan:
    """How a call is run.

    >>> from weft.fused_ops import Plan, last_plan
    >>> Plan("unfused", reason="the group has one rank")
    Plan(algorithm='unfused', reason='the group has one rank', workspace_bytes=0, predicted_us=None)

    Attributes:
        algorithm: "none" before the first call, then one of

            - "unfused": the group's own collective, after or before the matmul.
            - "host": CPU ranks; every rank writes to every rank.
            - "push": CUDA; the thread blocks of weft's kernel send.
            - "two_kernels": CUDA; a matmul of cuBLAS, then weft's all-reduce.
            - "one_shot": CUDA; every rank sends to every rank at once, before or after a matmul of cuBLAS, or, of
              few rows that are all-reduced, in the kernel that multiplies.
            - "copy_engine": CUDA; the GPU's copy engines send, torch's scaled product multiplies or cuBLAS (float32,
              and 16 bits on GPUs other than Hopper), each rank's rows when they are there.
        reason: why it is "unfused"; of a kernel, which operands each call copies, and why. Ranks' may differ.
        workspace_bytes: bytes of the heap, on each rank; calls of one stream share them.
        predicted_us: microseconds that the kernels' model predicts, without the host's; None of what it does not know:
            backends, CPU ranks and matmuls of float32.
        workspace: of a fused call the kind of its workspace: calls of one kind share.
    """

    algorithm: str
    reason: str = ""
    workspace_bytes: int = 0
    predicted_us: float | None = None
    workspace: str = field(default="", repr=False, compare=False)


_log = logging.getLogger("weft.ops")
_logged_reasons: set[tuple[str, str]] = set()  # of a group; "": it has a heap


class _ThisThread(threading.local):
    """
    Attributes:
        plan: that of its last call.
        workspaces: whose workspaces its calls use; see ``GraphTurn``.
        name: the thread's, as ``threading`` has it.
    """

    plan = Plan("none")
    workspaces = ""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


OF_GRAPHS = " of graphs"


class GraphTurn:
    """While it is there, calls of its thread are a compiled graph's, with workspaces of their own.

    A rank that runs a graph without asking counts on the others' coming to the same one. If one makes other calls
    instead, these must not meet the graph's: each side waits until its deadline.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = this_thread.workspaces
        this_thread.workspaces = OF_GRAPHS

    def __del__(self) -> None:
        this_thread.workspaces = self._before


_unfused_calls = 0
this_thread = _ThisThread()
_KERNELS = "push", "one_shot", "copy_engine"  # around matmuls of 16 and of 8 bits
_LEAST_IN_TURN = 512 << 10  # bytes that a rank sends over PCIe by copy engines: not measured
_forced: str | None = None  # "unfused" or "fused", of the body entered last
_preferred: str | None = None  # likewise, one of _KERNELS
_forcing: list[list[str]] = []  # of all bodies that threads are in
_forcing_lock = threading.Lock()


def unfused_calls() -> int:
    """Calls of this process that went over the groups' backends. It grows with each; threads may count two as one."""
    return _unfused_calls


def last_plan() -> Plan:
    """The plan of this thread's last call of an op.

    >>> import torch
    >>> from weft.fused_ops import last_plan, one_shot_all_reduce
    >>> y = one_shot_all_reduce(torch.ones(4), "sum", None)
    >>> last_plan().algorithm  # between CPU ranks
    'host'

    A backward on CUDA runs in a thread of autograd's, whose calls are not this one's.

    Returns:
        a Plan, with algorithm "none" before the first call.
    """
    return this_thread.plan


def ran(plan: Plan) -> None:
    """Note the plan that a call is about to run. Of a call that is compared all ranks must have the same one."""
    global _unfused_calls
    this_thread.plan = plan
    if plan.algorithm == "unfused":
        _unfused_calls += 1
        flight_recorder.runs_unfused()
    if plan_is_compared():
        compare_plan(str(replace(plan, reason="", predicted_us=None)), plan.reason)


@contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Inside the body every call that can takes ``algorithm``, profitable or not.

    It is "unfused", "fused", or, of the fused ones, that of all-gathers before matmuls, also scaled ones and experts,
    and of reduce-scatters after them: "push", "one_shot" or "copy_engine". Calls that cannot take this one take another
    that is fused.

    Calls of all threads do: the backward of a forward in the body runs in another one. Of bodies that threads are in at
    the same time the one entered last counts. Every rank must do so. For tests and measurements.
    """
    if algorithm not in ("unfused", "fused", *_KERNELS):
        raise ValueError(
            f"algorithm: is {algorithm!r}, must be 'unfused', 'fused', 'push', 'one_shot' or 'copy_engine'"
        )
    entered = [algorithm]
    _force(lambda: _forcing.append(entered))
    try:
        yield
    finally:
        _force(lambda: _forcing.pop(next(i for i, body in enumerate(_forcing) if body is entered)))


def _force(change: Callable[[], object]) -> None:
    global _forced, _preferred
    with _forcing_lock:
        change()
        last = _forcing[-1][0] if _forcing else None
        _preferred = last if last in _KERNELS else None
        _forced = "fused" if _preferred else last
    invalidate_calls()


def why_runs_unfused(kernel: str, device: torch.device, group: ProcessGroup, *, empty: bool) -> str | None:
    """Why a call runs unfused, whatever its op would choose, as far as it is known without another rank.

    Args:
        kernel: of an op of ``capability.KERNELS``.
        empty: the ranks have nothing to send.
    """
    reason = _why_not_sent(group, empty) or why_no_kernel_on(kernel, device)
    return reason or why_no_heap(group, device)


def _why_not_sent(group: ProcessGroup, empty: bool) -> str | None:
    if group.size() == 1:
        return "the group has one rank"
    if empty:
        return "there is nothing to send"
    return "the caller asked for it" if _forced == "unfused" else None


def heap_or_reason(
    op: str, kernel: str, device: torch.device, group: ProcessGroup, *, empty: bool
) -> Heap | str:
    """The heap that a call of ``op`` on ``device`` uses, or why it runs unfused.

    Args:
        kernel, empty: as for ``why_runs_unfused``.

    Raises:
        RankMismatch: it is the first call of its op, and the ranks call differently.
        PeerTimeout: likewise, and a rank does not come.
        ForkedProcess: this process was forked from the one that joined the group.
        WeftError: the group is broken on this rank. What is sent may then be invalid, also for NCCL or gloo.
    """
    call = take_begun()
    if group.size() > 1:
        forks.refuse_child(group, op)
    if (reason := _why_not_sent(group, empty)) is not None:
        return reason
    if (reason := why_no_kernel_on(kernel, device)) is not None:
        return _logged(op, group, reason)
    try:
        found = get_heap(group, device)
    except HeapUnavailable as e:
        return _logged(op, group, str(e))
    refuse_if_broken(found)
    _tell_of_group(group, found.device)
    if found.device.type == "cpu":
        found.callers[threading.get_ident()] = this_thread.name, time.monotonic()
    compare_first_call(found, call)
    return found


def _logged(op: str, group: ProcessGroup, reason: str) -> str:
    """The reason for which a group's calls run unfused; in the log once."""
    said = group.group_name, reason
    if said not in _logged_reasons:
        _logged_reasons.add(said)
        _log.warning("%s and other ops of group %r run unfused: %s", op, group.group_name, reason)
    return reason


def _tell_of_group(group: ProcessGroup, device: torch.device) -> None:
    """What a group's calls do here, once."""
    if (said := (group.group_name, "")) in _logged_reasons:
        return
    _logged_reasons.add(said)
    if device.type == "cpu":
        text = "CPU ranks that share memory: the GPUs' protocol, for tests only"
    else:
        text = f"ranks on {cuda_state.state.name(device)}, which reach each other's memory: fused kernels"
    tell_progress(_log, f"group {group.group_name!r}: {group.size()} {text}", speaks=group.rank() == 0)


def should_fuse(profitable: bool) -> bool:
    """Whether to fuse, given whether that is predicted to be profitable."""
    return profitable or _forced == "fused"


def preferred_kernel() -> str | None:
    """The algorithm of those around 16-bit matmuls that ``forced`` asks for; None if the model chooses."""
    return _preferred


def preferred_between(group: ProcessGroup, device: torch.device, sent: int) -> str | None:
    """The same of a call in which a rank sends so many bytes. Over PCIe, as far as a call of the group has found it,
    large ones go by copy engines, which serve one peer after the other: ranks then do not meet at one root port."""
    if _preferred is not None or sent < _LEAST_IN_TURN:
        return _preferred
    known = known_heap(group.group_name, device.index or 0)
    return "copy_engine" if known is not None and known[1].backend.over_pcie else None


def sends_in_turn(where: Heap) -> bool:
    """Whether kernels of collectives send to one peer after the other: over PCIe, where there are several."""
    return where.world_size > 2 and where.backend.over_pcie


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, if it is not."""
    cuda = cuda_state.state
    return nullcontext() if cuda.current_device() == device.index else cuda.make_current(device)


@cache
def num_sms(device: torch.device) -> int:
    """SMs that a persistent kernel may take: all but WEFT_RESERVED_SMS.

    Raises:
        ValueError: WEFT_RESERVED_SMS is not a number from 0 to what the GPU has, less the two of a cluster.
    """
    there = cuda_state.state.num_sms(device)
    text = os.environ.get("WEFT_RESERVED_SMS", "0")
    if not text.isdigit() or int(text) > there - 2:
        raise ValueError(f"WEFT_RESERVED_SMS: is {text!r}, must be a number from 0 to {there - 2}")
    return there - int(text)
