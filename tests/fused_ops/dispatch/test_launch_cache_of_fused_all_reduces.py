"""The fast paths of fused_matmul_all_reduce and of the fused norms, without a GPU: when they are taken."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import DEADLINE, NAME, SLOW, STREAM, TAKEN, Kernel, Stage, assert_slow, run_on_cuda
from test_launch_cache_of_matmuls import CHANGES, OTHERS
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch import plan
from weft.fused_ops.dispatch.workspaces import AROUND_MATMULS
from weft.fused_ops.ops import all_reduce_rms_norm, all_reduce_rms_norm_quant, matmul_all_reduce
from weft.fused_ops.ops.all_reduce_rms_norm_quant import AllReduceRmsNormQuantCall
from weft.fused_ops.ops.matmul_all_reduce import MatmulAllReduceCall
from weft.kernels import all_reduce_rms_norm as op_names
from weft.kernels.all_reduce.configs import choose_all_reduce
from weft.symm_mem import call_cache
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.failure.call_log import CallLog
from weft.symm_mem.workspace import Workspace as HeapWorkspace

gpu_stage = fake_gpu.stage
EPS = 1e-5
KEY = 30, torch.float32, "sum", choose_all_reduce(120, 2)  # of the sum of the products


class Fused(Stage):
    """A call of each op was made before. The sum of all ranks is what this one has."""

    kernel: Any
    product: tuple[torch.Tensor, torch.Tensor]
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def stage(gpu_stage: Fused) -> Fused:
    stage, workspace = gpu_stage, gpu_stage.workspace
    for kind in AROUND_MATMULS:
        del stage.workspaces[kind, STREAM, 0]
    kernel = stage.kernel = Kernel([])
    workspace.prepared[KEY] = kernel
    A, B = torch.randn(3, 2, 4), torch.randn(4, 5)
    x, residual, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    stage.product, stage.norm = (A, B), (x, residual, weight)
    results = [torch.empty_like(x), torch.empty_like(x)]
    stage.remember(kernel, op_names.OP, EPS, stage.norm, results)
    for a in (A, A.flatten(0, 1)):
        run_on_cuda(matmul_all_reduce, stage.where, MatmulAllReduceCall(a, B, "sum", NAME), group=stage.group)
    assert stage.workspace.noted == ["fused_matmul_all_reduce"] * 2, "errors name the op that was called"
    stage.workspace.noted.clear(), kernel.launched.clear()
    return stage


def test_the_matmul_is_summed_where_it_lies(stage: Fused) -> None:
    A, B = stage.product
    for a in (A, A.flatten(0, 1), torch.randn_like(A)):
        for call in (fused_ops.fused_matmul_all_reduce, torch.ops.weft.fused_matmul_all_reduce):
            out = call(a, B, "sum", NAME)
            assert torch.equal(out, a @ B) and out.is_contiguous()
            (launched,) = stage.kernel.launched
            assert launched == (0, [out.data_ptr()], [out.data_ptr()], DEADLINE, STREAM)
            assert plan.last_plan().algorithm == "two_kernels"
            stage.kernel.launched.clear()
    assert stage.workspace.noted == 6 * ["fused_matmul_all_reduce"], "an error names the op that was called"


def test_errors_name_the_line_of_the_matmul(stage: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallLog(lambda: 1.0, replayed=False)
    fault = SimpleNamespace(error=None, written=SimpleNamespace(value=0))
    real: Any = SimpleNamespace(fault=fault, _calls=calls, _is_double_buffered=False)
    monkeypatch.setattr(stage.workspace, "raise_if_broken", partial(HeapWorkspace.raise_if_broken, real))
    for call in (fused_ops.fused_matmul_all_reduce, torch.ops.weft.fused_matmul_all_reduce):
        calls.begins("", None)
        call(*stage.product, "sum", NAME)
        assert calls.op == "fused_matmul_all_reduce" and calls.site is not None
        assert calls.site.startswith(f"{__file__}:"), "where the op is called, neither above nor below"


@pytest.mark.parametrize("error", [RuntimeError("the driver refuses"), KeyboardInterrupt()])
def test_a_launch_behind_the_matmul_that_fails_breaks_the_workspace(
    stage: Fused, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise error

    monkeypatch.setattr(stage.kernel, "launch", refused)
    with pytest.raises(type(error)):
        fused_ops.fused_matmul_all_reduce(*stage.product, "sum", NAME)
    with pytest.raises(symm_mem.WeftError, match="a call was ended by"):
        fused_ops.fused_matmul_all_reduce(*stage.product, "sum", NAME)


def test_a_matmul_that_must_run_in_one_kernel_is_no_matmul_and_sum(stage: Fused) -> None:
    assert fused_ops.fused_matmul_all_reduce(*stage.product, "sum", NAME) is not None
    with plan.forced("fused"):
        assert matmul_all_reduce.fast_matmul_all_reduce(*stage.product, "sum", NAME) is None
    assert matmul_all_reduce.fast_matmul_all_reduce(*stage.product, "sum", NAME) is not None


def test_the_norm_is_launched_as_on_the_slow_path(stage: Fused) -> None:
    given = [t.clone() for t in stage.norm]
    for call in (fused_ops.fused_all_reduce_rms_norm, torch.ops.weft.fused_all_reduce_rms_norm):
        normed, sums = call(*given, EPS, NAME)
        assert normed.shape == sums.shape == given[0].shape and normed.data_ptr() != sums.data_ptr()
        operands, results = [[t.data_ptr() for t in ts] for ts in (given, (normed, sums))]
        assert stage.kernel.launched.pop() == (0, operands, results, DEADLINE, STREAM)
    symm_mem.set_timeout(0.5, NAME)
    fused_ops.fused_all_reduce_rms_norm(*given, EPS, NAME)
    assert stage.kernel.launched.pop()[-2] == 500_000_000


def calls(stage: Fused) -> list[Any]:
    return [
        lambda: fused_ops.fused_matmul_all_reduce(*stage.product, "sum", NAME),
        lambda: fused_ops.fused_all_reduce_rms_norm(*stage.norm, EPS, NAME),
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_they_are_not_taken_after_a_change(stage: Fused, change: str) -> None:
    for call in calls(stage):
        call()
    stage.kernel.launched.clear()
    group = stage.group  # which a program may keep
    with ExitStack() as stack:
        CHANGES[change](stage, stack)
        for call in calls(stage):
            assert_slow(call)
    assert not stage.kernel.launched and group is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", [kind for kind in OTHERS if kind != "nested"])
@pytest.mark.parametrize("position", [0, 1])
def test_other_tensors_take_the_slow_path(stage: Fused, other: str, position: int) -> None:
    product, norm = list(stage.product), list(stage.norm)
    for given in (product, norm):
        given[position] = OTHERS[other](given[position])
    if other != "misaligned":  # which cuBLAS and the all-reduce take
        assert matmul_all_reduce.fast_matmul_all_reduce(*product, "sum", NAME) is None
    call = all_reduce_rms_norm.AllReduceRmsNormCall(*norm, EPS, NAME)
    assert all_reduce_rms_norm.ALL_REDUCE_RMS_NORM.fast(call) is None
    assert not stage.kernel.launched


def test_other_arguments_take_the_slow_path(stage: Fused) -> None:
    with pytest.raises(SLOW, match=TAKEN):
        fused_ops.fused_matmul_all_reduce(*stage.product, "avg", NAME)
    with pytest.raises(SLOW, match=TAKEN):
        fused_ops.fused_all_reduce_rms_norm(*stage.norm, 1e-6, NAME)
    with pytest.raises(TypeError, match="eps: is"):
        fused_ops.fused_all_reduce_rms_norm(*stage.norm, True, NAME)
    with pytest.raises(TypeError, match="must be a tensor"):
        fused_ops.fused_matmul_all_reduce([1.0], stage.product[1], "sum", NAME)
    assert not stage.kernel.launched


def test_true_is_no_eps_where_one_was(stage: Fused) -> None:
    results = [torch.empty_like(stage.norm[0]) for _ in range(2)]
    stage.remember(stage.kernel, op_names.OP, 1.0, stage.norm, results)
    fused_ops.fused_all_reduce_rms_norm(*stage.norm, 1.0, NAME)
    assert len(stage.kernel.launched) == 1
    with pytest.raises(TypeError, match="eps: is"):
        fused_ops.fused_all_reduce_rms_norm(*stage.norm, True, NAME)


def test_what_is_remembered_already_makes_no_end_of_what_was_found(stage: Fused) -> None:
    """A rank's own slow path, for a call that others make for the first time, say."""
    fused_ops.fused_all_reduce_rms_norm(*stage.norm, EPS, NAME)
    results = [torch.empty_like(stage.norm[0]) for _ in range(2)]
    for ran, is_kept in (("push", True), ("one_shot", False)):
        kept = call_cache.cached_calls
        stage.remember(stage.kernel, op_names.OP, EPS, stage.norm, results, ran=ran)
        assert (call_cache.cached_calls is kept) == is_kept


