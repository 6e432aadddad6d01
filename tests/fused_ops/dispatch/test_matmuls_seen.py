"""What must see a product's call although it was called before, without a GPU: modes and traces."""

from __future__ import annotations

from typing import Any

import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
from fake_gpu import SLOW, TAKEN, Stage
from test_launch_cache_of_matmuls import Op
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

stage, op = matmuls.stage, matmuls.op


class Seen(Exception):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            raise Seen
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "weft" in str(func):
            raise Seen
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_modes_see_the_call(stage: Stage, op: Op, mode: type) -> None:
    for way in (op.call, op.through_torch):
        with pytest.raises(Seen), mode():
            way(*op.given)
    assert not stage.launched


def test_a_profiler_sees_the_call(stage: Stage, op: Op) -> None:
    """By its name, with shapes; without one the call goes round torch.ops."""
    op.call(*op.given)
    with torch.profiler.profile(record_shapes=True) as profile:
        op.call(*op.given)
    (event,) = [e for e in profile.events() if e.name.startswith("weft::")]
    given = [list(t.shape) for t in op.given if isinstance(t, torch.Tensor)]
    assert given[0] in event.input_shapes
    assert len(stage.launched) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_traces_hold_the_call(stage: Stage, op: Op) -> None:
    A, *rest = op.given
    if len(op.given) == 2:  # an optional result, or argument, is beyond it
        assert "weft::fused" in str(torch.jit.trace(op.call, tuple(op.given), check_trace=False).graph)
    assert "torch.ops.weft.fused" in make_fx(lambda A: op.call(A, *rest))(A).code
    stage.launched.clear()  # below these traces the fast path is right
    with pytest.raises(SLOW, match=TAKEN):
        make_fx(lambda A: op.call(A, *rest), pre_dispatch=True)(A)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert all(isinstance(x, FakeTensor) for x in matmuls.flat(op.call(*op.given)))

    def refuse(graph: torch.fx.GraphModule, _: object) -> Any:
        raise RuntimeError(f"holds {graph.code}")

    with pytest.raises(Exception, match=r"holds [\s\S]*weft.fused"):
        torch.compile(op.call, backend=refuse, fullgraph=True)(*op.given)
    assert not stage.launched
