"""Mixtures of experts, as functions: where tokens go, and products with the experts' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import validation


def moe_route(
    topk_ids: Tensor, num_experts: int, *, first_expert: int = 0, num_local_experts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the choices of tokens by expert: which rows a grouped product takes, and where each choice's result lies.

    >>> import torch
    >>> from weft.fused_ops import moe_route
    >>> chosen = torch.tensor([[1, 0], [3, 1]])  # two tokens, two experts each
    >>> rows, offs, slots = moe_route(chosen, 4, first_expert=0, num_local_experts=2)
    >>> rows.tolist(), offs.tolist()  # expert 0 gets token 0, expert 1 tokens 0 and 1
    ([0, 0, 1, 0], [1, 3])
    >>> slots.tolist()  # another rank has expert 3
    [[1, 0], [-1, 2]]

    The result is the same in every run. Nothing is read by the host, so calls can be captured in CUDA graphs, and
    replays may route otherwise. Works under torch.compile. No gradient flows through integers.

    Args:
        topk_ids: [T, k], int32 or int64: the experts of each token. Those that are none from 0 to ``num_experts - 1``
            go nowhere.
        num_experts: of all ranks.
        first_expert: the first one of this rank.
        num_local_experts: how many this rank has, at most 2048. None: all from ``first_expert`` on.

    Returns:
        (rows, offs, slots), int32 on the device of ``topk_ids``.

        - rows [T * k]: the token of each row, by expert and then in the order of ``topk_ids``; 0 from ``offs[-1]`` on.
        - offs [num_local_experts]: the number of rows up to the end of each expert, as
          ``torch.nn.functional.grouped_mm`` takes it.
        - slots [T, k]: the row of each choice, -1 where no expert of this rank was chosen.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    validation.tensor("topk_ids", topk_ids)
    validation.integer("num_experts", num_experts)
    validation.integer("first_expert", first_expert)
    if num_local_experts is None:
        num_local_experts = num_experts - first_expert
    validation.integer("num_local_experts", num_local_experts)
    found: Any = torch.ops.weft.moe_route(topk_ids, num_experts, first_expert, num_local_experts)
    return found
