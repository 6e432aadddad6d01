"""The registration of the ops of registered tensors in torch.library; their schemas are elsewhere.

Fake and real implementations refuse the same, before anything is moved. A graph knows neither registrations nor the
sizes of other ranks: those only the real ones can compare.

They are calls of the handles that ``symm_mem.register`` gives, which are found by ``x``, this rank's tensor. So what a
graph makes for itself, and a copy that a compiler makes of ``x``, is refused: nobody knows it for a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from ...symm_mem import RegisteredTensor, batch_put, batch_signal, batch_wait, resolve_group
from ...symm_mem.registration.handle import refuse_other_kind, refuse_overlap, refuse_peer
from ...symm_mem.registration.registered import registered_as
from ..library import group_checks, schema
from ..library.communicating import OF_REGISTERED
from ..library.implement import implement, refuse_derivative_in_transform

_BATCHES: dict[str, Callable[..., None]] = {
    "batch_put": batch_put,
    "batch_signal": batch_signal,
    "batch_wait": batch_wait,
}


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


def _run(name: str, x: Any, *given: Any) -> None:
    """``given``: what is moved if anything is, the peer and the group's name; of a batch lists, but for the last."""
    *moved, group_name = given
    if (batch := _BATCHES.get(name)) is not None:
        batch(list(zip(_handles(x, group_name), *moved, strict=True)))
    else:
        getattr(_handle(x, group_name), name)(*moved)
    if name in ("wait", "get", "batch_wait"):
        increment_version(moved[0] if name == "get" else x)


def refuse_transfer(names: Sequence[str], args: Sequence[Any]) -> None:
    """``args``: x, what is moved if anything is, the peer and the group's name; of a batch lists, but for the last.

    ``names``: theirs.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    *columns, group_name = args
    size, several = resolve_group(group_name).size(), isinstance(columns[-1], (list, tuple))
    if several and len({*map(len, columns)}) > 1:
        counts = " and ".join(map(str, map(len, columns[1:])))
        raise ValueError(
            f"{', '.join(names[1:-1])}: are {counts}, must be as many as {names[0]}, {len(columns[0])}"
        )
    for i, (x, *moved, peer) in enumerate(zip(*columns, strict=True) if several else [columns]):
        at = f"[{i}]" if several else ""
        refuse_peer(names[-2] + at, peer, size)
        if x.is_conj() or x.is_neg():
            raise ValueError(
                f"{names[0]}{at}: is a conjugated or negated view, must be the tensor that was registered"
            )
        for tensor in moved:
            refuse_other_kind(names[1] + at, tensor, x, names[0] + at)
            if names[1] == "out":
                refuse_overlap("out", tensor)


def refuse_gradients(op: OpOverload, args: Sequence[Any]) -> None:
    """Raises: ValueError: a tensor requires a gradient, and is written to."""
    for argument, given in zip(op._schema.arguments, args):  # noqa: B905  # the number of ranks comes by its name
        several = isinstance(given, (list, tuple))
        for i, tensor in enumerate(given if several else [given]):
            if argument.is_write and torch.is_grad_enabled() and tensor.requires_grad:
                name = f"{argument.name}[{i}]" if several else argument.name
                raise ValueError(
                    f"{name}: requires a gradient, must not where it is written to; pass its detach()"
                )


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


for _name in ("signal", "wait", "put", "get", *_BATCHES):
    _op = getattr(schema, _name)
    implement(_op, _checked(_op, partial(_run, _name)), _checked(_op, None))
    OF_REGISTERED.append(_op)
    schema.lib.impl(_op, _below_autograd(_op, _name), "Autograd")
