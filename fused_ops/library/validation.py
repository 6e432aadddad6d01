"""What the ops refuse. Fake and real implementations ask here, so they refuse the same, before anything is launched.

Sizes may be symbolic: nothing here looks at data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from ...symm_mem import resolve_group
from ..ops.calls import (
    AllGatherCall,
    AllGatherMatmulCall,
    AllGatherOutCall,
    AllReduceCall,
    AllReduceLayerNormCall,
    AllReduceRmsNormCall,
    MatmulAllReduceCall,
    MatmulReduceScatterCall,
    ReduceScatterCall,
    ReduceScatterOutCall,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCE_OPS = ("sum", "avg")
ALL_REDUCE_OPS = (*REDUCE_OPS, "max", "min")


def type_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"  # fake ones are of other types
    kind = type(value)  # a numpy.bool is called bool, too
    return f"of type {'numpy.' if kind.__module__ == 'numpy' else ''}{kind.__name__}"


def tensor(name: str, value: Any, ndim: int = 0) -> None:
    """``value`` is a dense tensor of ``ndim`` or more dimensions. What is none would not reach an op's own checks."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: is {type_text(value)}, must be a tensor")
    if isinstance(value, DTensor):
        raise TypeError(f"{name}: is a DTensor, must be what this rank holds of it: its to_local()")
    # Dynamo does not let a backward ask for the layout; what it traces is strided.
    if not torch.compiler.is_compiling():
        if value.layout != torch.strided:
            raise ValueError(f"{name}: has layout {value.layout}, must be strided")
        if value.is_nested:
            raise ValueError(f"{name}: is nested, must be one dense tensor")
        if value.is_quantized:  # none of the ops' implementations would see it
            raise TypeError(f"{name}: is {value.dtype}, must be float32, bfloat16 or float16")
    if value.dim() < ndim:
        raise ValueError(f"{name}: has {value.dim()} dimensions, must have {ndim} or more")


def tensors(name: str, values: Any) -> list[torch.Tensor]:
    """``values`` as a list of dense tensors."""
    if isinstance(values, torch.Tensor) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: is {type_text(values)}, must be a sequence of tensors")
    found = list(values)
    for i, value in enumerate(found):
        tensor(f"{name}[{i}]", value)
    return found


def integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: is {type_text(value)}, must be an integer")


def dimension(name: str, value: Any, tensor_name: str, ndim: int) -> None:
    """``value`` is one of ``ndim`` dimensions, counted from either end."""
    integer(name, value)
    _dim(name, value, tensor_name, ndim)


def validate_sizes(**values: Any) -> None:
    for name, value in values.items():
        integer(name, value)
        if not 1 <= value < 1 << 63:
            raise ValueError(f"{name}: is {value}, must be at least 1 and below 2**63")


