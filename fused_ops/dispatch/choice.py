"""A choice: how a call runs, as far as its shapes, strides and dtypes, the group and the device say it.

``Op.choose`` makes it, a pure function: nothing is launched, sent or loaded, no other rank is asked, and all ranks
choose alike. The run of a call, ``plan()``, the graph pass and what compiles kernels ahead ask the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...kernels.device.collective.host_exchange import exchange_layout
from ...kernels.device.comm.ll_exchange import ExchangeLayout
from ...kernels.device.gemm.one_shot import launch_prepared
from ...kernels.device.jit.program import Program
from ...kernels.device.kernel_choice import KernelChoice, KernelSteps, make_together
from ...symm_mem import resolve_group
from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import default_device
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from .launch_cache import Known, PreparedKernel, remember_call
from .plan import Plan, ran, should_fuse, this_thread
from .staging import Staging, aligned
from .stream_order import in_stream_order
from .workspaces import COPIED, LL_PROTOCOL, MATMUL, ONE_SHOT, least_layout, workspace_of


@dataclass(frozen=True, eq=False)
class Choice:
    """How a call runs.

    Attributes:
        algorithm, reason, predicted_us: as ``Plan`` has them.
        kind: of its workspace; "" if it has none.
        layout: what that must hold.
        programs: returns those that the call launches, and those of the all-reduce that an unfused norm makes.
        how: what the op's ``run`` takes from here: its configuration, and its operands as kernels take them.
        found: of a call like one before, its workspace and its plan.
        known: the call that is run by it.
    """

    algorithm: str
    reason: str = ""
    kind: str = ""
    layout: Any = None
    predicted_us: float | None = None
    programs: Callable[[], Sequence[Program]] = tuple
    how: Any = None
    found: tuple[Workspace[Any], Plan] | None = None
    known: Known = None

    @property
    def is_unfused(self) -> bool:
        return self.algorithm == "unfused"

    def workspace_on(self, heap: Heap) -> Workspace[Any]:
        """The workspace of such calls on the current stream.

        Raises:
            RankMismatch, PeerTimeout: the ranks do not grow it together.
        """
        return workspace_of(heap, self.kind, self.layout)

    def begin_on(self, heap: Heap, op: str = "") -> Workspace[Any]:
        """The workspace; the call's plan is noted (``ran``). Of a call like one before both are known.
        ``op``: its name, if an exception from here on is to break the group."""
        if self.found is not None:
            workspace, this_thread.plan = self.found
        else:
            workspace = self.workspace_on(heap)
            ran(self.plan_of(workspace.layout))
        if op:
            workspace.begins(op)
        return workspace

    def plan_of(self, layout: Any = None) -> Plan:
        """That of a call in a workspace of this layout, which may have room for more."""
        nbytes = 0 if layout is None else layout.bytes
        return Plan(self.algorithm, self.reason, nbytes, self.predicted_us, self.kind)


def unfused(reason: str) -> Choice:
    return Choice("unfused", reason)


def on_host(layout: Any) -> Choice:
    """Of CPU ranks, whose calls share a workspace."""
    return Choice("host", kind=MATMUL, layout=layout)


def host_or(nbytes: Callable[..., int], on_cuda: Callable[..., Choice]) -> Callable[..., Choice]:
    """An op's ``choose``, by that on CUDA. ``nbytes``: what CPU ranks send each other in one step."""

    def choose(call: Any, *more: Any) -> Choice:
        if call[0].device.type == "cpu":
            return on_host(exchange_layout(nbytes(call, *more), more[-1].size()))
        return on_cuda(call, *more)

    return choose


@dataclass(frozen=True)
class KernelUse:
    """The kernel of an op around a matmul, and its operands as that takes them.

    Attributes:
        steps: from here to its launch.
        call: a GatherKernelCall or ScatterKernelCall.
        staging: the copies among the operands, which the run fills.
        given: the op's call, where it is another one than was given to ``choose``.
    """

    steps: KernelSteps
    kernel: KernelChoice[Any]
    call: Any
    staging: Staging
    given: Any = None


