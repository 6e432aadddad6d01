"""Every torch.library definition of weft: schema, autograd, CPU and CUDA implementations; fakes.py has the fake ones.

The ops stand in ``torch.ops.weft`` with the argument order of ``torch.ops.symm_mem``. The Autograd implementation lies
above the others: the graph pass inserts the ops below autograd, where a call costs one dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ...kernels.all_reduce.host import IN_PLACE
from ...symm_mem.failure.call_log import poison_on_error
from ..dispatch.call_check import begin_call
from ..dispatch.fast_path import needs_no_dispatch
from ..dispatch.tensor_guards import has_tangents
from ..ops import all_gather_matmul as _ag
from ..ops import all_reduce as _ar
from ..ops import all_reduce_rms_norm as _arn
from ..ops import matmul_all_reduce as _mar
from ..ops import matmul_reduce_scatter as _rs
from . import compiled, fakes, validation
from .autograd import (
    AUTOCAST,
    AllGatherMatmulFunction,
    AllReduceFunction,
    AllReduceRmsNormFunction,
    MatmulAllReduceFunction,
    MatmulReduceScatterFunction,
)
from .unsupported import refuse_derivative_in_transform, refuse_unsupported

_lib = torch.library.Library("weft", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_lib.define(
    "fused_all_gather_matmul(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True,"
    " int? group_size=None) -> (Tensor?, Tensor[])",
    tags=_TAGS,
)
_lib.define(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, *,"
    " ScalarType? out_dtype=None, Tensor? bias=None, Tensor? residual=None, int? group_size=None) -> Tensor",
    tags=_TAGS,
)
_lib.define(
    "one_shot_all_reduce(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    tags=_TAGS,
)
_lib.define(
    "fused_all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str group_name, *,"
    " int? group_size=None) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_lib.define(
    "fused_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, *, int? group_size=None)"
    " -> Tensor",
    tags=_TAGS,
)
_lib.define(
    "one_shot_all_reduce_(Tensor(a!) x, str reduce_op, str group_name, *, int? group_size=None) -> ()",
    tags=_TAGS,
)

all_gather_matmul = torch.ops.weft.fused_all_gather_matmul.default
matmul_reduce_scatter = torch.ops.weft.fused_matmul_reduce_scatter.default
all_reduce = torch.ops.weft.one_shot_all_reduce.default
all_reduce_ = torch.ops.weft.one_shot_all_reduce_.default
all_reduce_rms_norm = torch.ops.weft.fused_all_reduce_rms_norm.default
matmul_all_reduce = torch.ops.weft.fused_matmul_all_reduce.default

_VIEWS = DispatchKeySet(DispatchKey.ADInplaceOrView)


def _fresh(run: Callable[..., Any]) -> Callable[..., Any]:
    """Its results are new tensors, like those of torch's own ops. They are views of what kernels write, and as such
    autograd would let nobody change them in place. It takes positional arguments: the op's keywords end in front of it.
    """

    @wraps(run)
    def call(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
            return run(*args)

    return call


def _all_gather_matmul(
    A_shard: Tensor,
    Bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
    group_size: int | None = None,
) -> _ag.Result:
    validation.group_size(group_size, group_name)
    # From compiled graphs: others have been here before, in the Autograd implementation.
    done = _ag.fast_all_gather_matmul(A_shard, Bs, gather_dim, group_name, return_A)
    return done or _all_gather_matmul_anew(A_shard, Bs, gather_dim, group_name, return_A)


@_fresh
@poison_on_error
def _all_gather_matmul_anew(
    A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, return_A: bool
) -> _ag.Result:
    dim, group = validation.validate_all_gather_matmul(A_shard, Bs, gather_dim, group_name)
    given = {"A_shard": A_shard, "Bs": Bs, "gather_dim": dim, "return_A": return_A}
    begin_call(_ag.host.OP, group, A_shard.device, **given)
    return _ag.run_all_gather_matmul(A_shard, Bs, dim, group, return_A)


def _matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    validation.group_size(group_size, group_name)
    args = (A, B, reduce_op, scatter_dim, group_name, out_dtype, bias, residual)
    done = _rs.fast_matmul_reduce_scatter(*args)
    return _matmul_reduce_scatter_anew(*args) if done is None else done


@_fresh
@poison_on_error
def _matmul_reduce_scatter_anew(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    args = (A, B, reduce_op, scatter_dim, group_name, out_dtype, bias, residual)
    dim, group = validation.validate_matmul_reduce_scatter(*args)
    out_dtype = out_dtype or A.dtype
    given = {"A": A, "B": B, "reduce_op": reduce_op, "scatter_dim": dim, "out_dtype": out_dtype}
    begin_call(_rs.host.OP, group, A.device, **given, bias=bias, residual=residual)
    return _rs.run_matmul_reduce_scatter(A, B, reduce_op, dim, group, out_dtype, bias, residual)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None) -> Tensor:
    validation.group_size(group_size, group_name)
    done = _ar.fast_all_reduce(x, reduce_op, group_name)
    return _all_reduce_anew(x, reduce_op, group_name) if done is None else done


@_fresh
@poison_on_error
def _all_reduce_anew(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    group = validation.validate_all_reduce(x, reduce_op, group_name)
    begin_call(_ar.host.OP, group, x.device, x=x, reduce_op=reduce_op)
    return _ar.run_all_reduce(x, reduce_op, group)


def _all_reduce_in_place(
    x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> None:
    validation.group_size(group_size, group_name)
    if _ar.fast_all_reduce(x, reduce_op, group_name, x, IN_PLACE) is None:
        _all_reduce_in_place_anew(x, reduce_op, group_name)


@poison_on_error
def _all_reduce_in_place_anew(x: Tensor, reduce_op: str, group_name: str) -> None:
    group = validation.validate_all_reduce_in_place(x, reduce_op, group_name)
    begin_call(IN_PLACE, group, x.device, x=x, reduce_op=reduce_op)
    if x.is_contiguous():
        _ar.run_all_reduce(x, reduce_op, group, x, op=IN_PLACE)
    else:
        x.copy_(_ar.run_all_reduce(x, reduce_op, group, op=IN_PLACE))
    increment_version(x)  # as in ``again``


def _all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group_name: str,
    *,
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    validation.group_size(group_size, group_name)
    done = _arn.fast_all_reduce_rms_norm(x, residual, weight, eps, group_name)
    return done or _all_reduce_rms_norm_anew(x, residual, weight, eps, group_name)


@_fresh
@poison_on_error
def _all_reduce_rms_norm_anew(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    group = validation.validate_all_reduce_rms_norm(x, residual, weight, eps, group_name)
    begin_call(_arn.host.OP, group, x.device, x=x, residual=residual, weight=weight, eps=eps)
    return _arn.run_all_reduce_rms_norm(x, residual, weight, eps, group)


def _matmul_all_reduce(
    A: Tensor, B: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> Tensor:
    validation.group_size(group_size, group_name)
    done = _mar.fast_matmul_all_reduce(A, B, reduce_op, group_name)
    return _matmul_all_reduce_anew(A, B, reduce_op, group_name) if done is None else done


@_fresh
@poison_on_error
def _matmul_all_reduce_anew(A: Tensor, B: Tensor, reduce_op: str, group_name: str) -> Tensor:
    group = validation.validate_matmul_all_reduce(A, B, reduce_op, group_name)
    begin_call(_mar.host.OP, group, A.device, A=A, B=B, reduce_op=reduce_op)
    return _mar.run_matmul_all_reduce(A, B, reduce_op, group)


def _wants_grad(op: str, *tensors: Tensor) -> bool:
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        wants = True  # there is no forward mode: torch refuses it for an autograd.Function that has none
    if wants:
        refuse_derivative_in_transform(op)
    return wants


def _all_gather_matmul_autograd(
    A_shard: Tensor,
    Bs: list[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
    group_size: int | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    validation.group_size(group_size, group_name)
    if (done := _ag.fast_all_gather_matmul(A_shard, Bs, gather_dim, group_name, return_A)) is not None:
        return done
    if not _wants_grad(_ag.host.OP, A_shard, *Bs):
        if needs_no_dispatch(A_shard, *Bs):
            return _all_gather_matmul_anew(A_shard, Bs, gather_dim, group_name, return_A)
        with torch._C._AutoDispatchBelowAutograd():
            return all_gather_matmul(
                A_shard, Bs, gather_dim, group_name, return_A=return_A, group_size=group_size
            )
    A, *outs = AllGatherMatmulFunction.apply(A_shard, gather_dim, group_name, return_A, group_size, *Bs)
    return (A if return_A else None), outs


def _matmul_reduce_scatter_autograd(
    A: Tensor,
    B: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    validation.group_size(group_size, group_name)
    args = (A, B, reduce_op, scatter_dim, group_name, out_dtype, bias, residual)
    if (done := _rs.fast_matmul_reduce_scatter(*args)) is not None:
        return done
    tensors = [t for t in (A, B, bias, residual) if t is not None]
    if not _wants_grad(_rs.host.OP, *tensors):
        if needs_no_dispatch(*tensors):
            return _matmul_reduce_scatter_anew(*args)
        with torch._C._AutoDispatchBelowAutograd():
            named = {"out_dtype": out_dtype, "bias": bias, "residual": residual}
            return matmul_reduce_scatter(*args[:5], **named, group_size=group_size)
    return MatmulReduceScatterFunction.apply(*args, group_size)


def _all_reduce_autograd(
    x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> Tensor:
    validation.group_size(group_size, group_name)
    if (out := _ar.fast_all_reduce(x, reduce_op, group_name, anything=True)) is not None:
        return out
    if not _wants_grad(_ar.host.OP, x):
        if needs_no_dispatch(x):
            return _all_reduce_anew(x, reduce_op, group_name)
        with torch._C._AutoDispatchBelowAutograd():
            return all_reduce(x, reduce_op, group_name, group_size=group_size)
    if reduce_op in ("max", "min"):
        raise ValueError(
            f"reduce_op: is {reduce_op!r}, must be 'sum' or 'avg' for an x that requires a gradient"
        )
    return AllReduceFunction.apply(x, reduce_op, group_name, group_size)


def _all_reduce_rms_norm_autograd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group_name: str,
    *,
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    validation.group_size(group_size, group_name)
    if not _wants_grad(_arn.host.OP, x, residual, weight):
        with torch._C._AutoDispatchBelowAutograd():
            return all_reduce_rms_norm(x, residual, weight, eps, group_name, group_size=group_size)
    return AllReduceRmsNormFunction.apply(x, residual, weight, eps, group_name, group_size)


def _matmul_all_reduce_autograd(
    A: Tensor, B: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> Tensor:
    validation.group_size(group_size, group_name)
    if not _wants_grad(_mar.host.OP, A, B):
        with torch._C._AutoDispatchBelowAutograd():
            return matmul_all_reduce(A, B, reduce_op, group_name, group_size=group_size)
    return MatmulAllReduceFunction.apply(A, B, reduce_op, group_name, group_size)


def _all_reduce_in_place_autograd(
    x: Tensor, reduce_op: str, group_name: str, *, group_size: int | None = None
) -> None:
    validation.group_size(group_size, group_name)
    if _ar.fast_all_reduce(x, reduce_op, group_name, x, IN_PLACE, anything=True) is not None:
        return None
    if _wants_grad(IN_PLACE, x):
        raise ValueError("x: requires a gradient, must not where it is overwritten; use one_shot_all_reduce")
    if x.is_neg():  # what resolves that below has no way with ops that return nothing
        x.copy_(all_reduce(x, reduce_op, group_name, group_size=group_size))
        return None
    if needs_no_dispatch(x):
        return _all_reduce_in_place_anew(x, reduce_op, group_name)
    with torch._C._AutoDispatchBelowAutograd():
        return all_reduce_(x, reduce_op, group_name, group_size=group_size)


def _below_autocast(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op without autocast: it would cast the products of what runs unfused or between CPU ranks, and no others."""

    def call(*args: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*args, **named)

    return call


