"""What experts' outputs add up to, reduced over the ranks, as functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..symm_mem import Group
from . import validation
from .dispatch.callers import known_name
from .dispatch.tensor_guards import may_look_at
from .experts import check_offs
from .functional import ReduceOp
from .library.call import call_op
from .ops import MOE_COMBINE_ALL_REDUCE, MOE_COMBINE_ALL_REDUCE_RMS_NORM, MOE_COMBINE_REDUCE_SCATTER
from .ops.experts.combine_all_reduce_rms_norm import CombineRmsNormCall


def fused_moe_combine_all_reduce(
    y: Tensor, slots: Tensor, weights: Tensor, group: Group = None, *, shared: Tensor | None = None
) -> Tensor:
    """``all_reduce(x)`` of ``x[t] = sum over k of weights[t, k] * y[slots[t, k]] + shared[t]``.

    >>> import torch
    >>> from weft.fused_ops import fused_moe_combine_all_reduce, one_shot_all_reduce
    >>> y, weights = torch.randn(6, 8), torch.rand(3, 2)  # rows of experts' outputs; of each token's two choices
    >>> slots = torch.tensor([[0, 3], [4, 1], [2, -1]], dtype=torch.int32)  # the last is of another rank's expert
    >>> total = fused_moe_combine_all_reduce(y, slots, weights)
    >>> rows = torch.cat([y, torch.zeros(1, 8)])[slots.long()]
    >>> torch.testing.assert_close(total, one_shot_all_reduce((rows * weights[..., None]).sum(1), "sum"))

    One kernel on CUDA, that of ``one_shot_all_reduce``, which loads the rows of y where it would load x. On each rank
    the choices are added in their order, then ``shared``, in float32, and rounded once; then the ranks', likewise, in
    rank order: the same bits in every run, on all ranks, wherever a token's rows lie.

    Differentiable, once. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes.

    Args:
        y: [R, H], experts' outputs without weights; float32, bfloat16 or float16. On CUDA what is not contiguous, or
            lies at no multiple of 16 bytes, is copied, here and below; rows of no multiple of 16 bytes are added up by
            torch, before the all-reduce.
        slots: int32 [T, k]: the row of y of each token's choice. -1, as any number that is no row, adds nothing; in the
            checked mode another such number is an error.
        weights: [T, k], of the dtype of y or float32.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        shared: [T, H] like y, such as a shared expert's partial sum. None adds nothing.

    Returns:
        [T, H], contiguous, of the dtype of y.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
        NotImplementedError: a second gradient is asked for.
    """
    name = known_name(group)
    if name is not None:
        done = MOE_COMBINE_ALL_REDUCE.fast(MOE_COMBINE_ALL_REDUCE.record(y, slots, weights, name, shared))
        if done is not None:
            return done  # type: ignore[no-any-return]
    if _may_look_at(slots, y):
        _check_slots("y", y, slots)
    return call_op("moe_combine_all_reduce", group, y, slots, weights, shared=shared)  # type: ignore[no-any-return]


def fused_moe_combine_all_reduce_rms_norm(
    y: Tensor,
    slots: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: Group = None,
    *,
    shared: Tensor | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """``fused_all_reduce_rms_norm`` of ``x[t] = sum over k of weights[t, k] * y[slots[t, k]] + shared[t]``.

    >>> import torch
    >>> from weft.fused_ops import fused_moe_combine_all_reduce, fused_moe_combine_all_reduce_rms_norm
    >>> y, weights, residual, weight = torch.randn(6, 8), torch.rand(3, 2), torch.randn(3, 8), torch.randn(8)
    >>> slots = torch.tensor([[0, 3], [4, 1], [2, 5]], dtype=torch.int32)
    >>> normed, sums = fused_moe_combine_all_reduce_rms_norm(y, slots, weights, residual, weight, 1e-6)
    >>> torch.equal(sums, residual + fused_moe_combine_all_reduce(y, slots, weights))
    True
    >>> torch.testing.assert_close(normed, torch.nn.functional.rms_norm(sums, (8,), weight, 1e-6))

    One kernel on CUDA, that of ``fused_all_reduce_rms_norm``: what ends a mixture's layer while it decodes. The sums
    are those of ``fused_moe_combine_all_reduce``, bit for bit.

    Differentiable, once; gradients are taken at the rounded sum. Works under torch.compile and in a CUDA graph. Every
    rank must call it with the same shapes.

    Args:
        y: [R, H], as for ``fused_moe_combine_all_reduce``.
        slots: [T, k], likewise.
        weights: [T, k], likewise.
        residual: [T, H] like y; the ranks' may differ. None adds nothing.
        weight: of the norm, [H], of the dtype of y or float32; the ranks' may differ.
        eps: 0 or more.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        shared: [T, H] like y. None adds nothing.
        weight_offset: is added to the weight, in float32: 1 for Gemma's norms.
        round_sum: as for ``fused_all_reduce_rms_norm``.

    Returns:
        (normed, sums), [T, H], contiguous, of the dtype of y; sums is the next residual.

    Raises:
        ValueError, TypeError, NotImplementedError, RankMismatch, PeerTimeout: as ``fused_moe_combine_all_reduce``.
    """
    name = known_name(group)
    if name is not None and type(eps) is float and type(weight_offset) is float and type(round_sum) is bool:
        norm = weight_offset, round_sum
        call = CombineRmsNormCall(y, slots, weights, residual, weight, eps, name, shared, *norm)
        done = MOE_COMBINE_ALL_REDUCE_RMS_NORM.fast(call)
        if done is not None:
            return done[0], done[1]
    if _may_look_at(slots, y):
        _check_slots("y", y, slots)
    given = y, slots, weights, residual, weight, eps
    named: Any = {"shared": shared, "weight_offset": weight_offset, "round_sum": round_sum}
    return call_op("moe_combine_all_reduce_rms_norm", group, *given, **named)  # type: ignore[no-any-return]


def fused_moe_combine_reduce_scatter(
    y: Tensor,
    slots: Tensor,
    weights: Tensor,
    scatter_dim: int,
    group: Group = None,
    *,
    shared: Tensor | None = None,
) -> Tensor:
    """This rank's part of ``fused_moe_combine_all_reduce(y, slots, weights, group, shared=shared)``, bit for bit.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_moe_combine_all_reduce, fused_moe_combine_reduce_scatter
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> y, weights = torch.randn(4 * W, 8), torch.rand(2 * W, 2)
    >>> slots = torch.arange(4 * W, dtype=torch.int32).view(2 * W, 2)
    >>> part = fused_moe_combine_reduce_scatter(y, slots, weights, 0)
    >>> torch.equal(part, fused_moe_combine_all_reduce(y, slots, weights).chunk(W)[rank])
    True

    One kernel on CUDA, that of ``one_shot_reduce_scatter``, which loads the rows of y where it would load x.

    Differentiable, once: the gradient is all-gathered. Works under torch.compile and in a CUDA graph. Every rank must
    call it with the same shapes.

    Args:
        y: [R, H], as for ``fused_moe_combine_all_reduce``.
        slots: [T, k], likewise.
        weights: [T, k], likewise.
        scatter_dim: 0 for tokens, 1 for columns, or from the other end -2 or -1. Its size must be a multiple of the
            number of ranks; on CUDA parts of rows that are no multiple of 16 bytes are added up by torch, and scattered
            by the group's own backend.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        shared: [T, H] like y. None adds nothing.

    Returns:
        [T / W, H] or [T, H / W], contiguous, of the dtype of y.

    Raises:
        ValueError, TypeError, NotImplementedError, RankMismatch, PeerTimeout: as ``fused_moe_combine_all_reduce``.
    """
    name = known_name(group)
    if name is not None and type(scatter_dim) is int:
        call = MOE_COMBINE_REDUCE_SCATTER.record(y, slots, weights, scatter_dim, name, shared)
        done = MOE_COMBINE_REDUCE_SCATTER.fast(call)
        if done is not None:
            return done  # type: ignore[no-any-return]
    if _may_look_at(slots, y):
        _check_slots("y", y, slots)
    given = y, slots, weights, scatter_dim
    return call_op("moe_combine_reduce_scatter", group, *given, shared=shared)  # type: ignore[no-any-return]


def fused_grouped_matmul_all_reduce(
    A: Tensor,
    B: Tensor,
    offs: Tensor,
    slots: Tensor,
    weights: Tensor,
    reduce_op: ReduceOp,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """``fused_moe_combine_all_reduce`` of the rows of ``grouped_matmul(A, B, offs, bias=bias)``, plus ``residual``.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_grouped_matmul_all_reduce, moe_route
    >>> chosen, weights = torch.tensor([[1, 0], [0, 2], [2, 1]]), torch.rand(3, 2)  # of 3 tokens
    >>> rows, offs, slots = moe_route(chosen, 3)
    >>> hidden, w = torch.randn(6, 16), torch.randn(3, 16, 8)  # rows by expert, and this rank's slice of 3 experts
    >>> y = fused_grouped_matmul_all_reduce(hidden, w, offs, slots, weights, "sum")
    >>> part = (hidden[slots.long()].unsqueeze(2) @ w[chosen]).squeeze(2) * weights[..., None]
    >>> total = part.sum(1)
    >>> dist.all_reduce(total)
    >>> torch.testing.assert_close(y, total, rtol=1e-4, atol=1e-4)

    The product's rows are rounded to the dtype of A. They are weighted and added up as
    ``fused_moe_combine_all_reduce`` does it, in float32, choices in their order, then ranks in theirs: the same bits in
    every run. On CUDA the kernel of ``grouped_matmul`` runs before that of the all-reduce.

    Differentiable once. Nothing is kept of the product, nor multiplied again for the gradient of ``weights``. Works
    under torch.compile and in a CUDA graph. Every rank must call it with the same shapes, but for K and the number of
    experts.

    Args:
        A: [R, K], rows sorted by expert; float32, bfloat16 or float16.
        B: [E, K, N] of the same dtype; K and N are multiples of 8. One of them is contiguous, or B is copied.
        offs: [E], int32: the number of rows up to the end of each expert, as ``moe_route`` has it.
        slots: int32 [T, k]: the row of each token's choice, as ``moe_route`` has it. -1, as any number that is no row,
            adds nothing; in the checked mode another such number is an error, and a row that two choices have.
        weights: [T, k], of the dtype of A or float32.
        reduce_op: "sum", or "avg" for the sum divided by the number of ranks; also as a torch.distributed.ReduceOp.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: [E, N] of the same dtype, added to each row of an expert. What the ranks give is added up: where their B
            are slices of the same experts, one gives the bias and the others zeros. All ranks pass one or none does.
        residual: [T, N] of the same dtype, added to the rounded result; the ranks' may differ.
        shared: [T, N] likewise, added to this rank's rows before the reduction.

    Returns:
        [T, N], contiguous, of the dtype of A.

    Raises:
        ValueError, TypeError, NotImplementedError, RankMismatch, PeerTimeout: as ``fused_moe_combine_all_reduce``.
    """
    _check_grouped(A, offs, slots)
    named = {"bias": bias, "residual": residual, "shared": shared}
    given = A, B, offs, slots, weights, validation.reduction(reduce_op)
    return call_op("grouped_matmul_all_reduce", group, *given, **named)  # type: ignore[no-any-return]


def fused_grouped_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    offs: Tensor,
    slots: Tensor,
    weights: Tensor,
    reduce_op: ReduceOp,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """This rank's part of what ``fused_grouped_matmul_all_reduce`` reduces, bit for bit, plus its residual.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_grouped_matmul_all_reduce, fused_grouped_matmul_reduce_scatter, moe_route
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> chosen, weights = torch.arange(2 * W).view(-1, 1) % 3, torch.rand(2 * W, 1)  # of all ranks' tokens
    >>> rows, offs, slots = moe_route(chosen, 3)
    >>> given = torch.randn(2 * W, 16), torch.randn(3, 16, 8), offs, slots, weights
    >>> part = fused_grouped_matmul_reduce_scatter(*given, "sum", 0)
    >>> torch.equal(part, fused_grouped_matmul_all_reduce(*given, "sum").chunk(W)[rank])
    True

    Differentiable once: the gradient is all-gathered. Else as ``fused_grouped_matmul_all_reduce``.

    Args:
        A: [R, K], as for ``fused_grouped_matmul_all_reduce``.
        B: [E, K, N], likewise.
        offs: [E], likewise.
        slots: [T, k], likewise.
        weights: [T, k], likewise.
        reduce_op: likewise.
        scatter_dim: 0 for tokens, 1 for columns, or from the other end -2 or -1. Its size must be a multiple of the
            number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: [E, N], as for ``fused_grouped_matmul_all_reduce``.
        residual: of the result's shape and dtype, added to the rounded result.
        shared: [T, N], as for ``fused_grouped_matmul_all_reduce``.

    Returns:
        [T / W, N] or [T, N / W], contiguous, of the dtype of A.

    Raises:
        ValueError, TypeError, NotImplementedError, RankMismatch, PeerTimeout: as ``fused_moe_combine_all_reduce``.
    """
    _check_grouped(A, offs, slots)
    named = {"bias": bias, "residual": residual, "shared": shared}
    given = A, B, offs, slots, weights, validation.reduction(reduce_op), scatter_dim
    return call_op("grouped_matmul_reduce_scatter", group, *given, **named)  # type: ignore[no-any-return]


def _check_grouped(A: Tensor, offs: Tensor, slots: Tensor) -> None:
    """In the checked mode: offsets and slots, each of which is of one choice."""
    check_offs(A, offs)
    if not _may_look_at(slots, A):
        return
    _check_slots("A", A, slots)
    used = slots[slots >= 0]
    counts = used.long().bincount(minlength=1)
    if int(counts.max()) > 1:
        raise ValueError(
            f"slots: holds {int(counts.argmax())} more than once, must hold each row once at most"
        )


def _may_look_at(slots: Tensor, rows: Tensor) -> bool:
    """Where the checked mode does, whether gradients of the rows are wanted or not. Others the op refuses."""
    return may_look_at(slots) and isinstance(rows, Tensor) and rows.dim() > 0 and not slots.is_complex()


def _check_slots(of: str, rows: Tensor, slots: Tensor) -> None:
    """In the checked mode, which may wait for data: slots are of rows of the tensor ``of``."""
    wrong = slots[(slots < -1) | (slots >= rows.shape[0])]
    if wrong.numel():
        raise ValueError(
            f"slots: holds {wrong[0].item()}, must be from -1 to {rows.shape[0] - 1}, as {of} has rows"
        )
