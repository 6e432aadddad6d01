"""The collectives without a product as functions; functional.py has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kernels import all_gather, all_to_all, reduce_scatter
from ..symm_mem import Group
from . import validation
from .dispatch.callers import known_name
from .dispatch.launch_cache import launch_again
from .dispatch.stand_alone import KINDS
from .functional import ReduceOp
from .library.call import call_op


def one_shot_all_gather(
    x: Tensor,
    gather_dim: int,
    group: Group = None,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """``all_gather(x, gather_dim)``: all ranks' x, one after the other along a dimension.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_all_gather
    >>> x = torch.full((2, 3), float(dist.get_rank()))
    >>> y = one_shot_all_gather(x, -1)
    >>> y.shape == (2, 3 * dist.get_world_size())
    True
    >>> y[0, ::3].tolist() == list(range(dist.get_world_size()))
    True

    On CUDA one kernel: every rank pushes its x to every rank, by the LL protocol (data as flag), which needs no
    barrier, and stores what arrives where it belongs, whichever dimension is gathered; larger inputs go by rounds, in
    one launch. Every bit arrives as it was.

    Differentiable: the gradient is reduce-scattered. Works under torch.compile and in a CUDA graph. Every rank must
    call it with the same shapes, but for ``counts``.

    Args:
        x: 1 or more dimensions, any strides and alignment; any dtype of real numbers. It need not lie on the heap.
        gather_dim: may be negative.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        out: what the result is written to, of its shape and x's dtype; any strides. Neither it nor x may require a
            gradient. x may be this rank's part of it.
        counts: every rank's size of x along ``gather_dim``, the same list on every rank; 0 is a size. None: x has the
            same shape on every rank. Where they differ it is on CUDA a broadcast from each rank by the group's
            backend.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    if counts is not None:
        counts = validation.integers("counts", counts)
    name = known_name(group)
    if name is not None and type(gather_dim) is int and (counts is None or _are_plain(counts)):
        how = gather_dim if counts is None else (gather_dim, counts)
        op, tensors = (all_gather.OP, (x,)) if out is None else (all_gather.INTO, (out, x))
        done = launch_again(op, how, tensors, name, KINDS)
        if done is not None:
            return done[0] if out is None else out
    named = _given(counts)
    if out is None:
        return call_op("all_gather", group, x, gather_dim, **named)  # type: ignore[no-any-return]
    call_op("all_gather_out", group, out, x, gather_dim, **named)
    return out


