"""The plans of a graph's calls, and their kernels on their way."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor, fx
from torch._inductor.virtualized import V

from ....kernels.device.jit.ahead import CompilableProgram, Compilation
from ...dispatch.plan import Plan
from .call_text import is_planned, planned_text, text_of_call

_log = logging.getLogger("weft.passes")
_COLLECTIVE = "weft_collective"  # in a node's meta: the name of what it was fused from


def note_collective(created: Iterable[fx.Node], name: str) -> None:
    """Says of which collective the call among these nodes was made."""
    for node in created:
        if is_planned(node):
            node.meta[_COLLECTIVE] = name


class GraphKernels:
    """What the calls of a graph run, as far as that is known before the run.

    Attributes:
        plans: on GPUs, by the name of the collective of which a call was made.
        calls: as text, those that launch programs; each kind once.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.plans: dict[str, Plan] = {}
        self.calls: list[str] = []
        self._programs: list[CompilableProgram] = []
        known: dict[str, Plan | None] = {}
        for node in graph.nodes:
            if not is_planned(node) or _is_on_cpu(node):
                continue
            try:
                text = text_of_call(node)
            except Exception as e:  # sizes that depend on data, or an argument of another kind
                _log.debug("%s: %r", node, e)
                continue
            if text not in known:
                known[text] = self._planned(text)
            if (plan := known[text]) is not None and _COLLECTIVE in node.meta:
                self.plans[node.meta[_COLLECTIVE]] = plan

    def _planned(self, text: str) -> Plan | None:
        try:
            plan, programs = planned_text(text)
        except Exception as e:  # the call plans again when it is made, and raises what is to be raised
            _log.debug("no plan of %s: %r", text, e)
            return None
        if programs:
            self.calls.append(text)
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

    def __init__(self, calls: Iterable[str]) -> None:
        self._compilation: Compilation | None = None
        try:
            programs = [program for text in calls for program in planned_text(text)[1]]
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
