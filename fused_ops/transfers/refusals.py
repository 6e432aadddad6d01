"""What the ops of registered tensors refuse. Fake and real implementations ask here, before anything is moved.

A graph knows neither registrations nor the sizes of other ranks: those only the real ones can compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...symm_mem import resolve_group
from ...symm_mem.registration.handle import refuse_other_kind, refuse_overlap, refuse_peer


def refuse_signal(x: Tensor, peer: int, group_name: str, name: str = "peer", of: str = "x") -> None:
    """What all of them refuse.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    refuse_peer(name, peer, resolve_group(group_name).size())
    if x.is_conj() or x.is_neg():
        raise ValueError(f"{of}: is a conjugated or negated view, must be the tensor that was registered")


def refuse_put(x: Tensor, source: Tensor, peer: int, group_name: str) -> None:
    refuse_signal(x, peer, group_name)
    refuse_other_kind("source", source, x, "x")


def refuse_get(x: Tensor, out: Tensor, peer: int, group_name: str) -> None:
    refuse_signal(x, peer, group_name)
    refuse_other_kind("out", out, x, "x")
    refuse_overlap("out", out)


def refuse_batch_signal(xs: Sequence[Tensor], peers: Sequence[int], group_name: str) -> None:
    if len(xs) != len(peers):
        raise ValueError(f"peers: are {len(peers)}, must be as many as xs, {len(xs)}")
    for i, (x, peer) in enumerate(zip(xs, peers, strict=True)):
        refuse_signal(x, peer, group_name, f"peers[{i}]", f"xs[{i}]")


def refuse_batch_put(
    xs: Sequence[Tensor], sources: Sequence[Tensor], peers: Sequence[int], group_name: str
) -> None:
    if not len(xs) == len(sources) == len(peers):
        raise ValueError(
            f"sources, peers: are {len(sources)} and {len(peers)}, must be as many as xs, {len(xs)}"
        )
    for i, (x, source, peer) in enumerate(zip(xs, sources, peers, strict=True)):
        refuse_signal(x, peer, group_name, f"peers[{i}]", f"xs[{i}]")
        refuse_other_kind(f"sources[{i}]", source, x, f"xs[{i}]")


def refuse_gradient_of(name: str, tensor: Tensor) -> None:
    """Raises: ValueError: it requires a gradient, and is written to."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(f"{name}: requires a gradient, must not where it is written to; pass its detach()")
