"""Plans that are asked for without a call: those that the call has, by one rank alone; of GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from opcommon import meet
from ranks import run_ranks
from torch._subclasses import FakeTensorMode
from weft import fused_ops
from weft.fused_ops import last_plan, plan
from weft.fused_ops.dispatch.choice import choice_of_call
from weft.fused_ops.dispatch.plan import Plan, forced
from weft.fused_ops.dispatch.profitability import FusionCandidate, predicted_us
from weft.kernels.all_gather_matmul import configs
from weft.kernels.all_reduce_rms_norm.configs import estimate_all_reduce_rms_norm_us
from weft.kernels.matmul_reduce_scatter import on_cuda

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls(size: int, dtype: torch.dtype, m: int, k: int, n: int) -> list[Call]:
    """Of every op; tensors on the meta device."""

    def x(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    one = x(1, dtype=torch.float32)
    of_columns = x(n, k, dtype=FP8).t()
    sums: list[Call] = [(name, (x(m, k), "sum", None), {}) for name in ("one_shot_all_reduce",)]
    return [
        ("fused_all_gather_matmul", (x(m, k), [x(k, n)], 0, None), {"return_A": False}),
        ("fused_matmul_reduce_scatter", (x(m * size, k), x(k, n), "sum", 0, None), {"residual": x(m, n)}),
        (
            "fused_all_gather_scaled_matmul",
            (x(m, k, dtype=FP8), [of_columns], one, [one], 0, None),
            {"out_dtypes": [dtype], "return_A": False},
        ),
        (
            "fused_scaled_matmul_reduce_scatter",
            (x(m * size, k, dtype=FP8), of_columns, one, one, "sum", 0, None),
            {"out_dtype": dtype},
        ),
        ("fused_matmul_all_reduce", (x(m, k), x(k, n), "sum", None), {}),
        *sums,
        ("one_shot_all_reduce_", (x(m, k), "sum", None), {}),
        ("one_shot_all_gather", (x(m, k), 1, None), {}),
        ("one_shot_reduce_scatter", (x(m * size, k), "sum", 0, None), {}),
        ("one_shot_all_to_all", (x(m * size, k), 0, 1, None), {}),
        ("one_shot_gather", (x(m, k), 1, 0, None), {}),
        ("fused_matmul_all_to_all", (x(m, k), x(k, n * size), 0, None), {}),
        ("fused_matmul_all_gather", (x(m, k), x(k, n), None), {}),
        ("fused_all_to_all_matmul", (x(m * size, k), x(k * size, n), 0, None), {}),
        ("moe_dispatch", (x(m, k), x(m, 2, dtype=torch.int64), size, None), {"capacity": 2 * size * m}),
        ("fused_all_reduce_rms_norm", (x(m, k), x(m, k), x(k), 1e-5, None), {}),
        ("fused_all_reduce_rms_norm_quant", (x(m, k), x(m, k), x(k), 1e-5, None), {}),
        ("fused_all_reduce_layer_norm", (x(m, k), x(m, k), x(k), x(k), 1e-5, None), {}),
    ]


def made(call: Call) -> Plan:
    """The plan of the call with numbers."""
    name, args, named = call

    def real(value: Any) -> Any:
        if isinstance(value, list):
            return [real(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.ones(value.shape).to(value.dtype).as_strided(value.shape, value.stride())

    getattr(fused_ops, name)(*map(real, args), **{key: real(value) for key, value in named.items()})
    return last_plan()


def asked_by_one(rank: int, size: int) -> None:
    """The other rank does nothing: a word to it would not be answered."""
    every = calls(size, torch.float32, 16, 32, 48)
    if rank == 0:
        before = last_plan()
        found = [plan(getattr(fused_ops, name), *args, **named) for name, args, named in every]
        with forced("unfused"):
            assert plan(fused_ops.one_shot_all_reduce, torch.ones(3), "sum", None).algorithm == "unfused"
        assert last_plan() is before
        assert {each.algorithm for each in found} == {"host"}, found
    meet()
    for i, call in enumerate(every):
        ran = made(call)
        if rank == 0:
            # A workspace is that of several ops: it may be larger by now.
            assert found[i].algorithm == ran.algorithm and 0 < found[i].workspace_bytes <= ran.workspace_bytes
        if rank == 0 and i == 0:
            assert found[i] == ran
    empty = torch.empty(0, 32)
    assert plan(fused_ops.one_shot_all_reduce, empty, "sum", None).reason == "there is nothing to send"


def test_one_rank_asks() -> None:
    run_ranks(asked_by_one, 2, fresh=True)


def on_gpu(call: Call) -> Call:
    """On a GPU that need not be there."""
    name, args, named = call
    with FakeTensorMode() as mode:

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

        assert mode is not None
        return name, tuple(map(moved, args)), {key: moved(value) for key, value in named.items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU that is there there is more to say")
def test_gpus_that_are_not_there(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")  # moe_dispatch was run on no GPU
    for call in map(on_gpu, calls(2, BF16, 2048, 4096, 3072)):
        name, args, named = call
        found = plan(getattr(fused_ops, name), *args, **named)
        ways = {"fused_matmul_all_gather": "one_shot", "fused_matmul_all_reduce": found.algorithm}
        assert found.algorithm == ways.get(name, "push") != "unfused", (name, found)
        assert found.workspace_bytes > 0
        assert found.predicted_us is not None and found.predicted_us > 3, (name, found)
    gather = on_gpu(calls(2, BF16, 2048, 4096, 3072)[0])
    found = plan(fused_ops.fused_all_gather_matmul, *gather[1], **gather[2])
    problem = configs.AllGatherMatmulProblem(2048, (3072,), 4096, 2, 132)
    us, config = configs.rank_gather_kernels(problem)[0]
    assert found.predicted_us == us
    assert isinstance(config, configs.GatherPushConfig)
    assert found.workspace_bytes >= configs.gather_push_layout(2048, 4096, 2, config).bytes
    name, args, named = on_gpu(calls(2, torch.float32, 1, 3, 5)[1])
    assert plan(fused_ops.fused_matmul_reduce_scatter, *args, **named).algorithm == "unfused"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU that is there there is more to say")
@pytest.mark.parametrize("m", [2, 64, 8192])
def test_the_pass_predicts_what_the_plan_says(two: str, m: int) -> None:
    """Of ops whose problem the pass describes by sizes; of a product and an all-reduce each of its three ways."""
    k, n = 4096, 3072
    problems = {
        "fused_all_gather_matmul": ("all_gather_matmul", 2 * m, n, k),
        "fused_matmul_reduce_scatter": ("matmul_reduce_scatter", 2 * m, n, k),
        "fused_matmul_all_reduce": ("matmul_all_reduce", m, n, k),
        "one_shot_all_reduce": ("all_reduce", m, k, 0),
        "one_shot_all_gather": ("all_gather", m, 2 * k, 0),
        "one_shot_reduce_scatter": ("reduce_scatter", 2 * m, k, 0),
        "one_shot_all_to_all": ("all_to_all", 2 * m, k, 0),
    }
    for call in map(on_gpu, calls(2, BF16, m, k, n)):
        name, args, named = call
        if name not in problems and "norm" not in name:
            continue
        found = plan(getattr(fused_ops, name), *args, **named)
        if "norm" in name:
            assert found.predicted_us == estimate_all_reduce_rms_norm_us(m, k // 8, 2)
            continue
        op, *sizes = problems[name]
        assert predicted_us(FusionCandidate(op, *sizes, 2, BF16, "cuda")) == found.predicted_us, name
        assert predicted_us(FusionCandidate(op, *sizes, 2, BF16, "cpu")) is None
        if op == "matmul_all_reduce":
            assert found.algorithm == {2: "one_shot", 64: "two_kernels", 8192: "push"}[m]
    with FakeTensorMode():
        A, B = lying("in rows", m, k, torch.float32), lying("in rows", k, n, torch.float32)
        found = plan(fused_ops.fused_matmul_all_reduce, A, B, "sum", two)
    assert (found.algorithm, found.predicted_us) == ("two_kernels", None)
    assert predicted_us(FusionCandidate("matmul_all_reduce", m, n, k, 2, torch.float32, "cuda")) is None


def lying(how: str, rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A matrix on a GPU that need not be there."""
    distance = columns + {"of a wider one": 8, "at odd distances": 1}.get(how, 0)
    strides = (1, rows) if how == "in columns" else (distance, 1)
    return torch.empty_strided((rows, columns), strides, device="cuda", dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU that is there there is more to say")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("how", ["in rows", "in columns", "of a wider one", "at odd distances"])
def test_ranks_choose_alike_however_their_tensors_lie(two: str, how: str, dtype: torch.dtype) -> None:
    def planned(a: str, b: str) -> list[str]:
        with FakeTensorMode():
            A, few = lying(a, 2048, 1024, dtype), lying(a, 32, 1024, dtype)
            B, last = lying(b, 1024, 2048, dtype), lying(b, 2048, 512, dtype)
            rows = lying("in rows", 1024, 2048, dtype)
            found = [
                plan(fused_ops.fused_matmul_reduce_scatter, A, B, "sum", 0, two),
                plan(fused_ops.fused_matmul_reduce_scatter, A, B, "sum", 1, two),
                plan(fused_ops.fused_all_gather_matmul, A, [B], 0, two),
                plan(fused_ops.fused_all_gather_matmul, A, [B, rows], 0, two),
                plan(fused_ops.fused_all_gather_matmul, A, [last], 1, two),
                plan(fused_ops.fused_matmul_all_reduce, A, B, "sum", two),
                plan(fused_ops.fused_matmul_all_reduce, few, B, "sum", two),
            ]
        return [each.algorithm for each in found]

    with forced("fused"):
        alike = planned("in rows", "in rows")
        assert dtype != BF16 or "unfused" not in alike
        assert planned(how, "in rows") == planned("in rows", how) == planned(how, how) == alike


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU that is there there is more to say")
@pytest.mark.parametrize("m", [8, 64, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_each_call_says_which_programs_it_launches(two: str, dtype: torch.dtype, m: int) -> None:
    with FakeTensorMode():
        x = torch.empty(1024, 4096, device="cuda", dtype=dtype)
    started = [
        (torch.ops.weft.all_gather_start, (x, "0"), {"placed": True}),
        (torch.ops.weft.reduce_scatter_start, (x, "sum", "0"), {}),
    ]
    made = [
        (getattr(fused_ops, name), *given) for name, *given in map(on_gpu, calls(2, dtype, m, 4096, 3072))
    ]
    folders = {
        "fused_all_gather_scaled_matmul": "all_gather_matmul",
        "fused_scaled_matmul_reduce_scatter": "matmul_reduce_scatter",
        "fused_all_reduce_rms_norm_quant": "all_reduce_rms_norm",
        "fused_all_reduce_layer_norm": "all_reduce_rms_norm",
        "fused_matmul_all_to_all": "matmul_reduce_scatter",
        "fused_all_to_all_matmul": "all_gather_matmul",
        "fused_matmul_all_gather": "all_gather",
    }
    for op, args, named in [*made, *started]:
        planned, choice = choice_of_call(op, args, named)
        programs = [*choice.programs()]
        assert planned == plan(op, *args, **named)
        assert bool(programs) == (planned.algorithm != "unfused"), (op, planned, programs)
        name = str(getattr(op, "__name__", op))
        word = folders.get(name, name.removeprefix("fused_").removeprefix("one_shot_").rstrip("_"))
        if planned.algorithm == "copy_engine":
            word = "acquire"
        if planned.algorithm == "one_shot" and "all_to_all" in name:
            word = "all_to_all"
        if programs and "start" not in name and "matmul_all_reduce" not in name:
            assert any(word in str(program) for program in programs), (word, programs)
    assert fused_ops.one_shot_all_reduce(torch.ones(3, device="meta"), "sum", None).shape == (3,)


def refuse(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU that is there there is more to say")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("m", [64, 16384])
def test_products_around_all_to_alls(two: str, dtype: torch.dtype, m: int) -> None:
    """Their choices are their own, whichever op of such operands was asked for before; their runs have two forms."""
    with FakeTensorMode():
        x, w = (torch.empty(*shape, dtype=dtype, device="cuda") for shape in ((m, 2048), (2048, 4096)))
        wide = torch.empty(4096, 4096, dtype=dtype, device="cuda")

    def asked(*ops: str) -> dict[str, tuple[str, str]]:
        on_cuda.choose_scatter_kernel.clear()
        given = {
            "fused_matmul_reduce_scatter": (x, w, "sum", 1, None),
            "fused_matmul_all_to_all": (x, w, 0, None),
        }
        found = {op: plan(getattr(fused_ops, op), *given[op]) for op in ops}
        return {op: (each.algorithm, each.reason) for op, each in found.items()}

    both = "fused_matmul_reduce_scatter", "fused_matmul_all_to_all"
    assert asked(*both) == asked(*both[::-1])
    for way in ("copy_engine", "fused", None):
        with forced(way) if way else nullcontext():
            to, back = (
                plan(fused_ops.fused_matmul_all_to_all, x, w, 0, None),
                plan(fused_ops.fused_all_to_all_matmul, x, wide, 0, None),
            )
            assert {to.algorithm, back.algorithm} <= {"push", "one_shot", "unfused"}, (way, to, back)


def test_what_is_refused(two: str) -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    refuse(lambda: plan(fused_ops.fused_all_gather_matmul, x, [w], 5, None), ValueError, "^gather_dim: is 5")
    refuse(lambda: plan("fused_all_gather_matmul", x), TypeError, "^op: is of type str")  # type: ignore[arg-type]
    refuse(lambda: plan(torch.add, x, x), TypeError, "^op: add has no plan")
    # And the thread makes calls again.
    assert fused_ops.one_shot_all_reduce(x.to("meta"), "sum", None).shape == x.shape


def asked_on_gpus(rank: int, size: int) -> None:
    """What GPUs do is what was said before, of operands that lie as kernels take them."""
    for m in (64, 2048):
        for call in calls(size, BF16, m, 4096, 3072):
            name, args, named = on_gpu(call)
            found = plan(getattr(fused_ops, name), *args, **named)
            ran = made(call)
            assert (found.algorithm, found.predicted_us) == (ran.algorithm, ran.predicted_us), (
                name,
                found,
                ran,
            )
            assert found.workspace_bytes <= ran.workspace_bytes


@pytest.mark.gpu
def test_gpus_do_as_planned() -> None:
    run_ranks(asked_on_gpus, 2, device="cuda", fresh=True)
