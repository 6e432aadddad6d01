"""The fast path of a call like an earlier one: no check, no plan, no dispatcher, only the launch.

The slow path stores its result in the workspace that it used (``remember_call``), under all that it looked at: op,
arguments, and each tensor's sizes, strides, dtype and device. The group is that of the workspace. A call that finds it
there (``run_fast``) has nothing left to check: what was refused was never stored. Whatever else could make a difference
sends the call to the slow path. It is either asked anew at each call, or it invalidates the call cache
(symm_mem/call_cache.py), and the call is looked up once more. Between CPU ranks what is stored is how the op runs
(``Op.run``) of arguments that are validated: all that follows holds there, too, but for streams and addresses.

- group destroyed, or another one under its name: asked anew. Heap made anew, workspace outgrown or gone in a reset:
  invalidates. So a rank on the fast path and one on the slow path use the same memory.
- a stream that is not torch's own: the slow path; its handle may be another stream's the next time.
- another stream, another current device, a graph being captured, or a compiled one that runs: asked anew, they have
  workspaces of their own. The first call on a second stream, or on one more than there is room for: invalidates. Then
  calls are ordered (stream_order.py).
- modes, transforms, tracing: the thread's dispatch keys are only those that lead to the kernels directly. Dynamo and
  function modes are looked for where they come in, in functional.py.
- gradients; subclasses, fake, functional and lazily negated tensors, those of torch.func: by type, flags and address.
- tangents: there may be some inside a level of forward-mode differentiation.
- addresses that are no multiple of 16 bytes: the slow path copies.
- tensors like those of one of the last few cached calls are not checked one by one for type, flags, sizes,
  strides, dtype and device: guards check all at once (tensor_guards.py).
- a process forked from a rank: invalidates, and takes the slow path from then on (stream_order.py).
- the checked mode and ``forced``: invalidate. WEFT_RESERVED_SMS and WEFT_TUNE are read once in a process, on the slow
  path, too; there a kind of call is tuned before it is stored.

A broken group raises on both paths: asked anew. The deadline is that of ``set_timeout``, which invalidates; without
one, WEFT_TIMEOUT as it was at the call that was stored; between CPU ranks as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.jit.empty import Empty, empty_on
from ...symm_mem import call_cache, flight_recorder, is_checked
from ...symm_mem.backends import cuda_state
from ...symm_mem.failure.call_log import Grids
from ...symm_mem.heap.registry import GroupRef, has_name, known_heap
from ...symm_mem.timeouts import chosen_timeout, default_timeout
from ...symm_mem.workspace import Workspace
from . import plan
from .stream_order import StreamStep, is_external, steps_on, stream_on
from .tensor_guards import TYPES, TensorGuard, guards_of, has_tangents, likely_call, note_likely
from .workspaces import AROUND_MATMULS, MATMUL

_ALIGNMENT = 16  # bytes, of what kernels take


def _bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


# All other dispatch keys of a tensor, or of the thread, must see a call before its kernel. Those of autocast fall
# through: the ops have no rule for it.
_OF_TENSORS = _bits(
    "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA"
)
_OF_THREADS = _bits("BackendSelect", "ADInplaceOrView")

_C = torch._C
_included, _grad_enabled = _C._dispatch_tls_local_include_set, torch.is_grad_enabled


def needs_no_dispatch(*tensors: Any) -> bool:
    """Whether nothing has to run between a call with these, which may be anything, and the kernels.

    No gradient, mode, transform or tracing, no subclass, nothing to be done before memory is what a tensor says.
    """
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_OF_THREADS or has_tangents():
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if type(t) not in TYPES or torch._C._dispatch_keys(t).raw_repr() & ~_OF_TENSORS:
            return False
        if grad and t.requires_grad:
            return False
    return True


def may_take_fast_path(x: Any) -> bool:
    """As ``needs_no_dispatch`` for an x that has memory at its address: by type, not by dispatch keys, is less work."""
    if _included().raw_repr() & ~_OF_THREADS or has_tangents():
        return False
    return type(x) in TYPES and not x.is_neg() and not (x.requires_grad and _grad_enabled())


class Launcher(Protocol):
    """What a kernel keeps for more calls of one kind."""

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """A whole epoch of ``buffer``, with the addresses of all operands and of all results."""


@runtime_checkable
class Caller(Protocol):
    """The same where there is more to do than to launch one kernel: it takes tensors, and says itself when it begins
    what peers wait for (``Workspace.raise_if_broken``)."""

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """A whole call. If an exception ends it in the midst of what peers wait for, the group is broken."""


class HostCall(Protocol):
    """A call between CPU ranks, which takes tensors and returns its results."""

    def bound(
        self, workspace: Workspace[Any], ran: plan.Plan
    ) -> Callable[[Sequence[Tensor], ProcessGroup], list[Tensor]]:
        """The call in its workspace."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready:
    launcher: Any  # a Launcher, or if it `calls` a Caller, or between CPU ranks a HostCall
    calls: bool
    plan: plan.Plan
    profitable: bool
    preferred: str | None  # the kernel that ``forced`` asked for
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # sizes, strides
    empty: Empty
    timeout_ns: int  # where nobody has set another one
    grids: Grids
    shape: flight_recorder.CallShape | None


