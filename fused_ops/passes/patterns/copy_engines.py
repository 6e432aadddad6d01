"""An all-gather or reduce-scatter that copy engines carry out beside what stands between it and its wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._inductor import config as inductor_config

from ....symm_mem.layout import NUM_BUFFERS
from ...dispatch import profitability
from ...library import schema
from ..graph.collectives import Collective
from ..graph.nodes import LeftAlone, between, c10d, val
from ..graph.rewrite import fused, put_in_place, undone_if_left
from ..order.copy_engines import is_large
from ..order.transports import NETWORK, transport_of_group
from .pattern import Pattern


def match_by_copy_engines(c: Collective, why: str = "") -> Pattern:
    """Its start where it stands, and its wait where that stands. ``why``: no product takes it. LeftAlone: the group's
    own backend is better for it, or nothing tells what becomes of its token."""
    x = val(c.x)
    if x.dim() == 0:
        raise LeftAlone("its input is a number")
    gathers = c.node.target is c10d.all_gather_into_tensor.default
    if (reason := why_not_carried(c, x)) is not None:
        raise LeftAlone(reason)
    # Of its kind, also by copy engines, between it and its wait.
    start = _OPS[c.node.target][0]
    begun = [
        n for n in between(c.node, c.wait) if n.target is start or (n.target is c.node.target and is_large(n))
    ]
    if len(begun) >= NUM_BUFFERS:
        raise LeftAlone(f"more than {NUM_BUFFERS} of its kind are on their way at once")
    return Pattern.of_tensor(
        c,
        x,
        op=start,
        form=f"{'all_gather' if gathers else 'reduce_scatter'} by copy engines",
        detail=f"with no product: {why}" if why else "",
        replace=partial(_replace, c),
        dim=0,
        decided=True,
    )


def why_not_carried(c: Collective, x: torch.Tensor) -> str | None:
    """Why copy engines do not carry ``x`` as the operand of such a collective, or not faster; None if they do."""
    if transport_of_group(c.group) == NETWORK:
        return "its ranks are on several hosts, whose memory copy engines do not reach"
    if not isinstance(x.numel(), int):
        return "its size is not known before the run"
    if inductor_config.triton.cudagraphs:
        return "torch._inductor.config.triton.cudagraphs is True, which may part it from its wait"
    if inductor_config.cpp_wrapper:
        return "the C++ wrapper loses what a collective leaves to its wait"
    part = x.nbytes if c.node.target is c10d.all_gather_into_tensor.default else x.nbytes // c.world
    return profitability.why_not_async(part, x.device.type)


def _replace(c: Collective) -> None:
    start, wait = _OPS[c.node.target]
    reduce_op = [c.reduce_op] if c.reduce_op else []
    with undone_if_left():
        started = fused(c.node, start, c, c.x, *reduce_op)
        result = fused(c.wait, wait, c, started, c.x)
    put_in_place({c.wait: result}, [c.wait, c.node])


_OPS: dict[Any, tuple[Any, Any]] = {
    c10d.all_gather_into_tensor.default: (schema.all_gather_start, schema.all_gather_wait),
    c10d.reduce_scatter_tensor.default: (schema.reduce_scatter_start, schema.reduce_scatter_wait),
}
