"""Calls that are kept, from which their kernels are compiled ahead."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from weft.fused_ops.passes.graph.nodes import LeftAlone
from weft.fused_ops.passes.kernels_ahead.graph_kernels import GraphKernels, KeptCall, note_collective

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU is taken for another one"),
    pytest.mark.usefixtures("two"),
]


def test_symbolic_sizes_are_as_they_are_now() -> None:
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    rows = mode.from_tensor(
        torch.empty(48, 8),
        source=ConstantSource("x"),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
    )
    with mode:
        x = torch.empty(rows.shape[0], 8, device="cuda")
        unknown = torch.empty(shape_env.create_unbacked_symint(), 8, device="cuda")
    graph = fx.Graph()
    calls = []
    for value in (x, unknown):
        node = graph.placeholder("x")
        node.meta["val"] = value
        calls.append(graph.call_function(torch.ops.weft.one_shot_all_reduce.default, (node, "sum", "0")))
    assert isinstance(x.shape[0], torch.SymInt) and KeptCall.of(calls[0]).args[0].sizes == (48, 8)
    with pytest.raises(LeftAlone):
        KeptCall.of(calls[1])
    device = graph.call_function(
        torch.ops.weft.one_shot_all_reduce.default, (calls[0].args[0], torch.device("cpu"))
    )
    with pytest.raises(TypeError, match="an argument is of type device"):
        KeptCall.of(device)
    note_collective(calls, "sum")
    assert [plan.algorithm for plan in GraphKernels(graph).plans.values()] == ["push"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["push", "one_shot"])
def test_programs_are_named_while_a_compiler_has_a_fake_mode_of_its_own(dtype: torch.dtype) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        values = (
            torch.empty(1024, 2048, dtype=dtype, device="cuda"),
            torch.empty(8192, 2048, dtype=dtype, device="cuda").t(),
        )
    nodes = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    last = int(dtype == torch.bfloat16)  # its columns, of which the program has those of one rank
    call = graph.call_function(torch.ops.weft.fused_matmul_reduce_scatter.default, (*nodes, "sum", last, "0"))
    kept = KeptCall.of(call)
    plan, programs = kept.planned()
    assert plan.algorithm == ("push" if last else "one_shot") and programs
    with FakeTensorMode():
        found, again = kept.planned()
    assert found == plan and len(again) == len(programs)
