"""Any arguments to the ops: the right result, or an error that names the argument; fake tensors say the same."""

from __future__ import annotations

import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from opcommon import BOUND, check
from ranks import run_ranks
from references import exact, norm
from torch.utils._pytree import tree_leaves, tree_map_only
from weft import fused_ops
from weft.fused_ops.dispatch import plan

sys.path.insert(0, str(Path(__file__).parent))
import collective_calls as collectives
import values as v

ENV = {"WEFT_TIMEOUT": "20"}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@st.composite
def all_gather_matmul(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k, dtype = draw(st.integers(0, len(lead))), draw(v.sizes), draw(v.dtypes)
    rows = collectives.RANKS * k if dim == len(lead) else k
    Bs = [
        v.Tensor((rows, draw(v.sizes)), dtype, draw(v.layouts), draw(v.seeds))
        for _ in range(draw(st.integers(1, 3)))
    ]
    dim -= draw(st.sampled_from((0, len(lead) + 1)))
    A = v.Tensor((*lead, k), dtype, draw(v.layouts), draw(v.seeds))
    return [A, Bs, dim, draw(v.groups), draw(st.booleans())]


@st.composite
def matmul_reduce_scatter(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k, n, dtype = draw(st.integers(0, len(lead))), draw(v.sizes), draw(v.sizes), draw(v.dtypes)
    if dim == len(lead):
        n *= collectives.RANKS
    else:
        lead[dim] *= collectives.RANKS
    A = v.Tensor((*lead, k), dtype, draw(v.layouts), draw(v.seeds))
    B = v.Tensor((k, n), dtype, draw(v.layouts), draw(v.seeds))
    out = [*lead, n]
    out[dim] //= collectives.RANKS
    out_dtype = draw(st.sampled_from((None, getattr(torch, dtype), torch.float32)))
    terms = [
        v.Tensor(shape, dtype, draw(v.layouts), draw(v.seeds)) if draw(st.booleans()) else None
        for shape in ((out[-1],), tuple(out))
    ]
    dim -= draw(st.sampled_from((0, len(lead) + 1)))
    return [A, B, draw(st.sampled_from(("sum", "avg"))), dim, draw(v.groups), out_dtype, *terms]


FP8 = "float8_e4m3fn"
_sixteens = st.integers(0, 3).map(lambda i: 16 * i)
_outs_of_fp8 = st.sampled_from((None, torch.bfloat16, torch.float16, torch.float32))
#: Not of a gradient, which is refused (scales are).
_layouts_of_fp8 = st.sampled_from(("contiguous", "transposed", "strided", "offset"))


def _scales(draw: st.DrawFn, shape: tuple[int, ...], columns: list[int]) -> tuple[v.Tensor, list[v.Tensor]]:
    """Tensor-wise or row-wise."""
    if draw(st.booleans()):
        return v.Tensor((), seed=draw(v.seeds)), [v.Tensor((1,), seed=draw(v.seeds)) for _ in columns]
    of_a = v.Tensor((*shape[:-1], 1), "float32", draw(v.layouts), draw(v.seeds))
    return of_a, [v.Tensor((1, n), "float32", draw(v.layouts), draw(v.seeds)) for n in columns]


@st.composite
def all_gather_scaled_matmul(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k = draw(st.integers(0, len(lead))), draw(_sixteens)
    columns = draw(st.lists(_sixteens, min_size=1, max_size=2))
    A = v.Tensor((*lead, k), FP8, draw(_layouts_of_fp8), draw(v.seeds))
    rows = collectives.RANKS * k if dim == len(lead) else k
    Bs = [v.Tensor((rows, n), FP8, "transposed", draw(v.seeds)) for n in columns]
    of_a, of_bs = _scales(draw, A.shape, columns)
    outs = [draw(_outs_of_fp8) for _ in columns]
    dim -= draw(st.sampled_from((0, len(lead) + 1)))
    return [A, Bs, of_a, of_bs, dim, draw(v.groups), None, None, outs, None, draw(st.booleans())]


@st.composite
def scaled_matmul_reduce_scatter(draw: st.DrawFn) -> list[Any]:
    lead = draw(st.lists(v.sizes, min_size=1, max_size=3))
    dim, k, n = draw(st.integers(0, len(lead))), draw(_sixteens), draw(_sixteens)
    if dim < len(lead):
        lead[dim] *= collectives.RANKS
    A = v.Tensor((*lead, k), FP8, draw(_layouts_of_fp8), draw(v.seeds))
    B = v.Tensor((k, n), FP8, "transposed", draw(v.seeds))
    of_a, (of_b,) = _scales(draw, A.shape, [n])
    how = draw(st.sampled_from(("sum", "avg"))), dim, draw(v.groups)
    return [A, B, of_a, of_b, *how, None, draw(_outs_of_fp8), draw(st.booleans())]


@st.composite
def all_reduce_rms_norm(draw: st.DrawFn) -> list[Any]:
    shape, dtype = tuple(draw(st.lists(v.sizes, min_size=1, max_size=3))), draw(v.dtypes)
    dtypes = (dtype, dtype, draw(st.sampled_from((dtype, dtype, "float32"))))
    x, residual, weight = (
        v.Tensor(sizes, of, draw(v.layouts), draw(v.seeds))
        for sizes, of in zip((shape, shape, shape[-1:]), dtypes, strict=True)
    )
    added = residual if draw(st.integers(0, 3)) else None
    kind = [draw(st.sampled_from((0.0, 0.0, 1.0, -0.5))), draw(st.booleans())]
    return [x, added, weight, draw(st.sampled_from((1e-6, 0.1, 1))), draw(v.groups), *kind]


@st.composite
def all_reduce_rms_norm_quant(draw: st.DrawFn) -> list[Any]:
    norm, given = draw(all_reduce_rms_norm()), draw(st.booleans())
    scale = v.Tensor((1,), "float32", draw(v.layouts), draw(v.seeds)) if given else None
    quant = (FLOAT8, ("reciprocal", "divide", "multiply"), (None,) if given else (None, 0.0, 1))
    return [*norm[:5], scale, *(draw(st.sampled_from(each)) for each in quant), *norm[5:]]


@st.composite
def all_reduce_layer_norm(draw: st.DrawFn) -> list[Any]:
    shape, dtype = tuple(draw(st.lists(v.sizes, min_size=1, max_size=3))), draw(v.dtypes)
    columns = draw(st.sampled_from((dtype, "float32")))
    x, *given = (
        v.Tensor(sizes, of, draw(v.layouts), draw(v.seeds))
        for sizes, of in ((shape, dtype), (shape, dtype), (shape[-1:], columns), (shape[-1:], columns))
    )
    optional = [t if draw(st.integers(0, 3)) else None for t in given]
    offset = draw(st.sampled_from((0.0, 0.0, 1.0)))
    return [x, *optional, draw(st.sampled_from((1e-6, 0.1, 1))), draw(v.groups), offset]


@st.composite
def matmul_all_reduce(draw: st.DrawFn) -> list[Any]:
    lead, k, dtype = draw(st.lists(v.sizes, min_size=1, max_size=3)), draw(v.sizes), draw(v.dtypes)
    A = v.Tensor((*lead, k), dtype, draw(v.layouts), draw(v.seeds))
    B = v.Tensor((k, draw(v.sizes)), dtype, draw(v.layouts), draw(v.seeds))
    return [A, B, draw(st.sampled_from(("sum", "avg"))), draw(v.groups)]


CALLS = {
    "fused_all_gather_matmul": all_gather_matmul(),
    "fused_matmul_reduce_scatter": matmul_reduce_scatter(),
    "fused_all_gather_scaled_matmul": all_gather_scaled_matmul(),
    "fused_scaled_matmul_reduce_scatter": scaled_matmul_reduce_scatter(),
    "one_shot_all_reduce": collectives.all_reduce(),
    "one_shot_all_reduce_": collectives.all_reduce(),
    "one_shot_all_gather": collectives.all_gather(),
    "one_shot_reduce_scatter": collectives.reduce_scatter(),
    "one_shot_all_to_all": collectives.all_to_all(),
    "one_shot_gather": collectives.gather(),
    "fused_matmul_all_gather": collectives.matmul_all_gather(),
    "fused_matmul_all_to_all": collectives.matmul_all_to_all(),
    "fused_all_to_all_matmul": collectives.all_to_all_matmul(),
    "fused_all_reduce_rms_norm": all_reduce_rms_norm(),
    "fused_all_reduce_rms_norm_quant": all_reduce_rms_norm_quant(),
    "fused_all_reduce_layer_norm": all_reduce_layer_norm(),
    "fused_matmul_all_reduce": matmul_all_reduce(),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Any]]:
    """An op and arguments that fit, in its order, up to two of which are then exchanged."""
    op = draw(st.sampled_from(sorted(CALLS)))
    args = draw(CALLS[op])
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(args) - 1))
        if isinstance(args[i], v.Group):
            args[i] = draw(v.bad_groups)
        elif isinstance(args[i], list) and args[i] and draw(st.booleans()):
            args[i] = [*args[i][1:], draw(st.one_of(v.bad_tensors, v.junk))]
        else:
            args[i] = draw(st.one_of(v.bad_tensors, v.junk, v.numbers))
    return op, args


