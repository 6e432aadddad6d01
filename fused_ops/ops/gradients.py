"""Gradients of ops, and why some have none; what their backwards have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from ...symm_mem import resolve_group
from ..dispatch.choice import Choice
from ..dispatch.tensor_guards import has_tangents

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_BATCH: Any = torch._C._parse_dispatch_key("Batched")  # of is_grads_batched; torch.func.vmap has another one
_BATCHES = DispatchKeySet(_BATCH) | DispatchKeySet(DispatchKey.FuncTorchBatched)
_collectives = torch.ops._c10d_functional


class OneTensorFunction(torch.autograd.Function):
    """A call of an op of one tensor, its first argument. ``gradient``: that of the tensor, of the result's gradient and
    the other arguments."""

    @staticmethod
    def forward(ctx: Any, op: Any, gradient: Callable[..., Tensor], call: Any, x: Tensor) -> Any:
        if (reduce_op := getattr(call, "reduce_op", "sum")) in ("max", "min"):
            raise ValueError(
                f"reduce_op: is {reduce_op!r}, must be 'sum' or 'avg' for an x that requires a gradient"
            )
        ctx.gradient, ctx.arguments = gradient, call[1:]
        return op.run_below_autograd(call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, ctx.gradient(grad, *ctx.arguments)


class ProductFunction(torch.autograd.Function):
    """A call of an op of A and B, its first arguments, whose result is one tensor.

    ``gradients``: those of A and B, of the result's gradient, A and B as they are needed for each other's, whether B
    lay transposed, and the other arguments.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, gradients: Callable[..., Any], call: Any, A: Tensor, B: Tensor) -> Tensor:
        *_, of_A, of_B = ctx.needs_input_grad
        done: Tensor = op.run_below_autograd(call)
        ctx.gradients, ctx.how = gradients, (is_transposed_matrix(B), *call[2:])
        ctx.save_for_backward(A if of_B else None, B if of_A else None)
        return done

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, *ctx.gradients(grad, *ctx.saved_tensors, *ctx.how)


def gradients_of_factors(
    grad: Tensor, A: Tensor | None, B: Tensor | None, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Those of A and B in ``A @ B``, of which the other one is given."""
    of_A = None if B is None else matmul_without_autocast(grad, B.t())
    return of_A, None if A is None else gradient_of_matrix(A, grad, transposed)


def refuse_gradient(validate: Callable[[Any], object], call: Any, why: str) -> NoReturn:
    """Name what else is wrong with the call, else the first argument that requires a gradient; a tangent is torch's to
    refuse."""
    validate(call)
    for argument in call._fields:
        given = getattr(call, argument)
        several = isinstance(given, list | tuple)
        for i, tensor in enumerate(given if several else [given]):
            if isinstance(tensor, Tensor) and (tensor.requires_grad or has_tangents()):
                name = f"{argument}[{i}]" if several else argument
                raise ValueError(f"{name}: requires a gradient, must not{why}")
    raise AssertionError("no argument requires a gradient")


def refuse_second_gradient(op: str) -> None:
    """By a backward whose own derivative is asked for, too."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: has no second gradient, must have its first one without create_graph=True"
        )


def refuse_batch(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: has no rule for vmap (nor for is_grads_batched); call it once with the batch as a dimension of its "
        "tensors, or once for each element on all ranks"
    )


def matmul_without_autocast(x: Tensor, y: Tensor) -> Tensor:
    """As the ops, which cast nothing where autocast is on."""
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return x @ y


def product_beside(choice: Choice, A: Tensor, B: Tensor) -> Tensor:
    """``A @ B`` next to a collective. Between CPU ranks as kernels make it: torch's own may add up in 16 bits."""
    if choice.algorithm == "host":
        return (A.float() @ B.float()).to(A.dtype)
    return matmul_without_autocast(A, B)


def flat_rows(t: Tensor) -> Tensor:
    # Not flatten, which ``is_grads_batched`` of torch.autograd.grad has no rule for.
    return t if t.dim() == 2 else t.reshape(t.shape[:-1].numel(), t.shape[-1])


def is_transposed_matrix(B: Tensor) -> bool:
    """Of what an op has taken for a matrix: it refuses other shapes."""
    return B.stride(0) == 1 and B.stride(1) == B.shape[0]


def gradient_of_matrix(A: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """That of B in ``A @ B``. It lies as B does, a weight's as the weight: else torch copies it to where it counts.

    A, grad: [..., K] and [..., N], of all rows.
    """
    x, g = flat_rows(A), flat_rows(grad)
    return matmul_without_autocast(g.t(), x).t() if transposed else matmul_without_autocast(x.t(), g)


def reduce_scatter(grad: Tensor, dim: int, group_name: str, counts: Sequence[int] | None = None) -> Tensor:
    """Functional, so that it can be traced."""
    _refuse_batched(grad)
    if counts is not None:
        total = _collectives.wait_tensor(_collectives.all_reduce(grad.contiguous(), "sum", group_name))
        return total.split([*counts], dim)[resolve_group(group_name).rank()].clone()
    moved, size = grad.movedim(dim, 0).contiguous(), resolve_group(group_name).size()
    part = _collectives.reduce_scatter_tensor(moved, "sum", size, group_name)
    return _collectives.wait_tensor(part).movedim(0, dim)


def all_gather(x: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """The same, of ``size`` ranks."""
    _refuse_batched(x)
    whole = _collectives.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), size, group_name)
    return _collectives.wait_tensor(whole).movedim(0, dim)


def _refuse_batched(x: Tensor) -> None:
    # torch's own loop over a batch copies what has not been waited for.
    if not torch.compiler.is_compiling() and (torch._C._dispatch_keys(x) & _BATCHES).raw_repr():
        refuse_batch("a gradient's collective")


class SumGradient(torch.autograd.Function):
    """Before what every rank uses for a part of the result: each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Tensor:
        ctx.group = group_name, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumOverRanks.apply(grad, *ctx.group), None, None


class SumOverRanks(torch.autograd.Function):
    """Sums what the ranks hold. All of them use the sum alike: its gradient is already whole on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int | None) -> Any:
        ctx.group = group_name, size
        return torch.ops.weft.one_shot_all_reduce(x, "sum", group_name, group_size=size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumGradient.apply(grad, *ctx.group), None, None
