"""What of torch the ops do not support, in words of their own: vmap, torch.func's derivatives, DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from ..ops.gradients import refuse_batch


def refuse_unsupported(lib: torch.library.Library, op: str) -> None:
    """Register what says so, for an op of weft that ``lib`` defines."""
    torch.library.register_torch_dispatch(f"weft::{op}", DTensor, _refuse_dtensor(op), lib=lib)
    # Of torch.func.vmap, and of is_grads_batched.
    for key in ("FuncTorchBatched", "Batched"):
        lib.impl(op, _refuse_batch(op), key)


def refuse_derivative_in_transform(op: str) -> None:
    """To be asked where a derivative is wanted.

    Raises:
        NotImplementedError: one of torch.func's transforms wants it.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{op}: has no derivative inside of torch.func's transforms; use backward or torch.autograd.grad"
        )


def refuse_transform(name: str) -> None:
    """By what is made of torch.autograd.Functions, before torch asks the caller to change these."""
    if not torch.compiler.is_compiling():
        refuse_derivative_in_transform(name)


def _refuse_dtensor(op: str) -> Callable[..., NoReturn]:
    def call(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        raise TypeError(f"{op}: is given a DTensor, must be given what this rank holds of it: its to_local()")

    return call


def _refuse_batch(op: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **named: Any) -> NoReturn:
        refuse_batch(op)

    return call
