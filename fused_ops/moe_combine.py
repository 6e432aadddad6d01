"""What experts' outputs add up to, reduced over the ranks, as functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..symm_mem import Group, group_name, is_checked
from . import validation
from .dispatch.callers import known_name, of_graph
from .dispatch.tensor_guards import needs_no_dispatch
from .library import schema
from .ops.combine.all_reduce import CombineAllReduceCall, fast_moe_combine_all_reduce
from .ops.combine.all_reduce_rms_norm import CombineRmsNormCall, fast_moe_combine_all_reduce_rms_norm
from .ops.combine.reduce_scatter import CombineReduceScatterCall, fast_moe_combine_reduce_scatter


def fused_moe_combine_all_reduce(
    y: Tensor,
    slots: Tensor,
    weights: Tensor,
    group: Group = None,
    *,
    shared: Tensor | None = None,
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
        ValueError, TypeError: an argument is wrong; the message names it.
        NotImplementedError: a second gradient is asked for.
        RankMismatch: the ranks call differently. Seen at the first call of the op in a group, in the checked mode
            (``symm_mem.set_checked``), or where they ask for different memory; else results may be wrong.
        PeerTimeout: a rank did not come.
    """
    name = known_name(group)
    if name is not None:
        done = fast_moe_combine_all_reduce(CombineAllReduceCall(y, slots, weights, name, shared))
        if done is not None:
            return done
    _check(y, slots, weights, shared)
    name = group_name(group)
    return schema.moe_combine_all_reduce(y, slots, weights, name, shared=shared, **of_graph(name))


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
        slots: int32 [T, k], likewise.
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
        ValueError, TypeError: an argument is wrong; the message names it.
        NotImplementedError: a second gradient is asked for.
        RankMismatch: the ranks call differently. Seen at the first call of the op in a group, in the checked mode
            (``symm_mem.set_checked``), or where they ask for different memory; else results may be wrong.
        PeerTimeout: a rank did not come.
    """
    name = known_name(group)
    if name is not None and type(eps) is float and type(weight_offset) is float and type(round_sum) is bool:
        norm = weight_offset, round_sum
        call = CombineRmsNormCall(y, slots, weights, residual, weight, eps, name, shared, *norm)
        done = fast_moe_combine_all_reduce_rms_norm(call)
        if done is not None:
            return done
    _check(y, slots, weights, shared)
    if residual is not None:
        validation.tensor("residual", residual)
    validation.tensor("weight", weight)
    validation.number("eps", eps)
    validation.number("weight_offset", weight_offset)
    validation.flags(round_sum=round_sum)
    name = group_name(group)
    named = {"shared": shared, "weight_offset": weight_offset, "round_sum": round_sum, **of_graph(name)}
    return schema.moe_combine_all_reduce_rms_norm(y, slots, weights, residual, weight, eps, name, **named)


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
        slots: int32 [T, k], likewise.
        weights: [T, k], likewise.
        scatter_dim: 0 for tokens, 1 for columns, or from the other end -2 or -1. Its size must be a multiple of the
            number of ranks; on CUDA parts of rows that are no multiple of 16 bytes are added up by torch, and scattered
            by the group's own backend.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        shared: [T, H] like y. None adds nothing.

    Returns:
        [T / W, H] or [T, H / W], contiguous, of the dtype of y.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        NotImplementedError: a second gradient is asked for.
        RankMismatch: the ranks call differently. Seen at the first call of the op in a group, in the checked mode
            (``symm_mem.set_checked``), or where they ask for different memory; else results may be wrong.
        PeerTimeout: a rank did not come.
    """
    name = known_name(group)
    if name is not None and type(scatter_dim) is int and -2 <= scatter_dim < 2:
        call = CombineReduceScatterCall(y, slots, weights, scatter_dim, name, shared)
        done = fast_moe_combine_reduce_scatter(call)
        if done is not None:
            return done
    _check(y, slots, weights, shared)
    validation.dimension("scatter_dim", scatter_dim, "result", 2)
    name = group_name(group)
    given = y, slots, weights, scatter_dim, name
    return schema.moe_combine_reduce_scatter(*given, shared=shared, **of_graph(name))


def _check(y: Tensor, slots: Tensor, weights: Tensor, shared: Tensor | None) -> None:
    """What would not reach the op's own checks; in the checked mode, which may wait for data, also the slots."""
    for name, tensor in (("y", y), ("slots", slots), ("weights", weights)):
        validation.tensor(name, tensor, 2)
    if shared is not None:
        validation.tensor("shared", shared)
    if torch.compiler.is_compiling() or not is_checked() or not needs_no_dispatch(slots):
        return
    wrong = slots[(slots < -1) | (slots >= y.shape[0])]
    if wrong.numel():
        raise ValueError(
            f"slots: holds {wrong[0].item()}, must be from -1 to {y.shape[0] - 1}, as y has rows"
        )
