"""The launch cache: a call like an earlier one is launched at once, without check, plan and dispatcher.

All calls look here: of ops, of collectives that are waited for later, and of process groups. The slow path stores its
result in the workspace that it used (``remember_call``), under all that it looked at: op, arguments, and each tensor's
sizes, strides, dtype and device, and which tensors are one. The group is that of the workspace. A call that finds it
there (``launch_again``) has nothing left to check: what was refused was never stored. Whatever else could make a
difference sends the call to the slow path. It is either asked anew at each call, or it invalidates the call cache
(symm_mem/call_cache.py), and the call is looked up once more. Between CPU ranks what is stored is how the op runs
(``Op.run``) of arguments that are validated: all that follows holds there, too, but for streams and addresses.

- group destroyed, or another one under its name: asked anew. Heap made anew, workspace outgrown or gone in a reset:
  invalidates. So a cached call and one on the slow path of another rank use the same memory.
- a stream that is not torch's own: the slow path; its handle may be another stream's the next time.
- another stream, another current device, a graph being captured, or a compiled one that runs: asked anew, they have
  workspaces of their own. The first call on a second stream, or on one more than there is room for: invalidates. Then
  calls are ordered (stream_order.py).
- modes, transforms, tracing: the thread's dispatch keys are only those that lead to the kernels directly. Dynamo and
  function modes are looked for where they come in, in functional.py.
- gradients; subclasses, fake, functional and lazily negated tensors, those of torch.func: by type, flags and address.
- tangents: there may be some inside a level of forward-mode differentiation.
- addresses that are no multiple of 16 bytes, where kernels do not take them: the slow path copies.
- a given result that is an inference tensor, or shares memory with what is read: the slow path.
- tensors like those of one of the last few cached calls are not checked one by one for type, flags, sizes,
  strides, dtype and device: guards check all at once (tensor_guards.py).
- a process forked from a rank: invalidates, and takes the slow path from then on (stream_order.py).
- the checked mode and ``forced``: invalidate. WEFT_RESERVED_SMS is read once in a process, on the slow path, too.

A broken group raises on both paths: asked anew. The deadline is that of ``set_timeout``, which invalidates; without
one, WEFT_TIMEOUT as it was at the call that was stored; between CPU ranks as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.distributed_c10d import _resolve_process_group

from ...kernels.device.jit.empty import Empty, empty_on
from ...symm_mem import call_cache, flight_recorder, is_checked
from ...symm_mem.backends import cuda_state
from ...symm_mem.failure.call_log import Grids, running
from ...symm_mem.heap.registry import GroupRef, known_heap
from ...symm_mem.timeouts import chosen_timeout, default_timeout
from ...symm_mem.workspace import Workspace
from . import plan
from .stream_order import StreamStep, is_external, steps_on, stream_on
from .tensor_guards import (
    TYPES,
    TensorGuard,
    guards_of,
    has_plain_state,
    likely_call,
    matches_none,
    note_likely,
)
from .workspaces import AROUND_MATMULS, MATMUL, workspaces_so_far

ALIGNMENT = 16  #: bytes, of what kernels around products take
_address = Tensor.data_ptr


@runtime_checkable
class Caller(Protocol):
    """A launcher where there is more to do than to launch one kernel: it takes tensors, and says itself when it begins
    what peers wait for (``Workspace.raise_if_broken``)."""

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """A whole call. If an exception ends it in the midst of what peers wait for, the group is broken."""


class PreparedKernel(NamedTuple):
    """What the slow path launches, in which workspace, and by which plan. ``profitable``: also where ``forced`` does
    not ask for it."""

    workspace: Workspace[Any]
    kernel: Any  # a launcher with ``grids``, or a Caller
    plan: plan.Plan
    profitable: bool = True


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """How a call on CUDA is launched.

    Attributes:
        launcher: what a kernel keeps for more calls of one kind, or if it ``calls`` a Caller. Its ``launch`` is a whole
            epoch of a buffer, with the addresses of all operands and results. One that pushes has ``grids``: the blocks
            of each launch.
        results: sizes, strides and dtypes of what is written; none if the result is a given tensor.
        overwrites: that is the first tensor, and the last one is what is read; they may be one.
        alignment: bytes, of all addresses.
    """

    launcher: Any
    calls: bool
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    empty: Empty
    grids: Grids
    shape: flight_recorder.CallShape | None
    overwrites: bool = False
    alignment: int = 1


#: Makes a call of an op with tensors. The results; None if these lie where the kernel does not take them, and nothing
#: happened. A third argument: what is written, if it is given and need not be checked.
Launch: TypeAlias = Callable[..., list[Tensor] | None]
#: By what a call is known: arguments and tensors as they were given. None: it is not remembered.
Known: TypeAlias = tuple[Hashable, Sequence[Tensor]] | None


def launch_on_stream(
    workspace: Workspace[Any],
    how: PreparedLaunch,
    ran: plan.Plan,
    timeout_ns: int,
    on: tuple[int, StreamStep, StreamStep],
    *,
    is_double_buffered: bool,
) -> Launch:
    """How calls on CUDA are launched on one stream, with a deadline. What is looked up here once is not at each call.

    Args:
        on: the stream, and what is done there before and after each launch.
        is_double_buffered: a launch is told of the buffer.
    """
    stream, before, after = on
    launcher, calls, empty, grids = how.launcher, how.calls, how.empty, how.grids
    overwrites, alignment, made, thread = how.overwrites, how.alignment, how.results, plan.this_thread
    several = len(made) > 1  # of one ``map`` takes longer than what it calls

    def launch(op: str, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Any:
        operands = [tensors[0].data_ptr()] if len(tensors) == 1 else list(map(_address, tensors))
        if 0 in operands:  # its memory was freed, as FSDP does
            return None
        if alignment > 1:
            together = 0
            for address in operands:
                together |= address
            if together % alignment:
                return None
        results, to = tensors, operands
        if overwrites:
            if (len(tensors) > 1 or tensors[0].is_inference()) and not may_overwrite(tensors):
                return None
            to, operands = operands[:1], operands[-1:]
        elif into is None:
            results = list(starmap(empty, made)) if several else [empty(*made[0])]
        elif into is not tensors:
            results = into
        if before is not None:
            before(stream)
        if calls:
            thread.plan = ran
            launcher.call(tensors, results, timeout_ns, stream)
        else:
            # Noted now that nothing is left before the launch: errors identify calls by how many were launched.
            workspace.raise_if_broken(op, 2, grids)  # inside this and what has looked it up
            thread.plan = ran
            try:
                buffer = workspace.next_buffer() if is_double_buffered else 0
                if results is not tensors:
                    to = list(map(_address, results)) if several else [results[0].data_ptr()]
                launcher.launch(buffer, operands, to, timeout_ns, stream)
            except BaseException as e:
                workspace.abandon(e)  # the peers may wait for what was not launched
                raise
        if flight_recorder.calls is not None and not running.inside:  # a part of a call is none by itself
            workspace.record_launch(op, how.shape)
        if after is not None:
            after(stream)
        if overwrites:
            increment_version(results[0])  # of what a kernel writes at an address autograd sees nothing
        return results

    return launch


def may_overwrite(tensors: Sequence[Tensor]) -> bool:
    """Whether the first one may be written while the last one is read, as far as other calls like it may differ."""
    out, x = tensors[0], tensors[-1]
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return out is x or not overlap(out, x)


def overlap(out: Tensor, x: Tensor) -> bool:
    """Whether contiguous tensors share memory, also where the one is the part of the other that becomes it."""
    first, other = out.data_ptr(), x.data_ptr()
    return first < other + x.nbytes and other < first + out.nbytes


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call that was made before, on one stream, or between CPU ranks."""

    group: GroupRef
    launch: Launch
    alike: TensorGuard
    device: int = -1
    stream: int = 0