def test_nothing_is_found_in_the_checked_mode(stage: Fused) -> None:
    call = MatmulAllReduceCall(*stage.product, "sum", NAME)
    stage.workspace.prepared = CachedDict({KEY: stage.workspace.prepared[KEY]})  # type: ignore[assignment]
    for checked in (True, False):
        symm_mem.set_checked(checked)
        try:
            run_on_cuda(matmul_all_reduce, stage.where, call, group=stage.group)
            assert (matmul_all_reduce.fast_matmul_all_reduce(*stage.product, "sum", NAME) is None) == checked
        finally:
            symm_mem.set_checked(False)


def test_a_broken_group_is_not_used(stage: Fused) -> None:
    stage.workspace.error = symm_mem.WeftError("a wait has expired")
    for call in calls(stage):
        with pytest.raises(symm_mem.WeftError, match="expired"):
            call()
    assert not stage.kernel.launched


def test_a_layer_norm_is_that_of_the_same_operands(stage: Fused) -> None:
    """Of rows of one dimension a residual, a weight and a bias are alike."""
    row = torch.randn(8)
    given, names = [row.clone() for _ in range(2)], ("residual", "weight", "bias")
    results = [torch.empty_like(row) for _ in range(2)]
    call = all_reduce_rms_norm.AllReduceLayerNormCall(*given, None, None, EPS, NAME)
    known = all_reduce_rms_norm.layer_norm_known_by(call)
    assert known is not None
    stage.remember(stage.kernel, op_names.LAYER_NORM, known[0], given, results)
    for op in (fused_ops.fused_all_reduce_layer_norm, torch.ops.weft.fused_all_reduce_layer_norm):
        normed, sums = op(*given, None, None, EPS, NAME)
        operands, results_ = [[t.data_ptr() for t in ts] for ts in (given, (normed, sums))]
        assert stage.kernel.launched.pop() == (0, operands, results_, DEADLINE, STREAM)
    for there in ("weight", "bias"):
        with pytest.raises(SLOW, match=TAKEN):
            fused_ops.fused_all_reduce_layer_norm(
                row, *(row if n == there else None for n in names), EPS, NAME
            )
    with pytest.raises(SLOW, match=TAKEN):
        fused_ops.fused_all_reduce_layer_norm(*given, None, None, 1e-6, NAME)
    with pytest.raises(SLOW, match=TAKEN):
        fused_ops.fused_all_reduce_rms_norm(row, None, row, EPS, NAME)
    assert not stage.kernel.launched