@dataclass(frozen=True, slots=True)
class StreamWorkspace:
    """Where the calls of a group on a device, a stream and of a kind are made."""

    group: GroupRef
    workspace: Workspace[Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """A cached call. ``timeout_ns``: its deadline; ``on_host``: what makes it between CPU ranks."""

    group: GroupRef
    workspace: Workspace[Any]
    ready: _Ready
    timeout_ns: int
    is_double_buffered: bool  # which a launch is told of
    alike: TensorGuard
    device: int
    stream: int
    before: StreamStep
    after: StreamStep
    on_host: Callable[[Sequence[Tensor], ProcessGroup], list[Tensor]] | None


def stream_workspace(kind: str, group_name: str, device: int, stream: int) -> StreamWorkspace | None:
    """The stream's workspace; None where a call must take the slow path. Valid as long as a cached call is."""
    where = known_heap(group_name, device)
    if where is None or plan._forced == "unfused" or is_checked() or is_external(stream, device):
        return None
    group, heap = where
    workspace = heap.workspaces.get((kind + plan.this_thread.workspaces, stream, 0))
    return None if workspace is None else StreamWorkspace(group, workspace)


def timeout(group_name: str, default_ns: int) -> int:
    """The deadline of a wait, in nanoseconds. Valid as long as a cached call is."""
    seconds = chosen_timeout(group_name)
    return default_ns if seconds is None else int(seconds * 1e9)


def default_ns() -> int:
    return int(default_timeout() * 1e9)


def fast_path_key(op: str, arguments: Hashable, tensors: Sequence[Any]) -> tuple[Hashable, list[int]] | None:
    """The key of such calls, and the tensors' addresses; None where a call must take the slow path."""
    if _included().raw_repr() & ~_OF_THREADS or has_tangents():
        return None
    grad, key = _grad_enabled(), [op, arguments]
    try:
        for t in tensors:  # each as in ``may_take_fast_path``
            if type(t) not in TYPES or t.is_neg() or (grad and t.requires_grad):
                return None
            key += (t.shape, t.stride(), t.dtype, t.device)
        operands = _addresses(tensors)
    except RuntimeError:  # sparse, nested, of torch.func: without strides, or without memory
        return None
    return None if operands is None else (tuple(key), operands)


def run_fast(
    op: str,
    arguments: Hashable,
    tensors: Sequence[Any],
    group_name: str,
    kinds: tuple[str, ...] = AROUND_MATMULS,
) -> list[Tensor] | None:
    """The results, if such a call was made before; else None, and nothing happened.

    Args:
        arguments: whatever else than tensors makes a difference, of exactly the types that the op takes.
        tensors: of one dtype, on one device, or anything: then the answer is None.
        kinds: of workspaces in which it may be remembered on CUDA.
    """
    kept, where = call_cache.cached_calls, plan.this_thread.workspaces
    kind = (op, arguments, group_name, len(tensors), where)
    found: _Found | None = likely_call(kept, kind, tensors)
    operands = None if found is None else _addresses(tensors)
    if found is None or operands is None:
        looked_at = fast_path_key(op, arguments, tensors)
        if looked_at is None:
            return None
        alike, operands = looked_at
        stream = stream_on(cuda_state.state.index_of(tensors[0]))
        if stream is None:
            return None
        found = kept.get((alike, group_name, stream, where))
        if found is None:
            found = _find(alike, group_name, tensors, stream, kinds)
            if found is None:
                return None
            call_cache.keep(kept, (alike, group_name, stream, where), found)
        note_likely(kept, kind, found)
    group = found.group()
    if not has_name(group, group_name):
        return None
    if found.on_host is not None:
        assert group is not None  # it has a name
        return found.on_host(tensors, group)
    stream = found.stream
    workspace, ready = found.workspace, found.ready
    empty = ready.empty
    results = [empty(sizes, strides, dtype) for sizes, strides, dtype in ready.results]
    if found.before is not None:
        found.before(stream)
    if ready.calls:
        plan.this_thread.plan = ready.plan
        ready.launcher.call(tensors, results, found.timeout_ns, stream)
    else:
        # Noted only now that nothing is left before the launch: errors identify calls by the number of launches.
        workspace.raise_if_broken(op, 2, ready.grids)  # inside this and the op's own function
        plan.this_thread.plan = ready.plan
        try:
            buffer = workspace.next_buffer() if found.is_double_buffered else 0
            addresses = [r.data_ptr() for r in results]
            ready.launcher.launch(buffer, operands, addresses, found.timeout_ns, stream)
        except BaseException as e:
            workspace.abandon(e)  # the peers may wait for what was not launched
            raise
    if flight_recorder.calls is not None:
        workspace.record_launch(op, ready.shape)
    if found.after is not None:
        found.after(stream)
    return results


def _addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where they lie; None if a kernel cannot take them there."""
    addresses, together = [], 0
    for t in tensors:
        addresses.append(address := t.data_ptr())
        together |= address
    if 0 in addresses or (together % _ALIGNMENT and cuda_state.state.index_of(tensors[0]) >= 0):
        return None
    return addresses


def _find(
    alike: Hashable, group_name: str, tensors: Sequence[Tensor], stream: int, kinds: tuple[str, ...]
) -> _Found | None:
    """What is stored for such calls, where they are made now."""
    device = cuda_state.state.index_of(tensors[0])
    for kind in kinds if device >= 0 else (MATMUL,):
        here = stream_workspace(kind, group_name, device, stream)
        ready = None if here is None else here.workspace.prepared.get(alike)
        if here is None or ready is None or ready.preferred != plan.preferred_kernel():
            continue
        if plan.should_fuse(ready.profitable):
            deadline = timeout(group_name, ready.timeout_ns)
            before, after = steps_on(device, stream) if device >= 0 else (None, None)
            where = kind in AROUND_MATMULS, guards_of(tensors), device, stream
            on_host = ready.launcher.bound(here.workspace, ready.plan) if device < 0 else None
            return _Found(here.group, here.workspace, ready, deadline, *where, before, after, on_host)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedCall:
    """A call on the slow path.

    Attributes:
        arguments: as ``run_fast`` is asked for them.
        given: the tensors as the caller gave them.
        used: as the kernels took them. Where one was copied, the next one must be copied, too.
        results: all that the kernels wrote, with the sizes and strides that the caller gets; each a whole storage.
    """

    op: str
    arguments: Hashable
    given: Sequence[Tensor]
    used: Sequence[Tensor]
    results: Sequence[Tensor]


def remember_call(
    call: LaunchedCall,
    workspace: Workspace[Any],
    launcher: Launcher | Caller,
    ran: plan.Plan,
    *,
    profitable: bool,
    grids: Grids = (),
) -> None:
    """``call`` was made on ``workspace``: the next one like it may take the fast path, unless tensors are copied.

    Args:
        profitable: it is fused also where ``forced`` does not ask for it.
        grids: of a Launcher that pushes: blocks of each launch.
    """
    if any(g.data_ptr() != u.data_ptr() for g, u in zip(call.given, call.used, strict=True)):
        return
    alike = tuple((tuple(r.shape), r.stride(), r.dtype) for r in call.results)
    calls, empty = isinstance(launcher, Caller), empty_on(call.given[0].device)
    preferred = plan.preferred_kernel()
    shape = None
    if flight_recorder.calls is not None:
        shape = flight_recorder.shape_of(call.op, call.given[call.op.endswith("_out") :])
    ready = _Ready(launcher, calls, ran, profitable, preferred, alike, empty, default_ns(), grids, shape)
    key = key_of(call.op, call.arguments, call.given)
    known: _Ready | None = workspace.prepared.get(key)
    same = (launcher, ran, profitable, preferred)
    if known is None or (known.launcher, known.plan, known.profitable, known.preferred) != same:
        workspace.keep(key, ready)  # only then: it invalidates cached calls


def remember_host_call(
    key: Hashable, workspace: Workspace[Any], call: HostCall, device: torch.device, ran: plan.Plan
) -> None:
    """The same of a call between CPU ranks. ``key``: of ``key_of``."""
    preferred = plan.preferred_kernel()
    known: _Ready | None = workspace.prepared.get(key)
    if stream_on(-1) is not None and (known is None or (known.plan, known.preferred) != (ran, preferred)):
        nothing: Any = (), empty_on(device), default_ns(), (), None
        workspace.keep(key, _Ready(call, False, ran, True, preferred, *nothing))


def key_of(op: str, arguments: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    """The key that ``fast_path_key`` gives such a call."""
    key: list[Any] = [op, arguments]
    for t in tensors:
        key += (t.shape, t.stride(), t.dtype, t.device)
    return tuple(key)