def flags(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: is {type_text(value)}, must be True or False")


def validate_factory(device: Any, dtype: Any) -> None:
    """Where parameters may lie, and their dtype; None is torch's default."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype: is {dtype!r}, must be float32, bfloat16 or float16")
    if device is not None and not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: is {device!r}, must be a torch.device or its name")
    try:
        torch.device(device or "cpu")
    except RuntimeError as e:
        raise ValueError(f"device: torch knows none that is called {device!r}") from e


def reduction(reduce_op: Any, allowed: Sequence[str] = REDUCE_OPS) -> str:
    """The operation's name, also of a ``torch.distributed.ReduceOp``."""
    if isinstance(reduce_op, (ReduceOp, ReduceOp.RedOpType)):
        name = _reduce_op_name(reduce_op)
        if name.lower() in allowed:
            return name.lower()
        raise ValueError(f"reduce_op: is ReduceOp.{name}, must be {one_of(allowed)}")
    if not isinstance(reduce_op, str):
        raise TypeError(f"reduce_op: is {type_text(reduce_op)}, must be {one_of(allowed)}")
    if reduce_op not in allowed:
        raise ValueError(f"reduce_op: is {reduce_op!r}, must be {one_of(allowed)}")
    return reduce_op


def _reduce_op_name(reduce_op: Any) -> str:
    if isinstance(reduce_op, ReduceOp.RedOpType):
        return str(reduce_op.name)  # Dynamo of torch 2.11 knows the names, and does not compare
    return next((k for k, v in ReduceOp.RedOpType.__members__.items() if reduce_op == v), "another one")


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: is {type_text(value)}, must be a number")
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{name}: is too large for a float") from None


def one_of(names: Sequence[str]) -> str:
    some = "one of " if len(names) > 2 else ""
    return some + " or ".join([", ".join(map(repr, names[:-1])), repr(names[-1])])


def float_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: is {tensor.dtype}, must be float32, bfloat16 or float16")


def _dim(name: str, dim: int, tensor_name: str, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name}: is {dim}, must be from {-ndim} to {ndim - 1} for a {ndim}-D {tensor_name}")
    return dim % ndim


def _like(name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    _dtype_like(name, tensor, like, like_name)
    same_device(name, tensor, like, like_name)


def _dtype_like(
    name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str, or_else: str = ""
) -> None:
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name}: is {tensor.dtype}, must be {like.dtype} like {like_name}{or_else}")


def same_device(name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name}: lies on {tensor.device}, must lie on {like.device} like {like_name}")


def validate_matrix(name: str, B: torch.Tensor, k: int, like: torch.Tensor, like_name: str) -> None:
    if B.dim() != 2:
        raise ValueError(f"{name}: has {B.dim()} dimensions, must be a matrix [K, N]")
    if B.shape[0] != k:
        shape = tuple(B.shape)
        more = f"; its shape is {shape}: of nn.Linear, whose weight is [out, in], pass weight.t()"
        raise ValueError(
            f"{name}: has {shape[0]} rows, must have {k}, as many as {like_name} has columns"
            f"{more if shape[1] == k else ''}"
        )
    _like(name, B, like, like_name)


def validate_all_gather_matmul(call: AllGatherMatmulCall) -> tuple[AllGatherMatmulCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, A_shard = resolve_group(call.group_name), call.A_shard
    if A_shard.dim() < 2:
        raise ValueError(f"A_shard: has {A_shard.dim()} dimensions, must have 2 or more")
    float_dtype("A_shard", A_shard)
    dim = _dim("gather_dim", call.gather_dim, "A_shard", A_shard.dim())
    if not call.Bs:
        raise ValueError("Bs: is empty, must hold at least one matrix")
    k = A_shard.shape[-1] * (group.size() if dim == A_shard.dim() - 1 else 1)
    for i, B in enumerate(call.Bs):
        validate_matrix(f"Bs[{i}]", B, k, A_shard, "the gathered A")
    return call._replace(gather_dim=dim), group


def validate_matmul_reduce_scatter(
    call: MatmulReduceScatterCall,
) -> tuple[MatmulReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative and the dtype of its result, and the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, A, B = resolve_group(call.group_name), call.A, call.B
    if A.dim() < 2:
        raise ValueError(f"A: has {A.dim()} dimensions, must have 2 or more")
    float_dtype("A", A)
    validate_matrix("B", B, A.shape[-1], A, "A")
    _further_factors(call.more or (), A, B)
    reduction(call.reduce_op)
    if call.out_dtype not in (None, A.dtype, torch.float32):
        raise TypeError(f"out_dtype: is {call.out_dtype}, must be {A.dtype} like A, or float32")
    dim = _dim("scatter_dim", call.scatter_dim, "A", A.dim())
    size = B.shape[1] if dim == A.dim() - 1 else A.shape[dim]
    if size % group.size():
        raise ValueError(
            f"scatter_dim: A @ B has size {size} there, must be a multiple of {group.size()} ranks"
        )
    call = call._replace(scatter_dim=dim, out_dtype=call.out_dtype or A.dtype)
    shape = call.local_shape(group.size())
    if call.bias is not None:
        _added("bias", call.bias, shape[-1:], A)
    if call.residual is not None:
        _added("residual", call.residual, shape, A)
    return call, group


def _further_factors(more: Sequence[torch.Tensor], A: torch.Tensor, B: torch.Tensor) -> None:
    if len(more) % 2:
        raise ValueError(f"more: has {len(more)} tensors, must have an A and a B of each further product")
    for i in range(0, len(more), 2):
        a, b = more[i], more[i + 1]
        if a.shape[:-1] != A.shape[:-1]:
            raise ValueError(
                f"more[{i}]: has shape {tuple(a.shape)}, must have that of A, {tuple(A.shape)}, but for its last size"
            )
        _like(f"more[{i}]", a, A, "A")
        validate_matrix(f"more[{i + 1}]", b, a.shape[-1], A, f"more[{i}]")
        if b.shape[1] != B.shape[1]:
            raise ValueError(f"more[{i + 1}]: has {b.shape[1]} columns, must have {B.shape[1]} like B")


def _added(name: str, tensor: torch.Tensor, shape: Sequence[int], A: torch.Tensor) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name}: has shape {tuple(tensor.shape)}, must have {tuple(shape)} to go with the result"
        )
    _like(name, tensor, A, "A")


def validate_all_reduce(call: AllReduceCall) -> ProcessGroup:
    """The group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group = resolve_group(call.group_name)
    float_dtype("x", call.x)
    reduction(call.reduce_op, ALL_REDUCE_OPS)
    return group


def validate_all_reduce_in_place(call: AllReduceCall) -> ProcessGroup:
    """The group, for an x that is overwritten.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, x = validate_all_reduce(call), call.x
    _overwritten("x", x)
    return group


def _overwritten(name: str, x: torch.Tensor) -> None:
    # torch's own in-place functions refuse the same, but only when the sum is about to be copied. Strides first: sizes
    # may be known at run time alone.
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) and x.numel():
        raise ValueError(
            f"{name}: is expanded, must have memory of its own for every element to be overwritten"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: is an inference tensor, must be overwritten in inference mode or be a usual one"
        )


