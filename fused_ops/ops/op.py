"""An op as one object: its call, what it refuses, its fake, how it runs, its gradient.

``library/registration.py`` derives from it what torch.library is told.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from ...symm_mem import flight_recorder, resolve_group
from ...symm_mem.call_site import calling
from ...symm_mem.failure.call_log import poison_on_error
from ...symm_mem.heap.registry import GroupRef
from ...symm_mem.workspace import Workspace
from ..dispatch import launch_cache
from ..dispatch.call_check import OpCall, begin_call, take_begun
from ..dispatch.choice import Choice, unfused
from ..dispatch.plan import Plan, heap_or_reason, on, this_thread, why_runs_unfused
from ..dispatch.tensor_guards import has_tangents, needs_no_dispatch

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)
#: Why an op that writes its result to a given tensor has no gradient.
INTO = " where the result is written to a given tensor"
_collectives = torch.ops._c10d_functional


class OpArguments(Protocol):
    """A call as a record: its arguments in the schema's order. A tuple takes a fourth of a dataclass's time."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    @property
    def group_name(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def tensors(self) -> list[Tensor]:
        """All that are given."""


@dataclass(frozen=True, eq=False)
class Op:
    """All that is particular to an op.

    Attributes:
        schema: as torch.library has it; the record's fields are its arguments.
        record: makes a call.
        validate: the call with what follows from it, what else follows from it, and the group. A ValueError or
            TypeError names the argument, what it was and what it must be. Real and fake calls ask it, so both refuse
            the same. Sizes may be symbolic: it looks at no data.
        fake: the results without data, of what ``validate`` returns.
        kernel: of an op of ``capability.KERNELS``.
        sends_nothing: whether, by the same, the ranks have nothing to send each other.
        choose: the ``Choice`` of the same, where the ranks can address each other's memory.
        run: the results, of a choice, the heap (None if that is unfused), and the same.
        with_gradient: the results of a call of which a gradient is wanted; or it raises (``refuse_gradient``).
        fast: the results, if such a call was made before; else None, and nothing happened. Its tensors may be anything.
        known_by: of what ``validate`` returns, the arguments and tensors by which ``fast`` knows such a call; None: it
            does not look for it.
        functional: of an op that writes to its first argument: the op that returns the same, and its call.
        flops: of shapes in place of tensors, if the op multiplies.
        own_dims: of arguments, the dimensions in which CPU ranks may have sizes of their own, since no rank sends them;
            for the elements of a list in turn. On CUDA all sizes choose the kernel: ranks with different ones would
            wait for each other, unless ``own_on_cuda``.
        own_by_counts: instead of them in a call with ``counts``: of arguments, the name of the one that says the
            dimension.
        own_values: arguments of which ranks may have values of their own, but for None.
        prepares: ops whose first call is not compared after one of this: a rank may make the one, another rank the
            other.
    """

    schema: str
    record: Callable[..., Any]
    validate: Callable[[Any], tuple[Any, ...]]
    fake: Callable[..., Any]
    kernel: str
    sends_nothing: Callable[..., bool]
    choose: Callable[..., Choice]
    run: Callable[..., Any]
    with_gradient: Callable[[Any], Any]
    fast: Callable[[Any], Any] = lambda call: None
    known_by: Callable[..., tuple[Hashable, Sequence[Tensor]] | None] = lambda *_: None
    functional: tuple[Op, Callable[[Any], Any]] | None = None
    flops: Callable[..., int] | None = None
    own_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own_on_cuda: bool = False
    own_by_counts: Mapping[str, str] = field(default_factory=dict)
    own_values: tuple[str, ...] = ()
    prepares: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @cached_property
    def overload(self) -> OpOverload:
        found: OpOverload = getattr(torch.ops.weft, self.name).default
        return found

    def choice_of(self, call: OpArguments) -> tuple[Choice, torch.device]:
        """How a call would run, as far as it is known without another rank; and where.

        Raises:
            ValueError, TypeError: as ``validate``.
        """
        found, device = self.validate(call), call.tensors[0].device
        reason = why_runs_unfused(self.kernel, device, found[-1], empty=self.sends_nothing(*found))
        return self.choose(*found) if reason is None else unfused(reason), device

    def run_below_autograd(self, call: OpArguments) -> Any:
        done = self.fast(call)
        return self.run_slow(call) if done is None else done

    def run_slow(self, call: OpArguments) -> Any:
        """By way of the dispatcher where something else must see the call."""
        if needs_no_dispatch(*call.tensors):
            return self.slow(call)
        with torch._C._AutoDispatchBelowAutograd():
            return self.dispatch(call)

    def dispatch(self, call: OpArguments) -> Any:
        arguments = {name: getattr(call, name) for name in call._fields}
        given = [arguments.pop(a.name) for a in self.overload._schema.arguments if not a.kwarg_only]
        return self.overload(*given, **arguments)

    def slow(self, call: OpArguments) -> Any:
        """Checks the arguments and makes the call.

        Results are new tensors, like those of torch's own ops. They are views of what kernels write, and as such
        autograd would let nobody change them in place.
        """
        if self.functional is not None:
            return _checked_run(self, call)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            return _checked_run(self, call)


def with_poison(run: Callable[..., Any]) -> Callable[..., Any]:
    """If an exception ends it in the midst of what peers wait for, the group is broken. The call that it has begun is
    dropped then: the thread's next call may come late, and operands are large."""
    guarded = poison_on_error(run)

    @wraps(run)
    def call(*args: Any) -> Any:
        try:
            done = guarded(*args)
        except BaseException:
            take_begun()
            raise
        flight_recorder.end(flight_recorder.take_recorded())
        return done

    return call


_OF_GRAPHS = ("group_name", "group_size", "group_rank")  # what graphs alone say


@with_poison
def _checked_run(op: Op, call: OpArguments) -> Any:
    found = op.validate(call)
    checked, group = found[0], found[-1]
    compared = {name: getattr(checked, name) for name in checked._fields if name not in _OF_GRAPHS}
    for name in compared.keys() & {*op.own_values}:
        compared[name] = compared[name] is not None
    device = call.tensors[0].device
    own: tuple[Mapping[str, tuple[int, ...]], bool] = op.own_dims, op.own_on_cuda
    if compared.get("counts") is not None:
        own = {name: (compared[dim],) for name, dim in op.own_by_counts.items()}, True
    begin_call(OpCall(op.name, compared, device.type, *own, op.prepares), group, device)
    where = heap_or_reason(op.name, op.kernel, device, group, empty=op.sends_nothing(*found))
    if isinstance(where, str):
        return op.run(unfused(where), None, *found)
    choice = op.choose(*found)
    done = op.run(choice, where, *found)
    if choice.algorithm == "host" and (known := op.known_by(*found)) is not None:
        arguments, tensors = known
        again = _HostCall.of(op, choice, found[:-1], tensors)
        key = launch_cache.key_of(op.name, arguments, tensors)
        launch_cache.remember_host_call(key, choice.workspace_on(where), again, this_thread.plan)
    return done


class _Part(NamedTuple):
    """What validation has returned, as values in which tensors are missing.

    Attributes:
        kind: of a record; None: it is one value.
        alone, lists: where tensors, or lists with some, are missing, and which of the call's they are.
    """

    kind: type[Any] | None
    values: list[Any]
    alone: list[tuple[int, int]]
    lists: list[tuple[int, list[int | None]]]

    @staticmethod
    def of(value: Any, numbers: Mapping[int, int]) -> _Part:
        """``numbers`` of the call's tensors, by their ids.

        Raises:
            KeyError: there is another tensor in the value.
        """
        kind = type(value) if hasattr(value, "_fields") else None
        values: list[Any] = [value] if kind is None else list(value)
        alone, lists = [], []
        for i, each in enumerate(values):
            if isinstance(each, Tensor):
                alone.append((i, numbers[id(each)]))
            elif isinstance(each, list | tuple) and any(isinstance(x, Tensor) for x in each):
                lists.append((i, [None if x is None else numbers[id(x)] for x in each]))
        for i, _ in (*alone, *lists):
            values[i] = None
        return _Part(kind, values, alone, lists)


@dataclass(frozen=True, eq=False)
class _HostCall:
    """A call between CPU ranks that was made before: it is validated and chosen."""

    op: Op
    choice: Choice
    parts: list[_Part]

    @staticmethod
    def of(op: Op, choice: Choice, found: Sequence[Any], tensors: Sequence[Tensor]) -> _HostCall:
        numbers = {id(x): i for i, x in enumerate(tensors)}
        return _HostCall(op, choice, [_Part.of(value, numbers) for value in found])

    def bound(self, workspace: Workspace[Any], ran: Plan, group: GroupRef) -> launch_cache.Launch:
        choice, parts, op = replace(self.choice, found=(workspace, ran)), self.parts, self.op
        heap, fault, in_place = workspace.heap, workspace.fault, op.functional is not None

        @poison_on_error
        def call(name: str, tensors: Sequence[Tensor]) -> list[Tensor] | None:
            if in_place and not launch_cache.may_overwrite(tensors):
                return None
            calling.op = name
            if fault.error is not None:
                fault.raise_if_broken()
            heap.callers[get_ident()] = this_thread.name, monotonic()
            given = []
            for kind, fixed, alone, lists in parts:
                values = fixed.copy()
                for at, i in alone:
                    values[at] = tensors[i]
                for at, of in lists:
                    values[at] = [None if i is None else tensors[i] for i in of]
                given.append(values[0] if kind is None else tuple.__new__(kind, values))
            if in_place:
                return _listed(op.run(choice, heap, *given, group()))
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                return _listed(op.run(choice, heap, *given, group()))

        return call


def _listed(done: Any) -> list[Tensor]:
    """An op's results in the order in which kernels write them."""
    if isinstance(done, Tensor | None):
        return [] if done is None else [done]
    if isinstance(done[1], list):  # products, and after them what was gathered
        done = *done[1], done[0]
    return [x for x in done if x is not None]


def refuse_gradient(validate: Callable[[Any], object], call: OpArguments, why: str) -> NoReturn:
    """Name what else is wrong with the call, else the first argument that requires a gradient; a tangent is torch's to
    refuse."""
    validate(call)
    for argument in call._fields:
        given = getattr(call, argument)
        several = isinstance(given, list | tuple)
        for i, tensor in enumerate(given if several else [given]):
            if isinstance(tensor, Tensor) and (tensor.requires_grad or has_tangents()):
                name = f"{argument}[{i}]" if several else argument
                raise ValueError(f"{name}: requires a gradient, must not{why}")
    raise AssertionError("no argument requires a gradient")


def refuse_gradient_of_reduction(reduce_op: str) -> None:
    """Refuse a reduction that has no gradient."""
    if reduce_op in ("max", "min"):
        raise ValueError(
            f"reduce_op: is {reduce_op!r}, must be 'sum' or 'avg' for an x that requires a gradient"
        )


def refuse_second_gradient(op: str) -> None:
    """By a backward whose own derivative is asked for, too."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: has no second gradient, must have its first one without create_graph=True"
        )


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes a CUDA tensor's device the current one."""
    return on(x.device) if x.device.type == "cuda" else nullcontext()


def matmul_without_autocast(x: Tensor, y: Tensor) -> Tensor:
    """As the ops, which cast nothing where autocast is on."""
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return x @ y


def flat_rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)


