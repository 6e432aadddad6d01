"""Where the question goes in Inductor's code.

Imported when the pass first runs, which is inside of Inductor: it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ..records.lowering import CodeNode, outermost
from .guard import SIZES

_AGREE = torch.ops.weft.agree.default


class _Agree(CodeNode):
    """Writes the question: where the graph's inputs are unpacked, wherever the scheduler puts this node."""

    def __init__(self, packed: str, fused: bool, sizes: list[Any]) -> None:
        super().__init__()
        self.packed, self.fused, self.sizes = packed, fused, sizes

    def codegen(self, wrapper: Any) -> None:
        wrapper = outermost(wrapper)
        assert V.graph.name is None, "a graph that another one calls was not put back"
        wrapper.add_import_once("from weft.fused_ops.passes.agreement.guard import GraphGuard")
        indent = 2 if config.graph_partition else 1
        wrapper.header.writeline(f"weft_guard = GraphGuard({self.packed!r})")
        names = wrapper.get_graph_input_names()
        strides = ", ".join(_stride(wrapper, out) for out in V.graph.graph_outputs)
        sizes = wrapper.codegen_python_shape_tuple(self.sizes) if self.sizes else ""
        names_of = [getattr(out, "name", None) for out in V.graph.graph_outputs]
        objects = [f"{i}: {name}" for i, name in enumerate(names_of) if name in V.graph.torchbind_constants]
        write = wrapper.prefix.writeline
        with wrapper.prefix.indent(indent):
            # Local to the generated function: it ends with the graph's run, also by an exception.
            write(f"weft_turn = weft_guard.turn({sizes})")
            if not self.fused:  # asked for ranks that would run theirs fused, and for what was changed before
                return
            write("if weft_turn is None:")
            with wrapper.prefix.indent():
                write(f"weft_inputs = [{', '.join(names)}]")
                if names:
                    write(f"del {', '.join(names)}")
                given = f"weft_inputs, [{strides}]" + (f", {{{', '.join(objects)}}}" if objects else "")
                write(f"return weft_guard.fallback({given})")


class _Told(ir.FallbackKernel):
    """The op itself, where the generated code is not Python."""

    def codegen_unbacked_symbol_defs(self, wrapper: Any) -> None:
        """It returns nothing, and the FX wrapper would look for a result."""


def _stride(wrapper: Any, out: Any) -> str:
    try:
        return str(wrapper.codegen_python_shape_tuple(out.get_stride()))
    except (AttributeError, NotImplementedError):
        return "None"  # a size, or nothing


@register_lowering(_AGREE, type_promotion_kind=None)
def _lower_agree(packed: str, fused: bool) -> None:
    if V.graph.cpp_wrapper or V.graph.fx_wrapper:
        # Who set it without the pass's knowledge gets an error, not a graph that runs fused unasked.
        assert not fused, "weft::agree: only generated Python code can ask the other ranks"
        _Told.create(_AGREE, packed, fused)  # the op, which tells them that this one runs unfused
        return
    sizes = V.graph.current_node.meta[SIZES]
    _Agree(packed, fused, [size.node.expr for size in sizes]).register()
