"""Tokens to the ranks that have their experts, and back, as functions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ..kernels.moe_dispatch import BACK, OP
from ..symm_mem import Group, group_name
from . import validation
from .dispatch.callers import of_graph, refuse_child_of, world_size_of
from .library import schema
from .library.call import call_op


class MoeHandle(NamedTuple):
    """Which rows ``moe_dispatch`` made of which tokens, for ``moe_combine``. W ranks have T tokens of k choices each.

    >>> import torch
    >>> from weft.fused_ops import MoeHandle, moe_dispatch
    >>> rows, offs, handle = moe_dispatch(torch.randn(3, 8), torch.tensor([[0], [1], [0]]), 16)
    >>> isinstance(handle, MoeHandle), handle.choices.shape == rows.shape[:1]
    (True, True)

    Attributes:
        slots: [W * T, k], int32: the row of each choice of all ranks' tokens on this rank; -1 where it is another's.
        choices: [C], int32: the choice of each row, of the W * T * k; -1 where there is none.
        ranks: [W * T], int32: bit r of a token says that rank r has one of its experts.
    """

    slots: Tensor
    choices: Tensor
    ranks: Tensor


def moe_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: Group = None,
    *,
    capacity: int | None = None,
    align: int = 1,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, MoeHandle]:
    """Sends each token to the ranks that have its experts; the rows of this rank's experts, sorted by expert.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import grouped_matmul, moe_combine, moe_dispatch
    >>> W = dist.get_world_size()
    >>> x, weights = torch.randn(3, 8), torch.rand(3, 2)  # this rank's tokens, two experts each
    >>> chosen = torch.tensor([[1, 0], [2 * W - 1, 1], [2, 0]])  # of 2 experts on each rank
    >>> rows, offs, handle = moe_dispatch(x, chosen, 2 * W)
    >>> y = moe_combine(rows, handle, weights)  # of experts that change nothing
    >>> torch.testing.assert_close(y, x * weights.sum(1, keepdim=True) if W > 1 else y)
    >>> grouped_matmul(rows, torch.randn(2, 8, 16), offs).shape == (6 * W, 16)
    True

    The experts are shared out evenly, in rank order. A token travels once to each rank that has one of its experts,
    however many these are. All ranks' ``topk_ids`` are gathered first, so no size goes to the host: graphs can be
    captured, and replays may route otherwise.

    Differentiable once: the gradient is ``moe_combine`` without weights. Works under torch.compile. Several dispatches
    may be under way before their combines. Every rank must call it with the same shapes and arguments.

    Args:
        x: [T, H], this rank's tokens; float32, bfloat16 or float16.
        topk_ids: [T, k], int32 or int64: the experts of each token, each once. Those that are none from 0 to
            ``num_experts - 1`` go nowhere.
        num_experts: of all ranks, a multiple of their number W.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        capacity: C, the rows of each rank. None: room for all, ``W * T * min(k, num_experts / W)``, and what ``align``
            may add.
        align: each expert's rows begin and end at a multiple of it, filled up with zeros.
        max_tokens: T of the rank that has most, where ranks have different numbers of tokens, or none. None: all have
            as many.

    Returns:
        (rows, offs, handle).

        - rows [C, H]: by expert, then by rank, then in the order of ``topk_ids``; they hold anything from
          ``offs[-1]`` on.
        - offs [num_experts / W], int32: the number of rows up to the end of each of this rank's experts, as
          ``grouped_matmul`` and ``torch.nn.functional.grouped_mm`` take it.
        - handle: for ``moe_combine``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it. So it is if a rank's rows are more than
            ``capacity``: all ranks raise that, between CPU ranks at once, on CUDA at the next call that finds the GPU
            past it, at the latest ``symm_mem.check`` after a synchronization; what did not fit is left out until then.
        NotImplementedError: a second gradient is asked for.
        RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    if max_tokens is not None:
        validation.integer("max_tokens", max_tokens)
        for argument, tensor in (("x", x), ("topk_ids", topk_ids)):
            validation.tensor(argument, tensor)
            if tensor.dim() != 2:
                raise ValueError(f"{argument}: has {tensor.dim()} dimensions, must have 2")
        if max_tokens < x.shape[0]:
            raise ValueError(f"max_tokens: is {max_tokens}, must be at least {x.shape[0]}, as x has rows")
        refuse_child_of(group_name(group), OP)
        more = max_tokens - x.shape[0]
        x, topk_ids = pad(x, (0, 0, 0, more)), pad(topk_ids, (0, 0, 0, more), value=-1)
    named = {"capacity": capacity, "align": align}
    rows, offs, *places = call_op("moe_dispatch", group, x, topk_ids, num_experts, **named)
    return rows, offs, MoeHandle(*places)


def moe_combine(y: Tensor, handle: MoeHandle, weights: Tensor, group: Group = None) -> Tensor:
    """Sums what experts have made of each token's rows, where the token came from: ``moe_dispatch`` turned round.

    >>> import torch
    >>> from weft.fused_ops import moe_combine, moe_dispatch
    >>> x, chosen = torch.randn(3, 8), torch.tensor([[0], [-1], [0]])
    >>> rows, offs, handle = moe_dispatch(x, chosen, 16, capacity=64)
    >>> y = moe_combine(2 * rows, handle, torch.full((3, 1), 0.5))
    >>> torch.equal(y, torch.stack([x[0], 0 * x[0], x[2]]))
    True

    Each rank adds up its rows of a token, with their weights, in the order of ``topk_ids``, in float32, rounds the sum,
    and sends it once. The token's rank adds up these sums in rank order, in float32, and rounds once: the same bits in
    every run. All ranks' weights are all-gathered first.

    Differentiable once, in y and weights: the gradient is a ``moe_dispatch``. Works under torch.compile and in CUDA
    graphs. Every rank must call it with the same shapes.

    Args:
        y: [C, H], rows as ``moe_dispatch`` returned them, H may be another one; float32, bfloat16 or float16. Rows from
            ``offs[-1]`` on may hold anything.
        handle: of that call.
        weights: [T, k], of this rank's tokens, of the dtype of y or float32.
        group: that of the dispatch.

    Returns:
        [T, H], contiguous, of the dtype of y; zeros of tokens that went nowhere.

    Raises:
        ValueError, TypeError, NotImplementedError, RankMismatch, PeerTimeout: as ``moe_dispatch``.
    """
    validation.tensor("y", y)
    validation.tensor("weights", weights, 2)
    if not isinstance(handle, tuple) or len(handle) != len(MoeHandle._fields):
        raise TypeError(f"handle: is {validation.type_text(handle)}, must be what moe_dispatch returned")
    for field, index in zip(MoeHandle._fields, handle, strict=True):
        validation.tensor(f"handle.{field}", index)
    name, tokens = group_name(group), weights.shape[0]
    most = handle[0].shape[0] // (world_size_of(name) or 1)
    if tokens > most:
        raise ValueError(f"weights: has {tokens} rows, must have at most {most}, as tokens were dispatched")
    if tokens < most:
        refuse_child_of(name, BACK)
        weights = pad(weights, (0, 0, 0, most - tokens))
    found, _ = schema.moe_combine(y, *handle, weights, name, **of_graph(name))
    return found if tokens == most else found[:tokens]
