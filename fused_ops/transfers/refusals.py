"""What the ops of registered tensors refuse. Fake and real implementations ask here, before anything is moved.

A graph knows neither registrations nor the sizes of other ranks: those only the real ones can compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ...symm_mem import resolve_group
from ...symm_mem.registration.handle import refuse_other_kind, refuse_overlap, refuse_peer


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