def choose_kernel(
    steps: KernelSteps, used: Any, staging: Staging, group: ProcessGroup, too_little: str, given: Any = None
) -> Choice:
    """Of a gather or scatter around a matmul.

    Args:
        used: the call as kernels take it.
        too_little: why a call whose kernel is not profitable runs unfused.
    """
    size = group.size()
    kernel = steps.choose(used, size)
    if isinstance(kernel, str):
        return unfused(kernel)
    if not should_fuse(kernel.profitable):
        return unfused(too_little)
    layout = kernel.layout
    if isinstance(layout, ExchangeLayout):
        kind = ONE_SHOT
    else:
        kind = COPIED if kernel.algorithm == "copy_engine" else LL_PROTOCOL if layout.ll_protocol else MATMUL
    return Choice(
        *(kernel.algorithm, staging.reason, kind, layout),
        predicted_us=kernel.predicted_us,
        programs=partial(steps.programs, kernel.config, used, size, group.rank()),
        how=KernelUse(steps, kernel, used, staging, given),
    )


def prepare_kernel(
    choice: Choice, where: Heap, op: str, key: Any, make: Callable[[Workspace[Any]], Any], same: Any = None
) -> PreparedKernel:
    """What launches calls by a choice, made by all ranks together in its workspace; the plan is noted.

    ``same``: as for ``make_together``, where each rank may have its own ``key``.
    """
    workspace = choice.workspace_on(where)
    workspace.raise_if_broken()
    kernel, plan = workspace.prepared.get(key), choice.plan_of(workspace.layout)
    ran(plan)
    if kernel is None:
        kernel = make_together(workspace, op, key, same or key, lambda: make(workspace))
    return PreparedKernel(workspace, kernel, plan)


