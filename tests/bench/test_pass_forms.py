"""The table of forms: what counts as fused, as left and as wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, fx

BENCH = str(Path(__file__).parents[2] / "bench")


def products(x: Tensor, w: Tensor) -> Tensor:
    import form_programs as forms

    return forms.rs(forms.ag(x) @ w)


def does_nothing(graph: fx.Graph) -> None:
    pass


def transposes_the_weight(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            with graph.inserting_before(node):
                t = graph.call_function(torch.ops.aten.t.default, (node.args[1],))
            node.args = (node.args[0], t)


def drops_a_row(graph: fx.Graph) -> None:
    output = graph.output_node()
    with graph.inserting_before(output):
        part = graph.call_function(torch.ops.aten.slice.Tensor, (output.args[0][0], 0, 1))  # type: ignore[index]
    output.args = ((part,),)


def breaks_the_graph(graph: fx.Graph) -> None:
    raise KeyError("x")


def calls_what_fails(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            node.args = (node.args[0], node.args[0])


PASSES = (does_nothing, transposes_the_weight, drops_a_row, breaks_the_graph, calls_what_fails)


def verdicts(rank: int, world: int) -> list[str]:
    sys.path.insert(0, BENCH)
    from form_programs import Form
    from suites import forms

    # 8 gathered rows of 6: no product of the gathered tensor with itself.
    graphs = forms.graphs_of(Form("", products, ((4, 6), (6, 6))))
    passes: list[Any] = [forms.weft_pass, *PASSES]
    return [str(forms.verdict(p, graphs)) for p in passes]


def test_verdicts() -> None:
    found = run_ranks(verdicts, 2)
    assert found[0] == found[1]
    assert found[0] == [
        # One product, between two collectives: one of them gets it.
        "fused 1 of 2",
        "left",
        "**wrong**: another result",
        "**wrong**: another shape",
        "**wrong**: the pass raises KeyError",
        "**wrong**: raises RuntimeError",
    ]


def test_every_form_has_a_name_of_its_own() -> None:
    sys.path.insert(0, BENCH)
    from form_programs import forms

    for title, part in forms():
        names = [form.name for form in part]
        assert len(set(names)) == len(names), title
