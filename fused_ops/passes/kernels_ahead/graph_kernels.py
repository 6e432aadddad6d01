"""The plans of a graph's calls, and their kernels on their way."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from ....kernels.device.jit.ahead import Compilation
from ....kernels.device.jit.program import Program
from ...dispatch.choice import CHOOSERS, choice_of_call
from ...dispatch.plan import Plan
from ..graph.sizes import hint

_log = logging.getLogger("weft.passes")
_COLLECTIVE = "weft_collective"  # in a node's meta: the name of what it was fused from


@dataclass(frozen=True)
class _Like:
    """A tensor, as far as a plan depends on it, on whichever device of a kind a process has."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    kind: str

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.kind)


@dataclass(frozen=True)
class KeptCall:
    """A call of an op. Inductor's cache keeps it with the graph, and any rank may take it from there: it says nothing
    of a rank or of a GPU's number."""

    op: str
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: fx.Node) -> KeptCall:
        """The call of a node, symbolic sizes as they are now. LeftAlone: one of them depends on data. TypeError: it
        takes something else."""
        given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return cls(node.target._opname, *tree_map(_kept, given))  # type: ignore[union-attr]

    def planned(self) -> tuple[Plan, list[Program]]:
        """How it would run here, and the programs that it would launch. Nothing is loaded, launched or sent. It raises
        what the call would raise."""
        op = getattr(torch.ops.weft, self.op).default
        # A compiler may have a mode of its own, and what makes programs looks at parts of operands.
        with unset_fake_temporarily(), FakeTensorMode():
            args, kwargs = tree_map(
                lambda value: value.tensor() if isinstance(value, _Like) else value, (self.args, self.kwargs)
            )
            plan, choice = choice_of_call(op, args, kwargs)
            return plan, [*choice.programs()]


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = (tuple(map(hint, of)) for of in (value.shape, value.stride()))
        return _Like(sizes, strides, value.dtype, value.device.type)
    if isinstance(value, torch.SymInt):
        return hint(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise TypeError(f"an argument is of type {type(value).__name__}")


def is_planned(node: fx.Node) -> bool:
    """Whether a node calls an op of weft that sends, and so has a plan."""
    return node.op == "call_function" and node.target in CHOOSERS


def note_collective(created: Iterable[fx.Node], name: str) -> None:
    """Says of which collective the call among these nodes was made."""
    for node in created:
        if is_planned(node):
            node.meta[_COLLECTIVE] = name


class GraphKernels:
    """What the calls of a graph run, as far as that is known before the run.

    Attributes:
        plans: on GPUs, by the name of the collective of which a call was made.
        calls: those that launch programs; each kind once.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.plans: dict[str, Plan] = {}
        self.calls: list[KeptCall] = []
        self._programs: list[Program] = []
        known: dict[str, Plan | None] = {}
        for node in graph.nodes:
            if not is_planned(node) or _is_on_cpu(node):
                continue
            try:
                call = KeptCall.of(node)
            except Exception as e:  # sizes that depend on data, or an argument of another kind
                _log.debug("%s: %r", node, e)
                continue
            if (text := str(call)) not in known:
                known[text] = self._planned(call)
            if (plan := known[text]) is not None and _COLLECTIVE in node.meta:
                self.plans[node.meta[_COLLECTIVE]] = plan

    def _planned(self, call: KeptCall) -> Plan | None:
        try:
            plan, programs = call.planned()
        except Exception as e:  # the call plans again when it is made, and raises what is to be raised
            _log.debug("no plan of %s: %r", call, e)
            return None
        if programs:
            self.calls.append(call)
            self._programs += programs
        return plan

    def compile(self) -> None:
        """Has the programs compiled in the background."""
        if self._programs and not V.aot_compilation:
            Compilation(self._programs)


def _is_on_cpu(node: fx.Node) -> bool:
    """CPU ranks have one way to run a call, and no kernels."""
    given = (n.meta.get("val") for n in node.all_input_nodes)
    return all(x.device.type == "cpu" for x in given if isinstance(x, Tensor))


class KernelsOnTheirWay:
    """Those of a graph that is loaded, also where the pass has not run: Inductor had the graph in its cache."""

    def __init__(self, calls: Iterable[KeptCall]) -> None:
        self._compilation: Compilation | None = None
        try:
            programs = [program for call in calls for program in call.planned()[1]]
        except Exception as e:
            _log.debug("no kernels ahead of a graph's first run: %r", e)
            return
        if programs:
            self._compilation = Compilation(programs)

    def wait(self, seconds: float) -> None:
        """Until they are compiled, at the first run. What then is missing its call waits for."""
        compilation, self._compilation = self._compilation, None
        if compilation is not None and not compilation.wait(seconds):
            _log.warning(
                "%d kernels of a graph are still being compiled at its first run, %g s after it has begun",
                *(compilation.count, seconds),
            )
