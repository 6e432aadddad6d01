"""Has Inductor's generated code verify its memory: buffers that are used again, or in place, among it.

After the graph stands an op that makes no code of its own. When its turn comes, the wrapper that writes the code is
known; once that has planned which memory is used again, calls of ``CodeWatch`` are put between its lines.

Which lines a wrapper has differs between torch 2.11 and 2.15, and is known here alone. Code with lines that are not
known, with subgraphs, or in partitions for CUDA graphs, is not verified, and the log says why.

Imported inside of Inductor: it takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from memory_check import report
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_module
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves
from weft.fused_ops.library import schema
from weft.fused_ops.passes.records.lowering import CodeNode

_log = logging.getLogger("weft.passes")
_lib = torch.library.Library("weft_memory", "FRAGMENT")
_lib.define("watch_memory() -> ()")
_lib.impl("watch_memory", lambda: None, "CompositeExplicitAutograd")
torch.library.register_fake("weft_memory::watch_memory", lambda: None, lib=_lib)
_watch = torch.ops.weft_memory.watch_memory.default
fx.node.has_side_effect(_watch)

_PLANNED = ("AllocateLine", "FreeIfNotReusedLine", "ReuseLine", "ReinterpretLine", "NullLine")
_MAKES = ("ExternKernelAllocLine", "ExternKernelMultiOutLine")


def watch_code(graph: fx.Graph) -> None:
    """Has the code that is generated for the graph verify its memory each time that it runs."""
    with graph.inserting_before(graph.output_node()):
        graph.call_function(_watch).meta["val"] = None


class _Watch(CodeNode):
    """Finds the wrapper."""

    def codegen(self, wrapper: Any) -> None:
        if (why := _why_not(wrapper)) is not None:
            report.not_verified("generated code", why)
            return
        plans = wrapper.run_wrapper_ir_passes
        wrapper.add_import_once("from memory_check.code_watch import CodeWatch")

        def planned_and_watched(is_inference: bool) -> None:
            plans(is_inference)
            kinds = {type(line).__name__ for line in wrapper.lines}
            planning = {c.__name__ for c in _subclasses(wrapper_module.MemoryPlanningLine)}
            unknown = sorted(kinds & planning - {*_PLANNED} | {k for k in kinds if "Subgraph" in k})
            if unknown:
                report.not_verified("generated code", f"it has {unknown}")
                return
            wrapper.lines = [*_Lines(wrapper).watched()]

        wrapper.run_wrapper_ir_passes = planned_and_watched


def _why_not(wrapper: Any) -> str | None:
    if V.graph.cpp_wrapper or V.graph.fx_wrapper:
        return "only generated Python code can"
    if getattr(wrapper, "partition_signatures", None) is not None:
        return "it is in partitions, for CUDA graphs"
    if not hasattr(wrapper, "run_wrapper_ir_passes"):
        return f"torch {torch.__version__} plans its memory otherwise"
    return None


def _subclasses(of: type) -> Iterator[type]:
    yield of
    below: list[type] = of.__subclasses__()
    for each in below:
        yield from _subclasses(each)


@dataclass
class _Lines:
    """The lines of a wrapper, and what they were planned to hold.

    Attributes:
        held: by name the memory, as its number.
        sizes: bytes by that.
        peak: bytes at most; None once a size is not known.
    """

    wrapper: Any
    held: dict[str, set[int]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    peak: int | None = 0
    _parts: dict[str, set[int]] = field(default_factory=dict)  # of what returns several tensors

    def watched(self) -> Iterator[Any]:
        """The lines, with calls of a CodeWatch between them."""
        names = ", ".join(self.wrapper.get_graph_input_names())
        yield f"weft_watch = CodeWatch({names})"
        for line in self.wrapper.lines:
            kind = type(line).__name__
            if kind in ("AllocateLine", "ReuseLine"):
                yield "weft_watch.settle()"
            if kind == "ReuseLine":
                old = line.node.get_name()
                if not line.delete_old or old in V.graph.get_output_names():
                    yield line  # both names stay
                    yield self._within(line.reused_as.get_name(), old)
                    continue
                yield f"{old} = weft_watch.alone({old!r}, {old})"
            yield line
            yield from self._after(line, kind)
        yield f"weft_watch.end({self.peak})"

    def _after(self, line: Any, kind: str) -> Iterator[Any]:
        if kind == "AllocateLine":
            name, size = line.node.get_name(), _size_of(line.node)
            yield self._made(name, size, (), self._new([size]))
        elif kind == "ReinterpretLine":
            name = line.reused_as.get_name()
            yield DeferredLine(name, self._within(name, line.node.get_name()))  # as the line itself
        elif kind == "ReuseLine":
            old, new = line.node.get_name(), line.reused_as.get_name()
            self.held[new] = self.held.pop(old, set())
            yield f"weft_watch.reused({old!r}, {new!r}, {new})"
        elif kind in ("FreeIfNotReusedLine", "FreeLine"):
            name = line.node.get_name()
            if not getattr(line, "is_reused", False):
                self.held.pop(name, None)
                yield f"weft_watch.freed({name!r})"
        elif kind in _MAKES:
            yield from self._of_extern(line.node)
        elif kind == "MultiOutputLine":
            # The tuple or list that it is taken of holds it, too.
            yield self._within(line.result_name, line.arg_name, self._parts.get(line.result_name))

    def _of_extern(self, node: Any) -> Iterator[Any]:
        name, layout, op = node.get_name(), node.get_output_spec(), getattr(node, "op_overload", None)
        if op is schema.all_gather_release:
            gathered = node.inputs[1].get_name()
            yield f"{gathered} = weft_watch.released({gathered!r})"
            return
        if op is schema.all_gather_start:
            yield f"weft_watch.started({name!r})"
        if op is schema.all_gather_wait and name in V.graph.never_reuse_buffers:  # on the heap
            self.held[name] = set()
            yield f"weft_watch.placed({name!r}, {name}, {node.inputs[0].get_name()!r})"
            return
        if op is torch.ops._c10d_functional.wait_tensor.default:
            yield f"weft_watch.waited({node.inputs[0].get_name()!r})"
            return
        if isinstance(layout, ir.NoneLayout) or name in V.graph.removed_buffers:
            return
        if node.get_inputs_that_alias_output() or node.get_mutation_names():
            self.peak = None
            yield self._made(name, None, None, set())
        elif isinstance(layout, ir.Layout):
            size = _size_of(node)
            yield self._made(name, size, (), self._new([size]))
        else:
            parts = [n.result_name for n in self.wrapper.lines if getattr(n, "arg_name", None) == name]
            if len(parts) != len(tree_leaves(getattr(node, "outputs", None))):
                self.peak = None  # some of several tensors are there that nothing takes
            numbers = self._new([_size_of(V.graph.name_to_buffer[part]) for part in parts])
            self._parts |= {part: {number} for part, number in zip(parts, numbers, strict=True)}
            yield self._made(name, None, (), {*numbers})
            if getattr(op, "_opname", "").endswith("_coalesced"):
                yield f"weft_watch.begun({[given.get_name() for given in node.inputs]}, {parts})"

    def _within(self, name: str, other: str, held: set[int] | None = None) -> str:
        """A name for memory, or a part of it, that another name is there for."""
        return self._made(name, None, (other,), self.held.get(other, set()) if held is None else held)

    def _new(self, sizes: list[int | None]) -> list[int]:
        numbers = [*range(len(self.sizes), len(self.sizes) + len(sizes))]
        if None in sizes:
            self.peak = None
        self.sizes += [size or 0 for size in sizes]
        return numbers

    def _made(self, name: str, size: int | None, within: Collection[str] | None, held: Iterable[int]) -> str:
        # No DeferredLine: what a kernel computes in place of another buffer within it is "removed", and yet allocated.
        self.held[name] = set(held)
        if self.peak is not None:
            there: set[int] = set().union(*self.held.values())
            self.peak = max(self.peak, sum(self.sizes[n] for n in there))
        return f"weft_watch.made({name!r}, {name}, {size}, {within!r})"


def _size_of(node: Any) -> int | None:
    """Bytes of a buffer; None where that is symbolic."""
    count = V.graph.get_allocation_storage_size(node)
    itemsize = torch.empty(0, dtype=node.get_dtype()).element_size()
    return int(count) * itemsize if getattr(count, "is_number", isinstance(count, int)) else None


@register_lowering(_watch, type_promotion_kind=None)
def _lower_watch() -> None:
    _Watch().register()