def named(op: str, args: list[Any]) -> dict[str, Any]:
    return dict(zip(signature(getattr(fused_ops, op)).parameters, args, strict=True))


def attempt(rank: int, world_size: int, op: str, args: list[Any]) -> tuple[Any, Any]:
    """What the op says to real and to fake tensors. Whatever it says, the next call is right."""
    mine = named(op, v.build(args, rank))
    untouched = plan.Plan("nothing was launched")
    plan.ran(untouched)
    kind, text, got = v.outcome(partial(v.invoke, op, mine))
    launched = plan.last_plan() is not untouched
    every = [named(op, v.build(args, r)) for r in range(world_size)]  # the op may have overwritten its own
    if kind == "fine" and launched:
        compare(op, tensors_of(got), every, rank)
    assert kind == "fine" or not launched, f"{text}: refused after {plan.last_plan()}"
    return (kind, text), v.fake_outcome(partial(v.invoke, op), named(op, v.build(args, rank)))


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Of any dtype: gathers take all."""
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def compare(op: str, results: list[torch.Tensor], every: list[dict[str, Any]], rank: int) -> None:
    plain = tree_map_only(torch.Tensor, torch.Tensor.detach, every)
    mine, wanted = plain[rank], exact(op, plain, rank)
    dtype = tensors_of(mine)[0].dtype
    if "quant" in op:  # its numbers have tests of their own
        results, wanted = results[-1:], wanted[-1:]
    elif "norm" in op:
        # The norm is that of the rounded sums. Of a huge eps nothing is left in the dtype.
        wide = results[1].detach().double()
        if mine["residual"] is not None and not mine.get("round_sum", True):
            total = sum(args["x"].float() for args in plain)
            wide = total.to(dtype).double() + mine["residual"].double()
        wanted[0] = norm(op, mine, wide).to(dtype).double(), []
    for got, (want, parts) in zip(results, wanted, strict=True):
        # fp8 operands have results of 16 bits at least. Of few terms any may be rounded at its worst. All-gathers
        # take other dtypes, too, and round nothing.
        bound = 4 * BOUND.get(torch.bfloat16 if "scaled" in op else dtype, 0.0)
        check(op, got.detach(), want.double(), bound, parts or None)


@v.SETTINGS
@given(calls())
@example(("one_shot_all_gather", [v.Tensor((3, 2), "int32"), 0, v.Group("name"), None, None]))
def test_any_arguments(call: tuple[str, list[Any]]) -> None:
    op, args = call
    v.check_alike(run_ranks(attempt, collectives.RANKS, op, args, env=ENV), named(op, args))
