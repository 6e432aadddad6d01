"""Which algorithm a call takes.

It is chosen from what is known without data: shapes, strides, dtypes, the group. So the choice is the same on every
rank and on every call. What is costly to make for it, kernels and descriptors, a workspace keeps (``prepared``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...symm_mem import HeapUnavailable, forks, is_checked
from ...symm_mem.call_cache import invalidate_calls
from ...symm_mem.failure.fault import refuse_if_broken
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import get_heap
from .call_check import compare_plan


@dataclass(frozen=True)
class Plan:
    """How a call is run.

    Attributes:
        algorithm: "none" before the first call, then
            "unfused": the group's own collective, behind or in front of the product.
            "host": CPU ranks; a thread copies, or every rank writes to every rank.
            "push": CUDA; the blocks of a kernel of our own send.
            "two_kernels": CUDA; a product of cuBLAS, then an all-reduce of our own.
            "one_shot": CUDA; every rank sends to every rank at once, in front of or behind a product of cuBLAS, or,
                of few rows that are all-reduced, in the kernel that multiplies.
            "copy_engine": CUDA; a Triton kernel multiplies, the GPU's copy engines send (float32 all-gathers, and
                16-bit ones with Bs of both orders).
            "tma_store": CUDA; a Triton kernel multiplies and stores its tiles at their owners (float32
                reduce-scatters).
        reason: why it is "unfused".
        workspace_bytes: of the heap, on each rank; calls of one stream share it.
        chosen: how the configuration of a kernel that can be tuned was come by: "tuned" (WEFT_TUNE=1), or "from the
            model", and why if it was to be tuned; "" of all others.
    """

    algorithm: str
    reason: str = ""
    workspace_bytes: int = 0
    chosen: str = ""


class _ThisThread(threading.local):
    plan = Plan("none")


this_thread = _ThisThread()  #: ``plan``: that of its last call
_forced: str | None = None  # of the body entered last
_forcing: list[list[str]] = []  # of all bodies that threads are in
_forcing_lock = threading.Lock()


def last_plan() -> Plan:
    """The plan of this thread's last call of an op.

    A backward on CUDA runs in a thread of autograd's, whose calls are not this one's.
    """
    return this_thread.plan


def ran(plan: Plan) -> None:
    """Note the plan that a call is about to run. In the checked mode all ranks must have the same one."""
    this_thread.plan = plan
    if is_checked():
        compare_plan(str(replace(plan, reason="")), plan.reason)


@contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Inside the body every call that can takes ``algorithm`` ("unfused" or "fused"), whether it pays or not.

    Calls of all threads do: the backward of a forward in the body runs in another one. Of bodies that threads are in at
    the same time the one entered last counts. Every rank must do so. For tests and measurements.
    """
    if algorithm not in ("unfused", "fused"):
        raise ValueError(f"algorithm: is {algorithm!r}, must be 'unfused' or 'fused'")
    entered = [algorithm]
    _force(lambda: _forcing.append(entered))
    try:
        yield
    finally:
        _force(lambda: _forcing.pop(next(i for i, body in enumerate(_forcing) if body is entered)))


def _force(change: Callable[[], object]) -> None:
    global _forced
    with _forcing_lock:
        change()
        _forced = _forcing[-1][0] if _forcing else None
    invalidate_calls()


def heap_or_reason(op: str, x: Tensor, group: ProcessGroup, empty: bool) -> Heap | str:
    """The heap that a call of ``op`` on ``x`` uses, or why it runs unfused.

    Raises:
        ForkedProcess: this process was forked from the one that joined the group.
        WeftError: the group is broken on this rank. What x holds may then be worth nothing, also to NCCL or gloo.
    """
    if group.size() == 1:
        return "the group has one rank"
    forks.refuse_child(group, op)
    if empty:
        return "there is nothing to send"
    if _forced == "unfused":
        return "the caller asked for it"
    if x.device.type == "cuda" and not _is_hopper(x.device):
        return "the kernels are for GPUs of compute capability 9.0"
    try:
        found = get_heap(group, x.device)
    except HeapUnavailable as e:
        return str(e)
    refuse_if_broken(found)
    return found


def should_fuse(worth: bool) -> bool:
    """Whether to fuse, given that it is thought to be ``worth`` it."""
    return worth or _forced == "fused"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, if it is not."""
    if torch._C._cuda_getDevice() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors that a persistent kernel may take: all but WEFT_RESERVED_SMS.

    Raises:
        ValueError: WEFT_RESERVED_SMS is not a number from 0 to what the GPU has, less the two of a cluster.
    """
    there = torch.cuda.get_device_properties(device).multi_processor_count
    text = os.environ.get("WEFT_RESERVED_SMS", "0")
    if not text.isdigit() or int(text) > there - 2:
        raise ValueError(f"WEFT_RESERVED_SMS: is {text!r}, must be a number from 0 to {there - 2}")
    return there - int(text)


def aligned(x: Tensor) -> Tensor:
    """x at an address that kernels can take. A copy, never another algorithm: the peers' x may lie better."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
