"""What arguments must be: checks that several ops and layers share. Each op's own are in its file in ``ops/``.

Sizes may be symbolic: nothing here looks at data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

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


def dimensions(name: str, x: torch.Tensor, ndim: int, *, or_more: bool = False) -> None:
    if x.dim() < ndim or (x.dim() > ndim and not or_more):
        raise ValueError(f"{name}: has {x.dim()} dimensions, must have {ndim}{' or more' * or_more}")


def must_have_shape(name: str, x: torch.Tensor, shape: Sequence[int], why: str) -> None:
    """``why``: what asks for the shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, must have {tuple(shape)}{why}")


def left_operand(name: str, A: torch.Tensor) -> None:
    """Of a product [..., K] @ [K, N]."""
    dimensions(name, A, 2, or_more=True)
    float_dtype(name, A)


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
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name}: is {value}, must be at least -2**63 and below 2**63")


def dimension(name: str, value: Any, tensor_name: str, ndim: int) -> None:
    """``value`` is one of ``ndim`` dimensions, counted from either end."""
    integer(name, value)
    checked_dim(name, value, tensor_name, ndim)


def validate_sizes(**values: Any) -> None:
    for name, value in values.items():
        integer(name, value)
        if not 1 <= value < 1 << 63:
            raise ValueError(f"{name}: is {value}, must be at least 1 and below 2**63")


def flags(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: is {type_text(value)}, must be True or False")


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


def has_dimensions(name: str, x: torch.Tensor) -> None:
    if x.dim() < 1:
        raise ValueError(f"{name}: has no dimension, must have 1 or more")


def real(name: str, x: torch.Tensor) -> None:
    if x.is_complex():
        raise TypeError(f"{name}: is {x.dtype}, must be of real numbers: torch.view_as_real({name})")


def float_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: is {tensor.dtype}, must be float32, bfloat16 or float16")


def checked_dim(name: str, dim: int, tensor_name: str, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name}: is {dim}, must be from {-ndim} to {ndim - 1} for a {ndim}-D {tensor_name}")
    return dim % ndim


def checked_scatter_dim(dim: int, x: torch.Tensor, size: int) -> int:
    """The dimension of x that is cut into a part for each of ``size`` ranks, not negative."""
    dim = checked_dim("scatter_dim", dim, "x", x.dim())
    if x.shape[dim] % size:
        raise ValueError(f"scatter_dim: x has size {x.shape[dim]} there, must be a multiple of {size} ranks")
    return dim


def integers(name: str, values: Any) -> tuple[int, ...]:
    """``values`` as a tuple of integers, each of which may be 0."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: is {type_text(values)}, must be a sequence of integers")
    for i, value in enumerate(values):
        integer(f"{name}[{i}]", value)
        if value < 0:
            raise ValueError(f"{name}[{i}]: is {value}, must be at least 0")
    return tuple(values)


def counts_of_ranks(counts: Sequence[int], group_rank: int | None, group: ProcessGroup) -> None:
    """Sizes along a dimension, one for each rank; and the rank of which a graph has them."""
    size = group.size()
    rank_of_graph(group_rank, group)
    if len(integers("counts", counts)) != size:
        raise ValueError(f"counts: has {len(counts)} sizes, must have {size}, one for each rank")


def rank_of_graph(group_rank: int | None, group: ProcessGroup) -> None:
    if group_rank not in (None, group.rank()):
        raise ValueError(f"group_rank: is {group_rank}, must be {group.rank()}: the graph is another rank's")


def like_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    dtype_like(name, tensor, like, like_name)
    same_device(name, tensor, like, like_name)


def dtype_like(
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
    like_tensor(name, B, like, like_name)


def not_expanded(name: str, x: torch.Tensor) -> None:
    # torch's own in-place functions refuse the same, but only when the sum is about to be copied. Strides first: sizes
    # may be known at run time alone.
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) and x.numel():
        raise ValueError(
            f"{name}: is expanded, must have memory of its own for every element to be overwritten"
        )


def overwritten(name: str, x: torch.Tensor) -> None:
    not_expanded(name, x)
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: is an inference tensor, must be overwritten in inference mode or be a usual one"
        )


def result_tensor(out: torch.Tensor, shape: Sequence[int], x: torch.Tensor) -> None:
    must_have_shape("out", out, shape, " for the result")
    like_tensor("out", out, x, "x")
    overwritten("out", out)