@pytest.mark.parametrize("scale", [None, torch.ones(1)], ids=["rows", "given"])
def test_a_norm_in_fp8_is_that_of_the_same_arguments(stage: Fused, scale: torch.Tensor | None) -> None:
    x, residual, weight = stage.norm
    given = stage.norm if scale is None else (*stage.norm, scale)
    results = [
        x.to(torch.float8_e4m3fn),
        *([x.new_empty(6, 1)] if scale is None else []),
        torch.empty_like(x),
    ]
    named: Any = {"scale": scale, "scale_op": "divide", "out_dtype": torch.float8_e4m3fn}
    call = AllReduceRmsNormQuantCall(x, residual, weight, EPS, NAME, **named)
    name, _ = all_reduce_rms_norm_quant.quant_known_by(call)
    stage.remember(stage.kernel, op_names.QUANT, name, given, results)
    others: list[Any] = [{"scale_op": "multiply"}, {"weight_offset": 1.0}, {"round_sum": False}]
    others += [{"out_dtype": torch.float8_e5m2}, {"scale": torch.ones(1) if scale is None else None}]
    others += [{"smallest": 0.5}] if scale is None else []
    for call in (fused_ops.fused_all_reduce_rms_norm_quant, torch.ops.weft.fused_all_reduce_rms_norm_quant):
        quantized, scales, sums = call(*stage.norm, EPS, NAME, **named)
        assert (quantized.shape, quantized.dtype, sums.dtype) == (x.shape, torch.float8_e4m3fn, x.dtype)
        written = [quantized, sums] if scale is not None else [quantized, scales, sums]
        operands, addresses = [[t.data_ptr() for t in ts] for ts in (given, written)]
        assert stage.kernel.launched.pop() == (0, operands, addresses, DEADLINE, STREAM)
        for other in others:
            with pytest.raises(SLOW, match=TAKEN):
                call(*stage.norm, EPS, NAME, **(named | other))
    assert not stage.kernel.launched