def is_transposed_matrix(B: Tensor) -> bool:
    """Of what an op has taken for a matrix: it refuses other shapes."""
    return B.stride(0) == 1 and B.stride(1) == B.shape[0]


def gradient_of_matrix(A: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """That of B in ``A @ B``. It lies as B does, a weight's as the weight: else torch copies it to where it counts.

    A, grad: [..., K] and [..., N], of all rows.
    """
    x, g = flat_rows(A), flat_rows(grad)
    return matmul_without_autocast(g.t(), x).t() if transposed else matmul_without_autocast(x.t(), g)


def reduce_scatter(grad: Tensor, dim: int, group_name: str, counts: Sequence[int] | None = None) -> Tensor:
    """Functional, so that it can be traced."""
    if counts is not None:
        total = _collectives.wait_tensor(_collectives.all_reduce(grad.contiguous(), "sum", group_name))
        return total.split([*counts], dim)[resolve_group(group_name).rank()].clone()
    moved, size = grad.movedim(dim, 0).contiguous(), resolve_group(group_name).size()
    part = _collectives.reduce_scatter_tensor(moved, "sum", size, group_name)
    return _collectives.wait_tensor(part).movedim(0, dim)


def all_gather(x: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The same, of ``size`` ranks."""
    whole = _collectives.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), size, group_name)
    return _collectives.wait_tensor(whole).movedim(0, dim)


class SumGradient(torch.autograd.Function):
    """Before what every rank uses for a part of the result: each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Tensor:
        ctx.group = group_name, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumOverRanks.apply(grad, *ctx.group), None, None


class SumOverRanks(torch.autograd.Function):
    """Sums what the ranks hold. All of them use the sum alike: its gradient is already whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Tensor:
        ctx.group = group_name, size
        total: Tensor = torch.ops.weft.one_shot_all_reduce(x, "sum", group_name, group_size=size)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumGradient.apply(grad, *ctx.group), None, None
