"""An op as one object: its call, what it refuses, its fake, how it runs, its gradient.

``library/registration.py`` derives from it what torch.library is told.
"""

from __future__ import annotations

from ast import literal_eval
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from ...symm_mem import flight_recorder
from ...symm_mem.call_site import calling
from ...symm_mem.failure.call_log import poison_on_error
from ...symm_mem.heap.heap import Heap
from ...symm_mem.heap.registry import GroupRef
from ...symm_mem.workspace import Workspace
from .. import validation
from ..dispatch import launch_cache
from ..dispatch.call_check import OpCall, begin_call, take_begun
from ..dispatch.choice import Choice, Known, unfused
from ..dispatch.plan import Plan, heap_or_reason, on, this_thread, why_runs_unfused
from ..dispatch.tensor_guards import needs_no_dispatch
from ..dispatch.workspaces import AROUND_MATMULS
from .gradients import AUTOCAST

_VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)


def record_of(schema: str) -> Any:
    """What makes calls of a schema: a NamedTuple of its arguments, in its order."""
    arguments = schema[: schema.index(") -> ")].partition("(")[2].split(", ")
    fields = [each.split()[-1].partition("=") for each in arguments if each != "*"]
    defaults = [literal_eval(value) for _, there, value in fields if there]
    return namedtuple("Call", [name for name, *_ in fields], defaults=defaults)  # type: ignore[misc]


def tensors_given(call: Iterable[Any]) -> list[Tensor]:
    """All that a call is given, in the order of its arguments."""
    found: list[Tensor] = []
    for given in call:
        if isinstance(given, Tensor):
            found.append(given)
        elif isinstance(given, list | tuple):
            for x in given:
                if isinstance(x, Tensor):
                    found.append(x)
    return found


@dataclass(frozen=True, eq=False)
class Op:
    """All that is particular to an op.

    Attributes:
        schema: as torch.library has it; the record's fields are its arguments.
        validate: the call with what follows from it, what else follows from it, and the group. A ValueError or
            TypeError names the argument, what it was and what it must be. Real and fake calls ask it, so both refuse
            the same. Sizes may be symbolic: it looks at no data.
        fake: the results without data, of what ``validate`` returns.
        kernel: of an op of ``capability.KERNELS``.
        record: makes a call: a NamedTuple of its arguments in the schema's order, with a ``group_name`` and a
            ``group_size``. (A tuple takes a fourth of a dataclass's time.) By default one that is made of the schema.
        sends_nothing: whether, by the same, the ranks have nothing to send each other; by default where the first
            tensor has no element.
        choose: the ``Choice`` of the same, where the ranks can address each other's memory.
        run: the results, of a choice, the heap (None if that is unfused), and the same.
        with_gradient: the results of a call of which a gradient is wanted; or why it has none (``refuse_gradient``).
        known_by: the arguments and tensors by which the launch cache knows such a call, as it was made; or None if it
            does not look for it.
        kinds: of workspaces in which it does.
        again: by ``known_by``, the results of a call like one before, where these are not those that kernels write, in
            their order, with what is gathered in front; else None, and nothing happened.
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
    validate: Callable[[Any], tuple[Any, ...]]
    fake: Callable[..., Any]
    kernel: str
    choose: Callable[..., Choice]
    run: Callable[..., Any]
    with_gradient: Any
    record: Any = None
    sends_nothing: Callable[..., bool] = lambda call, *_: call[0].numel() == 0
    known_by: Callable[[Any], Known] | None = None
    kinds: tuple[str, ...] = AROUND_MATMULS
    again: Callable[[Any], Any] | None = None
    functional: tuple[Op, Callable[[Any], Any]] | None = None
    flops: Callable[..., int] | None = None
    own_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own_on_cuda: bool = False
    own_by_counts: Mapping[str, str] = field(default_factory=dict)
    own_values: tuple[str, ...] = ()
    prepares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.record is None:
            object.__setattr__(self, "record", record_of(self.schema))

    @cached_property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @cached_property
    def overload(self) -> OpOverload:
        found: OpOverload = getattr(torch.ops.weft, self.name).default
        return found

    @cached_property
    def fast(self) -> Callable[[Any], Any]:
        """Returns the results, if such a call was made before; else None, and nothing happened."""
        if self.again is not None or self.known_by is None:
            return self.again or (lambda call: None)
        name, known_by, kinds, (*_, returns) = self.name, self.known_by, self.kinds, self.schema.split(" -> ")
        one, gathers, exchanges = (
            returns == each for each in ("Tensor", "(Tensor?, Tensor[])", "(Tensor, Tensor?)")
        )

        def launched(call: Any) -> Any:
            if (known := known_by(call)) is None:
                return None
            results = launch_cache.launch_again(name, *known, call.group_name, kinds)
            if results is None:
                return None
            if one:
                return results[0]
            if gathers:
                return (results.pop() if call.return_A else None), results
            return (results[0], results[1] if call.return_A else None) if exchanges else results

        return launched

    def choice_of(self, call: Any) -> tuple[Choice, torch.device]:
        """How a call would run, as far as it is known without another rank; and where.

        Raises:
            ValueError, TypeError: as ``validate``.
        """
        found, device = self.validate(call), call[0].device
        reason = why_runs_unfused(self.kernel, device, found[-1], empty=self.sends_nothing(*found))
        return self.choose(*found) if reason is None else unfused(reason), device

    def run_below_autograd(self, call: Any) -> Any:
        done = self.fast(call)
        return self.run_slow(call) if done is None else done

    def run_slow(self, call: Any) -> Any:
        """By way of the dispatcher where something else must see the call."""
        if needs_no_dispatch(*tensors_given(call)):
            return self.slow(call)
        with torch._C._AutoDispatchBelowAutograd():
            return self.dispatch(call)

    def dispatch(self, call: Any) -> Any:
        arguments = {name: getattr(call, name) for name in call._fields}
        given = [arguments.pop(a.name) for a in self.overload._schema.arguments if not a.kwarg_only]
        return self.overload(*given, **arguments)

    def slow(self, call: Any) -> Any:
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
def _checked_run(op: Op, call: Any) -> Any:
    found = op.validate(call)
    checked, group = found[0], found[-1]
    compared = {name: getattr(checked, name) for name in checked._fields if name not in _OF_GRAPHS}
    for name in compared.keys() & {*op.own_values}:
        compared[name] = compared[name] is not None
    device = call[0].device
    own: tuple[Mapping[str, tuple[int, ...]], bool] = op.own_dims, op.own_on_cuda
    if compared.get("counts") is not None:
        own = {name: (compared[dim],) for name, dim in op.own_by_counts.items()}, True
    begin_call(OpCall(op.name, compared, device.type, *own, op.prepares), group, device)
    where = heap_or_reason(op.name, op.kernel, device, group, empty=op.sends_nothing(*found))
    if isinstance(where, str):
        return op.run(unfused(where), None, *found)
    choice, known = op.choose(*found), None if op.known_by is None else op.known_by(call)
    done = op.run(choice if known is None else replace(choice, known=known), where, *found)
    if choice.algorithm == "host" and known is not None:
        arguments, tensors = known
        again = _host_call(op, choice, found[:-1], tensors)
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


def _host_call(op: Op, how: Choice, found: Sequence[Any], tensors: Sequence[Tensor]) -> launch_cache.HostCall:
    """Of a call between CPU ranks that was made before: it is validated and chosen."""
    numbers, in_place = {id(x): i for i, x in enumerate(tensors)}, op.functional is not None
    parts = [_Part.of(value, numbers) for value in found]

    def bound(workspace: Workspace[Any], ran: Plan, group: GroupRef) -> launch_cache.Launch:
        choice, heap, fault = replace(how, found=(workspace, ran)), workspace.heap, workspace.fault

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

    return bound


def _listed(done: Any) -> list[Tensor]:
    """An op's results in the order in which kernels write them."""
    if isinstance(done, Tensor | None):
        return [] if done is None else [done]
    if isinstance(done[1], list):  # products, and after them what was gathered
        done = *done[1], done[0]
    return [x for x in done if x is not None]