#: Of a call between CPU ranks that is validated and chosen: how ones like it are made in its workspace.
HostCall: TypeAlias = Callable[[Workspace[Any], plan.Plan, GroupRef], Launch]


class _Remembered(NamedTuple):
    """What a workspace keeps of a call. ``preferred``: the kernel that ``forced`` asked for."""

    how: PreparedLaunch | HostCall
    launcher: Any  # of a call on CUDA
    plan: plan.Plan
    profitable: bool
    preferred: str | None
    timeout_ns: int  # where nobody has set another one


def timeout(group_name: str, default_ns: int) -> int:
    """The deadline of a wait, in nanoseconds. Valid as long as a cached call is."""
    seconds = chosen_timeout(group_name)
    return default_ns if seconds is None else int(seconds * 1e9)


def default_ns() -> int:
    return int(default_timeout() * 1e9)


def key_of(op: str, arguments: Hashable, tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """What a call is remembered by."""
    key: list[Any] = [op, arguments]
    for t in tensors:
        key += (t.shape, t.stride(), t.dtype, t.device)
    ids = [*map(id, tensors)]
    if len({*ids}) < len(ids):  # which are one
        key += map(ids.index, ids)
    return tuple(key)


def launch_again(
    op: str,
    arguments: Hashable,
    tensors: Sequence[Any],
    group_name: str,
    kinds: tuple[str, ...] = AROUND_MATMULS,
) -> list[Tensor] | None:
    """The results, if such a call was made before; else None, and nothing happened.

    Args:
        arguments: whatever else than tensors makes a difference, of exactly the types that the op takes.
        tensors: on one device, or anything: then the answer is None.
        kinds: of workspaces in which it may be remembered on CUDA.
    """
    kept, graphs = call_cache.cached_calls, plan.this_thread.workspaces
    kind = (op, arguments, group_name, len(tensors), graphs)
    found: CachedCall | None = likely_call(kept, kind, tensors)
    if found is None:
        alike = _checked_key(op, arguments, tensors)
        stream = None if alike is None else stream_on(cuda_state.state.index_of(tensors[0]))
        if stream is None:
            return None
        found = kept.get((alike, group_name, stream, graphs))
        if found is None:
            found = _find(alike, group_name, tensors, stream, kinds)
            if found is None:
                return None
            call_cache.keep(kept, (alike, group_name, stream, graphs), found)
        # What was found in inference mode or for a gradient may be asked for outside.
        guard = found.alike if found.alike(*tensors) else guards_of(tensors)
        if guard is not matches_none:
            note_likely(kept, kind, found if guard is found.alike else replace(found, alike=guard))
    try:
        if _resolve_process_group(group_name) is not found.group():  # type: ignore[arg-type]
            return None
    except Exception:  # destroyed
        return None
    return found.launch(op, tensors)


def _checked_key(op: str, arguments: Hashable, tensors: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """The key of such calls; None where a call must take the slow path."""
    if not has_plain_state():
        return None
    grad = torch.is_grad_enabled()
    try:
        # By type, not by dispatch keys, which is less work: that they have memory shows at its address.
        for t in tensors:
            if type(t) not in TYPES or t.is_neg() or (grad and t.requires_grad) or not t.data_ptr():
                return None
        return key_of(op, arguments, tensors)
    except RuntimeError:  # sparse, nested, of torch.func: without strides, or without memory
        return None


def _find(
    alike: Hashable, group_name: str, tensors: Sequence[Tensor], stream: int, kinds: tuple[str, ...]
) -> CachedCall | None:
    """What is stored for such calls, where they are made now."""
    device = cuda_state.state.index_of(tensors[0])
    where = known_heap(group_name, device)
    if where is None or plan._forced == "unfused" or is_checked() or is_external(stream, device):
        return None
    group, heap = where
    for kind in kinds if device >= 0 else (MATMUL,):
        for workspace in workspaces_so_far(heap, kind, stream):
            found: _Remembered | None = workspace.prepared.get(alike)
            if found is None or found.preferred != plan.preferred_kernel():
                continue
            if plan.should_fuse(found.profitable):
                how, guard = found.how, guards_of(tensors)
                if not isinstance(how, PreparedLaunch):
                    return CachedCall(group, how(workspace, found.plan, group), guard)
                deadline = timeout(group_name, found.timeout_ns)
                on, double = (stream, *steps_on(device, stream)), kind in AROUND_MATMULS
                launch = launch_on_stream(workspace, how, found.plan, deadline, on, is_double_buffered=double)
                return CachedCall(group, launch, guard, device, stream)
    return None


def remember_call(
    op: str,
    known: Known,
    used: Sequence[Tensor],
    results: Sequence[Tensor] | None,
    ready: PreparedKernel,
    alignment: int = ALIGNMENT,
) -> None:
    """Such a call was made on the slow path: the next one like it may be launched at once, unless tensors are copied.

    Args:
        known: with the arguments as ``launch_again`` is asked for them.
        used: these as the kernels took them. Where one was copied, the next one must be copied, too.
        results: all that the kernels wrote, with the sizes and strides that the caller gets; each a whole storage.
            None: the first one of the tensors was written.
        alignment: bytes, of all addresses that the kernels take.
    """
    if known is None:
        return
    arguments, given = known
    if any(g.data_ptr() != u.data_ptr() for g, u in zip(given, used, strict=True)):
        return
    made = tuple((tuple(r.shape), r.stride(), r.dtype) for r in results or ())
    shape, (workspace, launcher, ran, profitable) = None, ready
    if flight_recorder.calls is not None:
        shape = flight_recorder.shape_of(op, given[-1:] if results is None else given)
    calls, empty = isinstance(launcher, Caller), empty_on(given[0].device)
    grids: Grids = getattr(launcher, "grids", ())
    how = PreparedLaunch(launcher, calls, made, empty, grids, shape, results is None, alignment)
    _keep(workspace, key_of(op, arguments, given), how, ran, profitable)


def remember_host_call(key: Hashable, workspace: Workspace[Any], call: HostCall, ran: plan.Plan) -> None:
    """The same of a call between CPU ranks. ``key``: of ``key_of``."""
    if stream_on(-1) is not None:
        _keep(workspace, key, call, ran, True)


def _keep(
    workspace: Workspace[Any], key: Hashable, how: PreparedLaunch | HostCall, ran: plan.Plan, profitable: bool
) -> None:
    launcher = how.launcher if isinstance(how, PreparedLaunch) else None
    made = _Remembered(how, launcher, ran, profitable, plan.preferred_kernel(), default_ns())
    known: _Remembered | None = workspace.prepared.get(key)
    if known is None or known[1:5] != made[1:5]:  # only what is new: it invalidates cached calls
        workspace.keep(key, made)
