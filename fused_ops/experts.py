"""Mixtures of experts, as functions: where tokens go, and products with the experts' weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..symm_mem import Group
from . import validation
from .dispatch.tensor_guards import may_look_at
from .library.call import call_op


def fused_all_gather_grouped_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    rows: Tensor,
    offs: Tensor,
    gather_dim: int = 0,
    group: Group = None,
    *,
    return_A: bool = False,
    biases: Sequence[Tensor] | None = None,
    swiglu: bool = False,
) -> tuple[Tensor | None, list[Tensor]]:
    """``A = all_gather(A_shard)`` and ``A[rows] @ B[e] + bias[e]`` for each B: all ranks' tokens, this rank's experts.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_all_gather_grouped_matmul, moe_route
    >>> x, w = torch.randn(3, 8), torch.randn(2, 8, 16)  # this rank's tokens [T / W, K], and its slice of two experts
    >>> chosen = torch.arange(3 * dist.get_world_size()).view(-1, 1) % 2  # of all tokens, the same on every rank
    >>> rows, offs, slots = moe_route(chosen, 2)
    >>> A, (y,) = fused_all_gather_grouped_matmul(x, [w], rows, offs, return_A=True)
    >>> torch.testing.assert_close(y[slots[2, 0]], A[2] @ w[0])

    On Hopper GPUs copy engines send many tokens of 16 bits, while rows of own ones are copied into their order. Else
    weft's all-gather runs before the products of ``grouped_matmul``.

    Differentiable once. Works under torch.compile and, as ``grouped_matmul``, in CUDA graphs. Every rank must call it
    with the same shape of ``A_shard`` and the same N_i; experts and rows may differ.

    Args:
        A_shard: [T / W, K], this rank's tokens; float32, bfloat16 or float16.
        Bs: of this rank's experts, each [E, K, N_i] of the same dtype, such as gate and up; K and N_i are multiples of
            8.
        rows: [R], int32: rows of the gathered A, as ``moe_route`` sorts the choices of all tokens.
        offs: [E], int32: the number of rows up to the end of each expert.
        gather_dim: 0, the dimension of tokens.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        return_A: whether the gathered A is wanted, too.
        biases: one for each B, [E, N_i] of the same dtype; None adds nothing. All ranks pass some or none does.
        swiglu: as of ``grouped_matmul``, for each B.

    Returns:
        A [T, K] (None without ``return_A``), and the products [R, N_i], with ``swiglu`` [R, N_i / 2]. Their rows from
        ``offs[-1]`` on hold anything.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
        NotImplementedError: a second gradient is asked for.
    """
    given = A_shard, validation.tensors("Bs", Bs), rows, offs, gather_dim
    biases = None if biases is None else validation.tensors("biases", biases)
    named: Any = {"return_A": return_A, "biases": biases, "swiglu": swiglu}
    A, outs = call_op("all_gather_grouped_matmul", group, *given, **named)
    return A, outs


def grouped_matmul(
    A: Tensor,
    B: Tensor,
    offs: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """``A[rows[i]] @ B[e] + bias[e]`` for each row i of each expert e: the rows are sorted by expert.

    >>> import torch
    >>> from weft.fused_ops import grouped_matmul, moe_route
    >>> x, w = torch.randn(5, 8), torch.randn(4, 8, 16)  # 5 tokens, 4 experts
    >>> rows, offs, slots = moe_route(torch.tensor([[1, 0], [3, 1], [1, 2], [1, 3], [0, 1]]), 4)
    >>> y = grouped_matmul(x, w, offs, rows=rows)  # one row for each choice of a token
    >>> torch.testing.assert_close(y[slots[2, 1]], x[2] @ w[2])

    Experts may have any number of rows. On Hopper GPUs, in bfloat16 and float16, one kernel finds out which rows there
    are. Rows are copied into their order before it. The host reads nothing, so calls can be captured in CUDA graphs and
    replays may have other counts.
    Elsewhere the product is torch's, of ``A[rows]``.

    Differentiable once. Works under torch.compile. Products are summed in float32 and rounded once. A token's gradients
    are summed in float32, in the order of ``rows``. Those of B are torch's products, which for float16 and float32 wait
    for the device.

    Args:
        A: [T, K], float32, bfloat16 or float16.
        B: [E, K, N], of the same dtype; K and N are multiples of 8. One of them is contiguous, or B is copied.
        offs: [E], int32: the number of rows up to the end of each expert, as ``moe_route`` and
            ``torch.nn.functional.grouped_mm`` have it.
        rows: [R], int32: the row of A that each row of the result is made of. None: R is T, and rows are in order.
        bias: [E, N], of the same dtype.
        swiglu: B's columns are those of gate, and then as many of up; what is wanted is ``silu(gate) * up``. On Hopper,
            where K is contiguous in B and no gradient is wanted, neither goes through memory or is rounded.

    Returns:
        [R, N], with ``swiglu`` [R, N / 2]. Rows from ``offs[-1]`` on hold anything; no gradient comes from them.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it. In the checked mode
            (``symm_mem.set_checked``) also numbers in ``offs`` and ``rows``; else what lies outside is taken for the
            nearest that does not.
        NotImplementedError: a second gradient is asked for.
    """
    validation.tensor("A", A)
    validation.tensor("B", B)
    validation.tensor("offs", offs)
    for name, given in (("rows", rows), ("bias", bias)):
        if given is not None:
            validation.tensor(name, given)
    validation.flags(swiglu=swiglu)
    check_offs(A, offs, rows)
    found: Tensor = torch.ops.weft.grouped_matmul(A, B, offs, rows, bias, swiglu)
    return found


def check_offs(A: Tensor, offs: Tensor, rows: Tensor | None = None) -> None:
    """Their numbers, in the checked mode, which may wait for data."""
    of = A if rows is None else rows
    if not may_look_at(A, offs) or of.dim() < 1 or offs.is_complex():  # the op refuses the others
        return
    most = of.shape[0]
    before = 0
    for i, each in enumerate(offs.flatten().tolist()):
        if not before <= each <= most:
            raise ValueError(f"offs[{i}]: is {each}, must be from {before} to {most}")
        before = each
    wrong = None if rows is None else rows[(rows < 0) | (rows >= A.shape[0])]
    if wrong is not None and wrong.numel():
        raise ValueError(f"rows: holds {wrong[0].item()}, must be from 0 to {A.shape[0] - 1}")


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