def one_shot_reduce_scatter(
    x: Tensor,
    reduce_op: ReduceOp,
    scatter_dim: int,
    group: Group = None,
    *,
    out: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """``reduce_scatter(x, reduce_op, scatter_dim)``: this rank's part of what all ranks' x make together.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_reduce_scatter
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> x = torch.randn(3, 2 * W)
    >>> y = one_shot_reduce_scatter(x, "sum", 1)
    >>> total = x.clone()
    >>> dist.all_reduce(total)
    >>> torch.testing.assert_close(y, total.chunk(W, 1)[rank])

    On CUDA one kernel: every rank pushes each rank its part, by the LL protocol (data as flag), which needs no barrier;
    larger inputs go by rounds, in one launch. Reduced in float32, in rank order, rounded once: the same bits in every
    run, and those of ``one_shot_all_reduce``.

    Differentiable for "sum" and "avg": the gradient is all-gathered. Works under torch.compile and in a CUDA graph.
    Every rank must call it with the same shapes.

    Args:
        x: 1 or more dimensions, any strides and alignment; float32, bfloat16 or float16. It need not lie on the heap.
        reduce_op: "sum", "avg" for the sum divided by the number of ranks, "max" or "min" (NaN if one of them is; what
            the group's backend makes of NaN where it runs unfused); also as a torch.distributed.ReduceOp.
        scatter_dim: the dimension that is cut into one part a rank; may be negative. Without ``counts`` its size must
            be a multiple of the number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        out: what the result is written to, of its shape and x's dtype; any strides. Neither it nor x may require a
            gradient. It may be this rank's part of x.
        counts: every rank's size of the part along ``scatter_dim``, the same list on every rank; 0 is a size, and they
            add up to that of x. None: all parts are as large. Where they differ it is on CUDA a reduction to each
            rank by the group's backend, in its order of sums.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    if counts is not None:
        counts = validation.integers("counts", counts)
    name = known_name(group)
    if (
        name is not None
        and type(reduce_op) is str
        and type(scatter_dim) is int
        and (counts is None or _are_plain(counts))
    ):
        how = (scatter_dim, reduce_op) if counts is None else ((scatter_dim, reduce_op), counts)
        op, tensors = (reduce_scatter.OP, (x,)) if out is None else (reduce_scatter.INTO, (out, x))
        done = launch_again(op, how, tensors, name, KINDS)
        if done is not None:
            return done[0] if out is None else out
    reduce_op, named = validation.reduction(reduce_op, validation.ALL_REDUCE_OPS), _given(counts)
    if out is None:
        return call_op("reduce_scatter", group, x, reduce_op, scatter_dim, **named)  # type: ignore[no-any-return]
    call_op("reduce_scatter_out", group, out, x, reduce_op, scatter_dim, **named)
    return out


def one_shot_gather(
    x: Tensor, gather_dim: int, root: int, group: Group = None, *, counts: Sequence[int] | None = None
) -> Tensor:
    """All ranks' x, one after the other along a dimension, on one rank alone.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_gather
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> y = one_shot_gather(torch.full((2, 3), float(rank)), 1, 0)
    >>> y.shape == (2, 3 * W if rank == 0 else 0)
    True

    As ``one_shot_all_gather``, but nothing is sent to the other ranks: logits to the rank that samples, metrics to the
    one that writes them. Every bit arrives as it was.

    Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes, but for ``counts``.

    Args:
        x: 1 or more dimensions, any strides and alignment; any dtype of real numbers. It need not lie on the heap, and
            must not require a gradient.
        gather_dim: may be negative.
        root: the rank in the group that receives.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        counts: every rank's size of x along ``gather_dim``, the same list on every rank; 0 is a size. None: x has the
            same shape on every rank. Where they differ it is on CUDA an all-to-all by the group's backend.

    Returns:
        a new contiguous tensor; of the other ranks with a size of 0 along ``gather_dim``.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    if counts is not None:
        counts = validation.integers("counts", counts)
    name = known_name(group)
    if (
        name is not None
        and type(gather_dim) is int
        and type(root) is int
        and (counts is None or _are_plain(counts))
    ):
        how = (gather_dim, root) if counts is None else ((gather_dim, root), counts)
        done = launch_again(all_gather.TO_ROOT, how, (x,), name, KINDS)
        if done is not None:
            return done[0]
    return call_op("gather", group, x, gather_dim, root, **_given(counts))  # type: ignore[no-any-return]


def _are_plain(counts: Sequence[int]) -> bool:
    """Whether none of them is symbolic."""
    return all(type(n) is int for n in counts)


def _given(counts: Sequence[int] | None) -> dict[str, Any]:
    return {} if counts is None else {"counts": counts}


def one_shot_all_to_all(x: Tensor, scatter_dim: int, gather_dim: int, group: Group = None) -> Tensor:
    """All ranks' x, of each the part that is this rank's along one dimension, one after the other along another one.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_all_to_all
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> x = torch.full((5, 2 * W, 3), float(rank))  # 5 tokens of the sequence, all heads
    >>> y = one_shot_all_to_all(x, 1, 0)  # the whole sequence, 2 heads
    >>> y.shape == (5 * W, 2, 3) and y[::5, 0, 0].tolist() == list(range(W))
    True
    >>> bool((one_shot_all_to_all(y, 0, 1) == x).all())
    True

    ``torch.cat([x.chunk(W, scatter_dim)[rank] for x in every], gather_dim)`` of ``every`` rank's x.

    On CUDA one kernel: every rank pushes each rank its part, by the LL protocol (data as flag), which needs no barrier,
    and stores what arrives where it belongs, so nothing is transposed before or after it; larger inputs go by rounds,
    in one launch. Every bit arrives as it was.

    Differentiable: the gradient is the same with both dimensions exchanged. Works under torch.compile and in a CUDA
    graph. Every rank must call it with the same shapes.

    Args:
        x: 1 or more dimensions, any strides and alignment; any dtype of real numbers. One that is not contiguous is
            copied. It need not lie on the heap.
        scatter_dim: the dimension that is cut into one part a rank; may be negative. Its size must be a multiple of the
            number of ranks.
        gather_dim: the dimension along which the parts are joined, those of rank 0 first; may be negative, and may be
            ``scatter_dim``.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        a new contiguous tensor.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(scatter_dim) is int and type(gather_dim) is int:
        done = launch_again(all_to_all.OP, (scatter_dim, gather_dim), (x,), name, KINDS)
        if done is not None:
            return done[0]
    return call_op("all_to_all", group, x, scatter_dim, gather_dim)  # type: ignore[no-any-return]
