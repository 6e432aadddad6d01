"""Which forms the passes fuse."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm
from form_programs import Form, forms
from form_programs_in_fp8 import forms_in_fp8
from form_programs_without_products import ALONE, BY_ROWS, forms_without_products
from suite import Run, Suite
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves
from weft.fused_ops import FusionPass

Pass = Callable[[fx.Graph], None]
# Relative to the norm. Only bfloat16 rounds as much; a wrong result is wrong by about all of it.
CLOSE = 2e-2
_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def graphs_of(form: Form) -> list[fx.Graph]:
    """The graphs that Inductor would give to its last passes: one, or forward and backward."""
    found: list[fx.Graph] = []

    def inner_compile(gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode(example_inputs)):
            view_to_reshape(gm)
            post_grad_passes(gm, bool(kwargs.get("is_inference")))
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner_compile)

    torch._dynamo.reset()
    inputs = [torch.randn(s, requires_grad=form.train) for s in form.shapes]
    if form.dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 1)
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(
            post_grad_custom_post_pass=lambda g: found.append(copied(g)), fx_graph_cache=False
        ),
    ):
        torch.compile(form.fn, backend=backend, dynamic=None if form.dynamic else False)(*inputs)
    return found


def count_collectives(graph: fx.Graph) -> int:
    """How many unfused collectives the graph has."""
    # An op that writes to its arguments stands after an operator of higher order.
    ops = [
        n.args[0] if isinstance(n.target, torch._ops.HigherOrderOperator) else n.target for n in graph.nodes
    ]
    return sum(
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "_c10d_functional"
        and op._opname.startswith(_COLLECTIVES)
        for op in ops
    )


# By part of the table; of the others only what goes with a product.
_SETTINGS: dict[str, dict[str, Any]] = {ALONE: {}, BY_ROWS: {"sequence_parallel": True}}


def weft_pass(graph: fx.Graph, part: str = "") -> None:
    FusionPass(**_SETTINGS.get(part, {"collectives": False}))(graph)
    # Interpreted, the question refuses to be passed by; here all ranks run the same graphs.
    for question in graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
        graph.erase_node(question)


def torch_pass(graph: fx.Graph) -> None:
    with torch_symm._test_mode():
        micro_pipeline_tp_pass(graph)


def _scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: Any) -> Tensor:
    # The kernels' implementation has this check, the definition has not.
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")
    return torch_symm._fused_matmul_reduce_scatter_fallback(A, B, reduce_op, scatter_dim, group_name)


# What torch's fused ops compute, where their kernels do not run.
_DEFINITIONS: dict[str, Callable[..., Any]] = {
    "symm_mem::fused_all_gather_matmul": torch_symm._fused_all_gather_matmul_fallback,
    "symm_mem::fused_matmul_reduce_scatter": _scatter,
}


class Runner(fx.Interpreter):
    """Runs a graph; torch's fused ops by their definitions."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        if name in _DEFINITIONS:
            return _DEFINITIONS[name](*args, **kwargs)
        return super().call_function(target, args, kwargs)


def like(value: Any) -> Any:
    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(size.node.hint)

    if not isinstance(value, Tensor):
        return number(value)
    out = torch.empty_strided(
        [number(s) for s in value.shape], [number(s) for s in value.stride()], dtype=value.dtype
    )
    return out.copy_(torch.randn(out.shape)) if out.dtype.is_floating_point else out.random_(1, 9)


def run_form(graph: fx.Graph, inputs: list[Any]) -> list[Any]:
    own = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    return tree_leaves(Runner(fx.GraphModule(torch.nn.Module(), graph)).run(*own))


def same_results(got: list[Any], want: list[Any]) -> bool:
    if len(got) != len(want):
        return False
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor):
            if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
                return False
            # Bits read as another type may be no number at all.
            finite = b.isfinite()
            if not torch.equal(a.isfinite(), finite):
                return False
            difference = (a[finite].double() - b[finite].double()).norm()
            if not difference <= CLOSE * b[finite].double().norm():
                return False
    return True


@dataclass
class Verdict:
    """Of one pass on one form: of how many collectives it fused how many, and what went wrong."""

    fused: int = 0
    of: int = 0
    wrong: str = ""

    def __str__(self) -> str:
        if self.wrong:
            return f"**wrong**: {self.wrong}"
        if not self.fused:
            return "left"
        return "fused" if self.fused == self.of else f"fused {self.fused} of {self.of}"


def verdict(pass_: Pass, graphs: list[fx.Graph], alike: bool = False) -> Verdict:
    """The same on every rank: what goes wrong on one goes wrong on all."""
    found = Verdict()
    for graph in graphs:
        found.of += count_collectives(graph)
        after = copied(graph)
        if alike:
            torch.manual_seed(found.of)
        inputs = [like(n.meta["val"]) for n in graph.nodes if n.op == "placeholder"]
        want = run_form(graph, inputs)
        try:
            pass_(after)
            after.lint()
        except Exception as e:
            found.wrong = f"the pass raises {type(e).__name__}"
            continue
        found.fused += count_collectives(graph) - count_collectives(after)
        try:
            got = run_form(after, inputs)
        except Exception as e:
            found.wrong = f"raises {type(e).__name__}"
            continue
        if not same_results(got, want):
            shapes = [tuple(t.shape) for t in got if isinstance(t, Tensor)]
            wanted = [tuple(t.shape) for t in want if isinstance(t, Tensor)]
            found.wrong = "another result" if shapes == wanted else "another shape"
    # Random inputs differ between ranks, and so may what is noticed.
    words: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(words, found.wrong)
    found.wrong = max(words)
    return found


class Forms(Suite):
    """Which forms weft's pass and torch's own fuse, which they leave, and which they get wrong: a markdown table.

    Two CPU ranks compile each program of form_programs*.py. Both passes get copies of the very same graphs, which then
    run, and the results are compared with the unfused graph's. torch's ops run as the definition that torch has for
    where their kernels do not. The exit status is 1 if weft's pass got a form wrong.
    """

    ranks, device = 2, "cpu"

    def rows(self, given: argparse.Namespace) -> list[tuple[str, Form]]:
        parts = (*forms(), *forms_in_fp8(), *forms_without_products())
        return [(title, form) for title, part in parts for form in part]

    def begin(self, run: Run) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(run.rank)
        warnings.filterwarnings("ignore")
        # torch's pass warns of each form that it does not find.
        logging.disable(logging.WARNING)
        # torch's pass asks for NCCL first, although it changes nothing but a graph.
        dist.is_nccl_available = lambda: True
        self._part = ""
        run.say("| form | weft | torch's pass |", "|---|---|---|")

    def measure(self, row: tuple[str, Form], run: Run) -> None:
        title, form = row
        if title != self._part:
            run.say(f"| **{title}** | | |")
        self._part = title
        graphs = graphs_of(form)
        ours = verdict(partial(weft_pass, part=title), graphs, form.alike)
        theirs = verdict(torch_pass, graphs, form.alike)
        run.wrong |= bool(ours.wrong)
        run.say(f"| {form.name} | {ours} | {theirs} |")


SUITE = Forms()