def launch_exchange(
    ready: PreparedKernel, op: str, where: Heap, used: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """A kernel around the LL protocol, on the current stream."""
    operands, to = ([t.data_ptr() for t in tensors] for tensors in (used, results))
    timeout_ns = timeout_in_ns(where.group_name)
    ready.workspace.raise_if_broken(op, grids=ready.kernel.grids)
    ready.kernel.launch(0, operands, to, timeout_ns, current_stream_of(used[0]))


@dataclass(frozen=True)
class KernelOf:
    """``key``: what a kernel of ``launch_push`` is made for; ``make``: makes it in a workspace."""

    key: Hashable
    make: Callable[[Any], Any]


def launch_push(
    op: str,
    choice: Choice,
    where: Heap,
    tensors: Sequence[Tensor],
    results: Sequence[tuple[Sequence[int], torch.dtype | None]],
) -> list[Tensor]:
    """What the kernel of a choice, whose ``how`` is a ``KernelOf``, makes of tensors, which it takes contiguous.

    Args:
        results: their shapes and dtypes; None for that of the first tensor.
    """
    how: KernelOf = choice.how
    used = [aligned(t.contiguous()) for t in tensors]
    with in_stream_order(used[0].device):
        ready = prepare_kernel(choice, where, op, (op, how.key), how.make)
        made = [used[0].new_empty(shape, dtype=dtype) for shape, dtype in results]
        launch_exchange(ready, op, where, used, made)
    remember_call(op, choice.known, used, made, ready)
    return made


def launch_kernel(
    choice: Choice,
    where: Heap,
    op: str,
    shaped: Callable[[list[Tensor]], list[Tensor]],
    completed: Callable[[Any], Any] = lambda used: used,
) -> list[Tensor]:
    """The results of the kernel of ``choose_kernel``.

    Args:
        shaped: what the kernel has written, as the caller gets it.
        completed: the call as the kernel takes it, of that of the choice, whose copies are made.
    """
    how: KernelUse = choice.how
    steps, kernel = how.steps, how.kernel
    with in_stream_order(how.call.a.device):
        how.staging.copy()
        used = completed(how.call)
        key, same = steps.key(kernel, used), (op, *steps.same(kernel.config, used))
        ready = prepare_kernel(
            choice, where, op, key, lambda workspace: steps.make(workspace, used, kernel.config), same
        )
        workspace, launcher, *_ = ready
        workspace.raise_if_broken(op if kernel.algorithm == "push" else None)  # others say it themselves
        operands, written = steps.operands(kernel.config, used), steps.results(used, workspace.world_size)
        timeout_ns = timeout_in_ns(where.group_name)
        launch_prepared(workspace, kernel.config, launcher, operands, written, timeout_ns)
    results = shaped(written)
    remember_call(op, choice.known, operands, results, ready._replace(profitable=kernel.profitable))
    return results


#: The choice of a call of an op of ``torch.ops.weft`` that communicates, and its device.
CHOOSERS: dict[OpOverload, Callable[..., tuple[Choice, torch.device]]] = {}


class _FirstCall(TorchDispatchMode):
    """Notes the first call of an op that communicates."""

    found: tuple[OpOverload, Any, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and func in CHOOSERS:
            self.found = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


def plan(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """The plan of ``op(*args, **kwargs)``, which is not called: nothing is computed, launched, sent or allocated.

    >>> import torch
    >>> from weft.fused_ops import fused_all_gather_matmul, plan
    >>> x, w = torch.empty(128, 64, device="meta"), torch.empty(64, 96, device="meta")
    >>> found = plan(fused_all_gather_matmul, x, [w], 0, None, return_A=False)
    >>> found.algorithm, found.workspace_bytes > 0
    ('host', True)

    What ``last_plan()`` is after the call, but for what only a call finds out: whether the ranks can address each
    other's memory, if no call of the group has found it yet; that an operand begins at an address for which it is
    copied. Each rank may ask by itself. Where there is no GPU, one that is asked about
    is taken to be an H200. A group of torch's "fake" backend stands for one of as many ranks.

    Args:
        op: a function of ``weft.fused_ops`` that communicates, or an op of ``torch.ops.weft``.
        *args: its arguments. Tensors may be fake, real, or on the meta device: these are taken to be where others are,
            or where the default group's ranks have theirs: on CUDA with NCCL.
        **kwargs: likewise, those that have names.

    Returns:
        the algorithm, bytes of the workspace, microseconds that the kernels' model predicts; or why it runs unfused.

    Raises:
        ValueError, TypeError: what the call would raise; or ``op`` is no such function.
    """
    return choice_of_call(op, args, kwargs)[0]


def choice_of_call(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Plan, Choice]:
    """As ``plan``, and the choice."""
    if not callable(op):
        raise TypeError(f"op: is of type {type(op).__name__}, must be a function of weft.fused_ops")
    fakes = (x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
    mode = next((x.fake_mode for x in fakes), None) or FakeTensorMode()
    device = _device_of_meta(args, kwargs)

    def fake(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            return x
        if x.device.type != "meta":
            return mode.from_tensor(x)
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with torch.no_grad(), mode:
        given, named = tree_map_only(Tensor, fake, (args, kwargs))
        with _FirstCall() as first:
            op(*given, **named)
        if first.found is None:
            raise TypeError(
                f"op: {getattr(op, '__name__', op)} has no plan, must be an op of weft that communicates"
            )
        called, given, named = first.found
        choice, where = CHOOSERS[called](*given, **named)
        least = None if choice.layout is None else least_layout(choice.kind, choice.layout, where)
        return choice.plan_of(least), choice


def _device_of_meta(args: Any, kwargs: Any) -> torch.device:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = next((x.device for x in tensors if x.device.type != "meta"), None)
    if there is not None:
        return there
    found = default_device(resolve_group(None))
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found
