"""The registration of the ops of registered tensors in torch.library; their schemas are elsewhere.

They are calls of the handles that ``symm_mem.register`` gives, which are found by ``x``, this rank's tensor. So what a
graph makes for itself, and a copy that a compiler makes of ``x``, is refused: nobody knows it for a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from ...symm_mem import RegisteredTensor, batch_put, batch_signal, batch_wait
from ...symm_mem.registration.registered import registered_as
from ..library import group_checks, schema
from ..library.communicating import OF_REGISTERED
from ..library.implement import implement
from ..library.unsupported import refuse_derivative_in_transform
from .refusals import refuse_gradients, refuse_transfer


def _handle(x: Tensor, group_name: str, name: str = "x") -> RegisteredTensor:
    found = registered_as(x, group_name)
    if found is None:
        raise ValueError(
            f"{name}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)} is not registered in group {group_name!r}, "
            "must be a tensor that symm_mem.register was given and whose RegisteredTensor is kept. What a compiled "
            "graph makes, or copies (as backend='aot_eager' does), cannot be"
        )
    return found


def _handles(xs: Sequence[Tensor], group_name: str) -> list[RegisteredTensor]:
    return [_handle(x, group_name, f"xs[{i}]") for i, x in enumerate(xs)]


def _signal(x: Tensor, peer: int, group_name: str) -> None:
    _handle(x, group_name).signal(peer)


def _wait(x: Tensor, peer: int, group_name: str) -> None:
    _handle(x, group_name).wait(peer)
    increment_version(x)


def _put(x: Tensor, source: Tensor, peer: int, group_name: str) -> None:
    _handle(x, group_name).put(source, peer)


def _get(x: Tensor, out: Tensor, peer: int, group_name: str) -> None:
    _handle(x, group_name).get(out, peer)
    increment_version(out)


def _batch_put(
    xs: Sequence[Tensor], sources: Sequence[Tensor], peers: Sequence[int], group_name: str
) -> None:
    batch_put(list(zip(_handles(xs, group_name), sources, peers, strict=True)))


def _batch_signal(xs: Sequence[Tensor], peers: Sequence[int], group_name: str) -> None:
    batch_signal(list(zip(_handles(xs, group_name), peers, strict=True)))


def _batch_wait(xs: Sequence[Tensor], peers: Sequence[int], group_name: str) -> None:
    batch_wait(list(zip(_handles(xs, group_name), peers, strict=True)))
    increment_version(xs)


def _checked(op: OpOverload, run: Callable[..., None] | None) -> Callable[..., None]:
    """As torch calls it; without ``run`` the fake one."""
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

    def call(*args: Any, group_size: int | None = None) -> None:
        if group_size is not None:
            group_checks.group_size(group_size, args[-1])
        refuse_transfer(names, args)
        if run is not None:
            run(*args)

    return call


def _below_autograd(op: OpOverload, name: str) -> Callable[..., None]:
    """No gradient goes through a transfer."""

    def call(*args: Any, **named: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_derivative_in_transform(name)
        refuse_gradients(op, args)
        with torch._C._AutoDispatchBelowAutograd():
            if name == "get" and (args[1].is_conj() or args[1].is_neg()):
                # What resolves such tensors below has no way with ops that return nothing.
                plain = torch.empty(args[1].shape, dtype=args[1].dtype, device=args[1].device)
                op(args[0], plain, *args[2:], **named)
                args[1].copy_(plain)
                return
            op(*args, **named)

    return call


for _run in (_signal, _wait, _put, _get, _batch_put, _batch_signal, _batch_wait):
    _name = _run.__name__.removeprefix("_")
    _op = getattr(schema, _name)
    implement(_op, _checked(_op, _run), _checked(_op, None))
    OF_REGISTERED.append(_op)
    schema.lib.impl(_op, _below_autograd(_op, _name), "Autograd")
