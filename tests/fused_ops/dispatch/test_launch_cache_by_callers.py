"""The fast path of a matmul that more than one launch makes, and of one with other arguments than tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_launch_cache_of_matmuls as matmuls
import torch
from fake_gpu import DEADLINE, NAME, SLOW, STREAM, TAKEN, OneShot, Stage, run_on_cuda
from test_matmuls_seen import FunctionMode, Seen
from weft import symm_mem
from weft.fused_ops import fused_matmul_reduce_scatter
from weft.fused_ops.ops import matmul_reduce_scatter
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.symm_mem.failure.call_log import CallLog
from weft.symm_mem.workspace import Workspace

stage, op = matmuls.stage, matmuls.op


class Caller(OneShot):
    """What is left behind where there is more to do than to launch a kernel."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def launch(self, *args: Any, **named: Any) -> None:
        """On the slow path, where an op launches what was chosen."""

    def call(self, tensors: Any, results: Any, *more: int) -> None:
        self.called.append((list(tensors), list(results), *more))


def test_a_caller_gets_tensors_and_says_when_it_begins(
    stage: Stage, op: matmuls.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = stage.workspace.prepared.kernel = Caller()
    op.first(*op.given)
    caller.called.clear()
    for what in ("next_buffer", "raise_if_broken"):
        monkeypatch.setattr(stage.workspace, what, lambda *_, **__: pytest.fail("that is the caller's"))
    for way in (op.call, op.through_torch):
        got = matmuls.flat(way(*op.given))
        tensors, results, *more = caller.called.pop()
        for taken, given in ((tensors, op.given), (results, got)):
            assert [x.data_ptr() for x in taken] == [x.data_ptr() for x in given]
        assert more == [DEADLINE, STREAM]
    # Whether it was half-way only the caller knows.
    monkeypatch.setattr(caller, "call", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            op.call(*op.given)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_it_is_found_in_the_workspace_of_exchanges(stage: Stage, op: matmuls.Op, beside: bool) -> None:
    caller = stage.workspace.prepared.kernel = Caller()
    op.first(*op.given)
    caller.called.clear()
    stage.workspaces.clear()
    stage.workspaces["one_shot", STREAM, 0] = stage.workspace
    if beside:
        stage.workspaces["matmul", STREAM, 0] = matmuls.Workspace()
    for _ in range(2):
        op.call(*op.given)
    assert len(caller.called) == 2
    stage.workspaces["one_shot", STREAM, 0] = matmuls.Workspace()  # grown
    with pytest.raises(SLOW, match=TAKEN):
        op.call(*op.given)


def test_errors_name_the_line_of_the_call(stage: Stage, op: matmuls.Op) -> None:
    calls = CallLog(lambda: 1.0, replayed=False)
    fault = SimpleNamespace(error=None, written=SimpleNamespace(value=0))
    workspace: Any = SimpleNamespace(fault=fault, _calls=calls, _is_double_buffered=False)

    class Begins(Caller):
        def call(self, tensors: Any, results: Any, *more: int) -> None:
            Workspace.raise_if_broken(workspace, "an op", inside=3)  # as one_shot_kernel.py

    stage.workspace.prepared.kernel = Begins()
    op.first(*op.given)
    for way in (op.call, op.through_torch):
        calls.begins("", None)
        way(*op.given)
        assert calls.op == "an op" and calls.site is not None
        assert calls.site.startswith(f"{matmuls.__file__}:"), (
            "where the op is called, neither above nor below"
        )


def test_a_scattered_last_dimension_is_another_call(stage: Stage) -> None:
    """Of operands that another dimension of could be scattered as well."""
    A, B = matmuls.numbers(6, 4, 8), matmuls.numbers(8, 16)
    for dim, shape in ((2, [6, 4, 8]), (0, [3, 4, 16])):
        call = MatmulReduceScatterCall(A, B, "sum", dim, NAME, A.dtype)
        for way in (dim, dim - 3):
            with pytest.raises(SLOW, match=TAKEN):
                fused_matmul_reduce_scatter(A, B, "sum", way, NAME)
            given = call._replace(scatter_dim=way)
            run_on_cuda(matmul_reduce_scatter, stage.where, call, given=given)
        stage.launched.clear()
        for way in (dim, dim - 3):
            got = fused_matmul_reduce_scatter(A, B, "sum", way, NAME)
            assert list(got.shape) == shape and got.is_contiguous()
            _, operands, results, *_ = stage.launched.pop()
            assert (operands, results) == ([A.data_ptr(), B.data_ptr()], [got.data_ptr()])


def test_a_default_device_is_none_of_its_business(stage: Stage, op: matmuls.Op) -> None:
    caller = stage.workspace.prepared.kernel = Caller()
    op.first(*op.given)
    caller.called.clear()
    with torch.device("cpu"):
        op.call(*op.given)
        assert caller.called
        with pytest.raises(Seen), FunctionMode():
            op.call(*op.given)


@pytest.mark.parametrize("error", [RuntimeError("the driver refuses"), KeyboardInterrupt()])
def test_a_launch_that_fails_breaks_the_workspace(
    stage: Stage, op: matmuls.Op, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise error

    for kernel in stage.workspace.prepared.made.values():
        monkeypatch.setattr(kernel, "launch", refused)
    with pytest.raises(type(error)):
        op.call(*op.given)
    with pytest.raises(symm_mem.WeftError, match="a call was ended by"):
        op.call(*op.given)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_result_of_another_dtype_takes_the_slow_path(stage: Stage, gradient: bool) -> None:
    A, B = matmuls.numbers(6, 4, 8), matmuls.numbers(8, 16)
    run_on_cuda(matmul_reduce_scatter, stage.where, MatmulReduceScatterCall(A, B, "sum", 0, NAME, A.dtype))
    A.requires_grad_(gradient)
    for call in (fused_matmul_reduce_scatter, torch.ops.weft.fused_matmul_reduce_scatter):
        call(A, B, "sum", 0, NAME)
        with pytest.raises(SLOW, match=TAKEN):
            call(A, B, "sum", 0, NAME, out_dtype=torch.float32)
    assert len(stage.launched) == 3


def test_wrong_arguments_are_refused_as_ever(stage: Stage, op: matmuls.Op) -> None:
    dim = "gather_dim" if len(op.given) == 3 else "scatter_dim"
    for value in (False, 0.0, None):
        with pytest.raises(TypeError, match=f"{dim}: is .*must be an integer"):
            op.call(*op.given, **{dim: value})
    with pytest.raises(TypeError, match="must be a tensor"):
        op.call(*op.given[:-1], op.given[-1].tolist())
    with pytest.raises(ValueError, match="must be strided"):
        op.call(op.given[0].to_sparse(), *op.given[1:])
    with pytest.raises(TypeError, match="group: must be"):
        op.call(*op.given, group=3)
    if len(op.given) == 3:
        with pytest.raises(TypeError, match="return_A: is"):
            op.call(*op.given, return_A=1)
    else:
        with pytest.raises(SLOW, match=TAKEN):  # another kernel
            op.call(*op.given, reduce_op="avg")
        with pytest.raises(ValueError, match="reduce_op: is 'max'"):
            op.call(*op.given, reduce_op="max")
    assert not stage.launched