def _out(out: torch.Tensor, shape: Sequence[int], x: torch.Tensor) -> None:
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out: has shape {tuple(out.shape)}, must have {tuple(shape)} for the result")
    _like("out", out, x, "x")
    _overwritten("out", out)


def validate_all_gather(call: AllGatherCall) -> tuple[AllGatherCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
    if x.is_complex():
        raise TypeError(f"x: is {x.dtype}, must be of real numbers: torch.view_as_real(x)")
    return call._replace(gather_dim=_dim("gather_dim", call.gather_dim, "x", x.dim())), group


def validate_all_gather_out(call: AllGatherOutCall) -> tuple[AllGatherCall, ProcessGroup]:
    """The same, for an ``out`` that the result is written to.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    found, group = validate_all_gather(call.without_out)
    _out(call.out, found.whole_shape(group.size()), call.x)
    return found, group


def validate_reduce_scatter(call: ReduceScatterCall) -> tuple[ReduceScatterCall, ProcessGroup]:
    """The call with a dimension that is not negative, and the group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
    float_dtype("x", x)
    reduction(call.reduce_op, ALL_REDUCE_OPS)
    dim = _dim("scatter_dim", call.scatter_dim, "x", x.dim())
    if x.shape[dim] % group.size():
        raise ValueError(
            f"scatter_dim: x has size {x.shape[dim]} there, must be a multiple of {group.size()} ranks"
        )
    return call._replace(scatter_dim=dim), group


def validate_reduce_scatter_out(call: ReduceScatterOutCall) -> tuple[ReduceScatterCall, ProcessGroup]:
    """The same, for an ``out`` that the result is written to.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    found, group = validate_reduce_scatter(call.without_out)
    _out(call.out, found.part_shape(group.size()), call.x)
    return found, group


def validate_all_reduce_norm(call: AllReduceRmsNormCall | AllReduceLayerNormCall) -> ProcessGroup:
    """The group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, x = resolve_group(call.group_name), call.x
    if x.dim() < 1:
        raise ValueError("x: has no dimension, must have 1 or more")
    float_dtype("x", x)
    weight, bias = call.affine
    for name, tensor in (("residual", call.residual), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        shape = x.shape if name == "residual" else x.shape[-1:]
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: has shape {tuple(tensor.shape)}, must have {tuple(shape)} to go with x"
            )
        if name == "bias" and weight is not None:
            _dtype_like(name, tensor, weight, "weight")
        elif name == "residual" or tensor.dtype != torch.float32:
            _dtype_like(
                name, tensor, x, "x", " or torch.float32" * (name != "residual" and x.dtype.itemsize == 2)
            )
        same_device(name, tensor, x, "x")
    if not call.eps >= 0:
        raise ValueError(f"eps: is {call.eps!r}, must be 0 or more")
    if not abs(call.weight_offset) <= torch.finfo(torch.float32).max:
        raise ValueError(f"weight_offset: is {call.weight_offset!r}, must be finite in float32")
    if weight is None and call.weight_offset != 0:
        raise ValueError(f"weight_offset: is {call.weight_offset!r}, must be 0 where there is no weight")
    return group


def validate_matmul_all_reduce(call: MatmulAllReduceCall) -> ProcessGroup:
    """The group.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what it must be.
    """
    group, A = resolve_group(call.group_name), call.A
    if A.dim() < 2:
        raise ValueError(f"A: has {A.dim()} dimensions, must have 2 or more")
    float_dtype("A", A)
    validate_matrix("B", call.B, A.shape[-1], A, "A")
    reduction(call.reduce_op)
    return group