for _name, _fake, _real, _autograd in (
    (
        "fused_all_gather_matmul",
        fakes.fake_all_gather_matmul,
        _all_gather_matmul,
        _all_gather_matmul_autograd,
    ),
    (
        "fused_matmul_reduce_scatter",
        fakes.fake_matmul_reduce_scatter,
        _matmul_reduce_scatter,
        _matmul_reduce_scatter_autograd,
    ),
    ("one_shot_all_reduce", fakes.fake_all_reduce, _all_reduce, _all_reduce_autograd),
    (
        "fused_all_reduce_rms_norm",
        fakes.fake_all_reduce_rms_norm,
        _all_reduce_rms_norm,
        _all_reduce_rms_norm_autograd,
    ),
    (
        "fused_matmul_all_reduce",
        fakes.fake_matmul_all_reduce,
        _matmul_all_reduce,
        _matmul_all_reduce_autograd,
    ),
    (
        "one_shot_all_reduce_",
        fakes.fake_all_reduce_in_place,
        _all_reduce_in_place,
        _all_reduce_in_place_autograd,
    ),
):
    torch.library.register_fake(f"weft::{_name}", compiled.known_to_inductor(_fake), lib=_lib)
    compiled.declare_communicating(getattr(torch.ops.weft, _name).default)
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _real, _key)
    _lib.impl(_name, _autograd, "Autograd")
    refuse_unsupported(_lib, _name)
    for _key in ("AutocastCPU", "AutocastCUDA"):
        _lib.impl(_name, _below_autocast(getattr(torch.ops.weft, _name).default), _key)
