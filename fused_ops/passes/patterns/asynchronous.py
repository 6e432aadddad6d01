"""An all-gather or reduce-scatter that copy engines carry out beside what stands between it and its wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor_config

from ....symm_mem.layout import NUM_BUFFERS
from ...dispatch import profitability
from ...library import schema
from ..graph import rewrite
from ..graph.collectives import Collective, LeftAlone, Size, c10d, val
from ..graph.index_map import Dims, plain
from ..order.transports import NETWORK, transport_of_group


@dataclass
class AsyncPattern:
    """``all_gather_start`` or ``reduce_scatter_start`` where the collective stands, and its wait where that stands.

    ``why`` says why no product takes it.
    """

    collective: Collective
    op: Any
    wait: Any
    why: str = ""

    dim = 0
    others = ()
    adds = ()
    decided = True
    last_dim = False

    @property
    def detail(self) -> str:
        return f"with no product: {self.why}" if self.why else ""

    @property
    def order(self) -> tuple[Dims, tuple[Size, ...]]:
        shape = tuple(val(self.collective.x).shape)
        return plain(shape), shape

    @property
    def form(self) -> str:
        return f"{'all_gather' if self.op is schema.all_gather_start else 'reduce_scatter'} by copy engines"

    @property
    def dtype(self) -> torch.dtype:
        return val(self.collective.x).dtype

    @property
    def m(self) -> Size:
        return math.prod(val(self.collective.x).shape[:-1])

    @property
    def n(self) -> Size:
        return val(self.collective.x).shape[-1]

    @property
    def k(self) -> Size:
        return 0

    @classmethod
    def from_collective(cls, c: Collective, why: str = "") -> AsyncPattern:
        """
        Args:
            why: no product takes it.

        Raises:
            LeftAlone: the group's own backend is better for it, or nothing tells what becomes of its token.
        """
        x = val(c.x)
        if x.dim() == 0:
            raise LeftAlone("its input is a number")
        if [*c.node.users] != [c.wait]:
            raise LeftAlone("what is pending is used by more than one wait")
        if transport_of_group(c.group) == NETWORK:
            raise LeftAlone("its ranks are on several hosts, whose memory copy engines do not reach")
        if not isinstance(x.numel(), int):
            raise LeftAlone("its size is not known before the run")
        if inductor_config.triton.cudagraphs:
            raise LeftAlone(
                "torch._inductor.config.triton.cudagraphs is True, which may part it from its wait"
            )
        if inductor_config.cpp_wrapper:
            raise LeftAlone("the C++ wrapper loses what a collective leaves to its wait")
        if c.node.target is c10d.all_gather_into_tensor.default:
            ops, part = (schema.all_gather_start, schema.all_gather_wait), x.nbytes
        else:
            ops, part = (schema.reduce_scatter_start, schema.reduce_scatter_wait), x.nbytes // c.world
        if (small := profitability.why_not_async(part, x.device.type)) is not None:
            raise LeftAlone(small)
        if _begun_before_its_wait(c) >= NUM_BUFFERS:
            raise LeftAlone(f"more than {NUM_BUFFERS} of its kind are on their way at once")
        return cls(c, *ops, why)

    def replace(self) -> None:
        """
        Raises:
            LeftAlone: the op cannot be called so. The graph is as it was.
        """
        c = self.collective
        reduce_op = [c.reduce_op] if c.reduce_op else []
        with rewrite.undone_if_left():
            started = rewrite.fused(c.node, self.op, c, c.x, *reduce_op)
            result = rewrite.fused(c.wait, self.wait, c, started, c.x)
        c.wait.replace_all_uses_with(result)
        rewrite.erase_unused([c.wait, c.node])


def _begun_before_its_wait(c: Collective) -> int:
    """How many of its kind begin between it and its wait."""
    count, node = 0, c.node.next
    while node is not c.wait:
        count += node.target in (c.node.target, _STARTS[c.node.target])
        node = node.next
    return count


_STARTS: dict[Any, Any] = {
    c10d.all_gather_into_tensor.default: schema.all_gather_start,
    c10d.reduce_scatter_tensor.default: schema.reduce_scatter_start,
}
