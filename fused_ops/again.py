"""The short way of a call like one that was made before: no check, no plan, no dispatcher, only the launch.

What a call's long way found out stands in the workspace that it used (``remember``), under all that it looked at:
op, arguments, and each tensor's sizes, strides, dtype and device. The group is that of the workspace. A call that
finds it there (``again``) has nothing left to check: what was refused once was never remembered. Whatever else could
make a difference is asked anew each time, and sends the call the long way, which does or raises what is due:

- group destroyed, or another one under its name; heap made anew; workspace outgrown or gone in a reset: the group, its
  heap and the workspace that the stream has now are looked up, never what this rank remembers. So a rank that comes
  here and one that takes the long way use the same memory.
- another stream, another current device, a graph being captured: likewise, they have workspaces of their own.
- modes, transforms, tracing: the thread's dispatch keys are none but those that lead to the kernels at once. Dynamo
  and function modes are looked for where they come in, in functional.py.
- gradients; subclasses, fake, functional and lazily negated tensors, those of torch.func: by type, flags and address.
- addresses that are no multiple of 16 bytes: the long way copies.
- the checked mode and ``forced``. WEFT_RESERVED_SMS and WEFT_TUNE are read once in a process, on the long way, too;
  there a kind of call is tuned before it is remembered.

A broken group raises here as there. The deadline is what ``set_timeout`` said last; where it said nothing, what
WEFT_TIMEOUT was at the call that is remembered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from ..symm_mem import Workspace, is_checked
from ..symm_mem.registry import known_heap
from ..symm_mem.timeouts import chosen_timeout, default_timeout
from . import plan

_ALIGNMENT = 16  # bytes, of what kernels take


def _bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


# All other keys of a tensor, or of the thread, want to see a call before its kernel does. Those of autocast fall
# through: the ops have no rule for it.
_OF_TENSORS = _bits(
    "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA"
)
_OF_THREADS = _bits("BackendSelect", "ADInplaceOrView")
_TYPES = frozenset((Tensor, Parameter))


def goes_straight(*tensors: Any) -> bool:
    """Whether nothing lies between a call with these, which may be anything, and the kernels.

    No gradient, mode, transform or tracing, no subclass, nothing to be done before memory is what a tensor says.
    """
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_OF_THREADS:
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if type(t) not in _TYPES or torch._C._dispatch_keys(t).raw_repr() & ~_OF_TENSORS:
            return False
        if grad and t.requires_grad:
            return False
    return True


def may_be_short(x: Any) -> bool:
    """As ``goes_straight`` for an x that has memory at its address: by kind, not by dispatch keys, is less work."""
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_OF_THREADS:
        return False
    return type(x) in _TYPES and not x.is_neg() and not (x.requires_grad and torch.is_grad_enabled())


class Launcher(Protocol):
    """What a kernel leaves behind for more calls of one kind."""

    def launch(
        self, half: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole use of ``half``, with the addresses of all operands and of all results."""


@runtime_checkable
class Caller(Protocol):
    """The same where there is more to do than to launch one kernel: it takes tensors, and its half by itself."""

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """A whole call. If an exception ends it half-way, the group is broken."""


@dataclass(frozen=True, slots=True)
class _Ready:
    launcher: Any  # a Launcher, or if it `calls` a Caller
    calls: bool
    plan: plan.Plan
    pays: bool
    results: tuple[tuple[torch.Size, tuple[int, ...]], ...]  # sizes and strides
    timeout_ns: int  # where nobody has set another one


def place(kind: str, group_name: str, device: int) -> tuple[Workspace[Any], int] | None:
    """The current stream's workspace on a CUDA device, and the stream; None where a call must take the long way."""
    where = known_heap(group_name, device)
    if where is None or plan._forced == "unfused" or is_checked():
        return None
    if torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(device)
    workspace = where.workspaces.get((kind, stream, 0))
    return None if workspace is None else (workspace, stream)


def timeout(group_name: str, default_ns: int) -> int:
    """The deadline of a wait that begins now, in nanoseconds."""
    seconds = chosen_timeout(group_name)
    return default_ns if seconds is None else int(seconds * 1e9)


def default_ns() -> int:
    return int(default_timeout() * 1e9)


def again(op: str, arguments: Hashable, tensors: Sequence[Any], group_name: str) -> list[Tensor] | None:
    """The results, if such a call around a matrix product was made before; else None, and nothing happened.

    Args:
        arguments: whatever else than tensors makes a difference, of exactly the types that the op takes.
        tensors: of one dtype, on one device, or anything: then the answer is None.
    """
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_OF_THREADS:
        return None
    grad, key, operands, together = torch.is_grad_enabled(), [op, arguments], [], 0
    try:
        for t in tensors:  # each as in ``may_be_short``
            if type(t) not in _TYPES or t.is_neg() or (grad and t.requires_grad):
                return None
            key += (t.shape, t.stride(), t.dtype, t.device)
            operands.append(address := t.data_ptr())
            together |= address
    except RuntimeError:  # sparse, nested, of torch.func: without strides, or without memory
        return None
    first = tensors[0]
    here = place("matmul", group_name, first.get_device())
    if here is None or together % _ALIGNMENT or 0 in operands:
        return None
    workspace, stream = here
    found = workspace.prepared.get(tuple(key))
    if found is None or not (found.pays or plan._forced == "fused"):
        return None
    results = [first.new_empty_strided(size, strides) for size, strides in found.results]
    workspace.raise_if_broken(op, inside=2)  # this and the op's own ``again``
    plan._last = found.plan
    if found.calls:
        found.launcher.call(tensors, results, timeout(group_name, found.timeout_ns), stream)
        return results
    try:
        half, addresses = workspace.next_half(), [r.data_ptr() for r in results]
        found.launcher.launch(half, operands, addresses, timeout(group_name, found.timeout_ns), stream)
    except BaseException as e:
        workspace.abandon(e)  # the peers may wait for what was not launched
        raise
    return results


def remember(
    op: str,
    arguments: Hashable,
    given: Sequence[Tensor],
    used: Sequence[Tensor],
    results: Sequence[Tensor],
    workspace: Workspace[Any],
    launcher: Launcher | Caller,
    ran: plan.Plan,
    *,
    pays: bool,
) -> None:
    """Such a call was made on ``workspace``: the next one may take the short way.

    Args:
        given: the tensors as the caller gave them; ``used``: as the kernels took them. Where one was copied, the next
            one must be copied, too, and nothing is remembered.
        results: all that the kernels wrote, with the sizes and strides that the caller gets; each a whole storage.
        pays: it is fused also where nobody asks for it.
    """
    if any(g.data_ptr() != u.data_ptr() for g, u in zip(given, used, strict=True)):
        return
    shapes = tuple((r.shape, r.stride()) for r in results)
    ready = _Ready(launcher, isinstance(launcher, Caller), ran, pays, shapes, default_ns())
    workspace.prepared[_key(op, arguments, given)] = ready


def _key(op: str, arguments: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    key: list[Any] = [op, arguments]
    for t in tensors:
        key += (t.shape, t.stride(), t.dtype, t.device)
    return tuple(key)
