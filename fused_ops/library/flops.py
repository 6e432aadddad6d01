"""How much the ops multiply, for torch's FLOP counter and for what torch.compile may recompute in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from ...symm_mem import resolve_group
from . import schema


@register_flop_formula(schema.all_gather_matmul.overloadpacket)
def _all_gather_matmul(
    A_shard: Sequence[int], Bs: Sequence[Sequence[int]], gather_dim: int, group_name: str, **_: Any
) -> int:
    return 2 * resolve_group(group_name).size() * prod(A_shard) * sum(B[1] for B in Bs)


@register_flop_formula(schema.all_gather_scaled_matmul.overloadpacket)
def _all_gather_scaled_matmul(
    A_shard: Sequence[int], Bs: Sequence[Sequence[int]], *given: Any, **_: Any
) -> int:
    return _all_gather_matmul(A_shard, Bs, *given[2:4])


@register_flop_formula(
    [
        schema.matmul_reduce_scatter.overloadpacket,
        schema.scaled_matmul_reduce_scatter.overloadpacket,
        schema.matmul_all_reduce.overloadpacket,
    ]
)
def _matmul(
    A: Sequence[int], B: Sequence[int], *_: Any, more: Sequence[Sequence[int]] | None = None, **__: Any
) -> int:
    return 2 * B[1] * (prod(A) + sum(prod(a) for a in (more or ())[::2]))
