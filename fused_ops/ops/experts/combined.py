"""What ops of experts' outputs have in common: what is put together and reduced, what is refused, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.device.collective.combine import Combined
from ....symm_mem import resolve_group
from ... import validation
from ..gradients import refuse_second_gradient
from ..op import Op

_ops = torch.ops.weft


class Reduction(NamedTuple):
    """What ends an op. ``scatter_dim``: of an all-reduce None, of a call that is validated not negative."""

    reduce_op: str
    scatter_dim: int | None
    group_name: str
    group_size: int | None

    def checked(self, call: Any, combined: Combined, group: ProcessGroup) -> Any:
        """The call with a dimension that is not negative, if it has one."""
        if self.scatter_dim is None:
            return call
        dim = validation.checked_dim("scatter_dim", self.scatter_dim, "result", 2)
        if (size := combined.result_shape[dim]) % group.size():
            raise ValueError(
                f"scatter_dim: what is scattered has size {size} there, must be a multiple of {group.size()} ranks"
            )
        return call._replace(scatter_dim=dim)

    def result_shape(self, combined: Combined, world_size: int) -> list[int]:
        shape, dim = list(combined.result_shape), self.scatter_dim
        if dim is not None:
            shape[dim] = shape[dim] // world_size
        return shape

    def gradient(self, grad: Tensor) -> Tensor:
        """That of what each rank gives, of those of all ranks' results."""
        name, size = self.group_name, self.group_size
        if self.scatter_dim is None:
            found: Tensor = _ops.one_shot_all_reduce(grad, self.reduce_op, name, group_size=size)
        else:
            grad = grad / resolve_group(name).size() if self.reduce_op == "avg" else grad
            found = _ops.one_shot_all_gather(grad, self.scatter_dim, name, group_size=size)
        return found


def combined_of(call: Any) -> Combined:
    return Combined(call.y, call.slots, call.weights, call.shared)


def how_reduced(call: Any) -> Reduction:
    """Of a call that does not say it a sum, for all ranks."""
    reduce_op, dim = getattr(call, "reduce_op", "sum"), getattr(call, "scatter_dim", None)
    return Reduction(reduce_op, dim, call.group_name, call.group_size)


def validate_combined(combined: Combined, like_name: str = "y") -> None:
    """``like_name``: the argument that has the dtype and the device of y."""
    y, slots, weights, shared = combined
    for name, tensor in (("y", y), ("slots", slots)):
        validation.dimensions(name, tensor, 2)
    validation.float_dtype("y", y)
    if slots.dtype != torch.int32:
        raise TypeError(f"slots: is {slots.dtype}, must be torch.int32")
    if slots.shape[1] == 0:
        raise ValueError(f"slots: has shape {tuple(slots.shape)}, must have a column for each choice")
    validation.must_have_shape("weights", weights, slots.shape, " like slots")
    if weights.dtype != torch.float32:
        validation.dtype_like("weights", weights, y, like_name, " or torch.float32" * (y.dtype.itemsize == 2))
    for name, tensor in (("slots", slots), ("weights", weights)):
        validation.same_device(name, tensor, y, like_name)
    if shared is not None:
        shape = slots.shape[0], y.shape[1]
        validation.must_have_shape("shared", shared, shape, ": a row of the sum for each token")
        validation.like_tensor("shared", shared, y, like_name)


def save_combined(ctx: Any, call: Any, wanted: Sequence[bool], *more: Tensor | None) -> None:
    """What ``combined_gradients`` needs, of those of y, weights and shared that are wanted."""
    y = call.y if wanted[1] else call.y.new_empty(()).expand(call.y.shape)
    ctx.save_for_backward(y, call.slots, call.weights, *more)


def combined_gradients(saved: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Of y, weights and shared, of the gradient of what this rank gives."""
    y, slots, weights = saved
    return Combined(y, slots, weights, None).gradients(grad, wanted)


class CombineFunction(torch.autograd.Function):
    """An op's call, of which there is a ``Reduction``."""

    @staticmethod
    def forward(ctx: Any, op: Op, call: Any, y: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        ctx.op, ctx.reduction = op.name, how_reduced(call)
        save_combined(ctx, call, ctx.needs_input_grad[2:])
        done: Tensor = op.run_below_autograd(call)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_gradient(ctx.op)
        whole = ctx.reduction.gradient(grad)
        return None, None, *combined_gradients(ctx.saved_tensors, whole, ctx.needs_input_grad[2:])