def writing_out(
    op: Op, shape: Callable[[Any, ProcessGroup], Sequence[int]], own_by_counts: Mapping[str, str]
) -> Op:
    """An op of one tensor, with the result written to another one, which comes first. Its ``run`` takes that, too.
    ``shape``: that of the result, of a call that is validated."""
    arguments = op.schema.partition("(")[2].rpartition(" -> ")[0]

    def without_out(call: Any) -> Any:
        return op.record(*call[1:])

    def validate(call: Any) -> tuple[Any, Tensor, ProcessGroup]:
        found, group = op.validate(without_out(call))
        validation.result_tensor(call.out, shape(found, group), call[1])
        return found, call.out, group

    def run(choice: Choice, where: Heap | None, call: Any, out: Tensor, group: ProcessGroup) -> None:
        op.run(choice, where, call, group, out)
        increment_version(out)  # as on the fast path

    def known_by(call: Any) -> Known:
        known = op.known_by and op.known_by(call)
        return known and (known[0], [call.out, *known[1]])

    return replace(
        op,
        schema=f"{op.name}_out(Tensor(a!) out, {arguments} -> ()",
        record=None,
        validate=validate,
        fake=lambda *_: None,
        sends_nothing=lambda call, out, group: op.sends_nothing(call, group),
        choose=lambda call, out, group: op.choose(call, group),
        run=run,
        known_by=known_by,
        with_gradient=" where the result is written to a given tensor",
        functional=(op, without_out),
        own_by_counts=own_by_counts,
    )


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes a CUDA tensor's device the current one."""
    return on(x.device) if x.device.type == "cuda" else nullcontext()


_lib = torch.library.Library("weft", "FRAGMENT")
#: Ops that send nothing, by their names: what makes a call of which a gradient is wanted.
LOCAL_OPS: dict[str, Callable[..., Any] | None] = {}


def define(
    schema: str,
    validate: Callable[..., None],
    run: Callable[..., Any],
    fake: Callable[..., Any],
    with_gradient: Callable[..., Any] | None = None,
) -> None:
    """An op in ``torch.ops.weft`` that sends nothing: no rank waits for another one's call. What it refuses, given its
    arguments in order; its results, with data, without, and where a gradient is wanted."""
    name = schema.partition("(")[0]

    def run_checked(*args: Any) -> Any:
        validate(*args)
        with on_device(args[0]), torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return run(*args)

    def fake_checked(*args: Any) -> Any:
        validate(*args)
        return fake(*args)

    LOCAL_OPS[name] = with_gradient
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _lib.impl(name, run_checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake_checked, lib=_lib)
