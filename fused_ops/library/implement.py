"""What is told torch.library of every op that communicates, and what of torch the ops do not support, in words of their
own: vmap, torch.func's derivatives, DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from ..ops.gradients import refuse_batch
from . import compiled, schema


def implement(op: OpOverload, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """``run`` on CPU and CUDA, ``fake`` where only shapes are asked for."""
    torch.library.register_fake(op, compiled.known_to_inductor(fake), lib=schema.lib)
    compiled.declare_communicating(op)
    for key in ("CPU", "CUDA"):
        schema.lib.impl(op, run, key)
    refuse_unsupported(op._schema.name.split("::")[1])


def refuse_unsupported(op: str) -> None:
    """Register what says so, for an op of weft."""

    def refuse_dtensor(*_: Any) -> NoReturn:
        raise TypeError(f"{op}: is given a DTensor, must be given what this rank holds of it: its to_local()")

    def refuse_batched(*_: Any, **__: Any) -> NoReturn:
        refuse_batch(op)

    torch.library.register_torch_dispatch(f"weft::{op}", DTensor, refuse_dtensor, lib=schema.lib)
    # Of torch.func.vmap, and of is_grads_batched.
    for key in ("FuncTorchBatched", "Batched"):
        schema.lib.impl(op, refuse_batched, key)


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
