"""The ops as functions: ``torch.ops.weft`` with the group as a name, a ProcessGroup or a DeviceMesh dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.all_reduce import IN_PLACE, OP
from ..symm_mem import Group
from . import validation
from .dispatch.callers import known_name
from .dispatch.launch_cache import launch_again
from .dispatch.stand_alone import KINDS
from .dispatch.tensor_guards import needs_autograd_alone
from .library.call import call_op
from .ops import (
    ALL_GATHER_MATMUL,
    ALL_REDUCE,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    all_gather_matmul,
    all_reduce,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

ReduceOp: TypeAlias = str | dist.ReduceOp | dist.ReduceOp.RedOpType

_LISTS = (list, tuple)


def fused_all_gather_matmul(
    A_shard: Tensor, Bs: Sequence[Tensor], gather_dim: int, group: Group = None, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """``A = all_gather(A_shard, gather_dim)`` and ``A @ B`` for each B, multiplied as the shards arrive.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_all_gather_matmul
    >>> x, w = torch.randn(4, 8), torch.randn(8, 6)  # this rank's rows [M / W, K], and its columns of the weight
    >>> A, (y,) = fused_all_gather_matmul(x, [w], 0)
    >>> y.shape == (4 * dist.get_world_size(), 6)
    True
    >>> torch.testing.assert_close(y, A @ w)

    On CUDA a few SMs push the local shard to the peers while the rest compute; tiles of remote rows start as their data
    arrives. Small inputs are exchanged in one shot before cuBLAS, and what cannot or should not be fused runs
    over the group's own backend: ``last_plan`` says which. Along the last dimension the ranks' parts of a product are
    summed in float32, in rank order, and rounded once: the same bits in every run, and on ranks with equal Bs.

    Differentiable. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes, but for
    N_i between CPU ranks (on CUDA all sizes choose the kernel). The
    signature is that of ``torch.ops.symm_mem.fused_all_gather_matmul``.

    Args:
        A_shard: [..., K], 2 or more dimensions; float32, bfloat16 or float16; any strides. On CUDA it is not copied if
            its rows are contiguous, at one distance, and begin at multiples of 16 bytes.
        Bs: matrices [K, N_i] of the same dtype, of this rank; for the last dimension [world_size * K, N_i].
        gather_dim: the dimension along which the shards are joined, in rank order; may be negative.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        return_A: whether the gathered A is wanted, too. Without it nothing is copied for it.

    Returns:
        A (None without ``return_A``) and the products [..., N_i]. They are contiguous once ``gather_dim`` is moved to
        the front; for the last dimension as they are.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
        RankMismatch: the ranks call differently. Seen at the first call of the op in a group, in the checked mode
            (``symm_mem.set_checked``), or where they ask for different memory; else results may be wrong.
        PeerTimeout: a rank did not come.
    """
    # What was called before has been checked before. True is not 1 there.
    name = known_name(group)
    if name is not None and type(Bs) in _LISTS and type(gather_dim) is int and type(return_A) is bool:
        done = launch_again(all_gather_matmul.OP, (gather_dim, return_A), (A_shard, *Bs), name)
        if done is not None:
            return (done.pop() if return_A else None), done
        if needs_autograd_alone(A_shard, *Bs):  # without the dispatcher; the op checks what it is given
            call = all_gather_matmul.AllGatherMatmulCall(A_shard, [*Bs], gather_dim, name, return_A)
            return ALL_GATHER_MATMUL.with_gradient(call)
    matrices = validation.tensors("Bs", Bs)
    return call_op("all_gather_matmul", group, A_shard, matrices, gather_dim, return_A=return_A)


def fused_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    reduce_op: ReduceOp,
    scatter_dim: int,
    group: Group = None,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``reduce_scatter(A @ B, reduce_op, scatter_dim) + bias + residual``: a part travels while the next is computed.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_matmul_reduce_scatter
    >>> rank, W = dist.get_rank(), dist.get_world_size()
    >>> x, w = torch.randn(4 * W, 8), torch.randn(8, 6)  # this rank's columns [M, K / W], and rows of the weight
    >>> y = fused_matmul_reduce_scatter(x, w, "sum", 0)
    >>> total = x @ w
    >>> dist.all_reduce(total)
    >>> torch.testing.assert_close(y, total.chunk(W)[rank])

    On CUDA finished tiles are stored in the memory of the rank that owns them; each rank computes its local tiles a
    wave later and adds what has arrived, bias and residual. Small outputs are exchanged in one shot after cuBLAS.
    Partial products are summed in float32, in rank order: the same bits in every run. ``bias`` and ``residual`` are
    added to that sum, for "avg" after the division, before it is rounded: once, by every kernel as it writes the
    result, those of float32 on CUDA too. (Where the call runs unfused, the backend has rounded its sum before.)

    Differentiable. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes, but for
    K between CPU ranks (on CUDA all sizes choose the kernel). The
    first five arguments are those of ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    Args:
        A: [..., K], 2 or more dimensions; float32, bfloat16 or float16; any strides.
        B: [K, N] of the same dtype.
        reduce_op: "sum", or "avg" for the sum divided by the number of ranks; also as a torch.distributed.ReduceOp.
        scatter_dim: the dimension of ``A @ B`` that is cut into one part a rank; may be negative. Its size must be a
            multiple of the number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        out_dtype: of the result: that of A, or float32. On CUDA partial products travel in A's dtype in any case.
        bias: what every row of the local part gets, as long as a row: [N], or of a scattered last dimension [N / W],
            the part of this rank's columns; of A's dtype. One of [N] is taken to be the same on all ranks: its gradient
            is that of the whole result, summed over the ranks, in float32. All ranks pass one or none does.
        residual: what the local part gets; of its shape, of A's dtype. All ranks pass one or none does.

    Returns:
        the local part, contiguous.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and out_dtype is None and type(reduce_op) is str and type(scatter_dim) is int:
        how: tuple[int | str, ...] = scatter_dim, reduce_op
        terms = [term for term in (bias, residual) if term is not None]
        if terms:
            how = *how, bias is not None, residual is not None, 0
        done = launch_again(matmul_reduce_scatter.OP, how, (A, B, *terms), name)
        if done is not None:
            return done[0]
        if needs_autograd_alone(A, B, *terms):
            more = None, bias, residual
            return MATMUL_REDUCE_SCATTER.with_gradient(
                matmul_reduce_scatter.MatmulReduceScatterCall(A, B, reduce_op, scatter_dim, name, *more)
            )
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        shown = "a tensor" if isinstance(out_dtype, Tensor) else repr(out_dtype)
        raise TypeError(f"out_dtype: is {shown}, must be a torch.dtype")
    given = A, B, validation.reduction(reduce_op), scatter_dim
    named = {"out_dtype": out_dtype, "bias": bias, "residual": residual}
    return call_op("matmul_reduce_scatter", group, *given, **named)


def one_shot_all_reduce(x: Tensor, reduce_op: ReduceOp, group: Group = None) -> Tensor:
    """``all_reduce(x, reduce_op)``, the same bits on every rank.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> x = torch.full((3,), float(dist.get_rank()))
    >>> bool((one_shot_all_reduce(x, "max") == dist.get_world_size() - 1).all())
    True

    Every rank pushes its x to every rank, by the LL protocol (data as flag), which needs no barrier; larger inputs go
    by parts, in one launch. Reduced in float32, in rank order, rounded once: the same bits also in every run and from
    every algorithm.

    Differentiable for "sum" and "avg": the gradient is all-reduced, as by torch's functional collectives. Works under
    torch.compile and in a CUDA graph. The signature is that of ``torch.ops.symm_mem.one_shot_all_reduce``.

    Args:
        x: any shape, strides and alignment; float32, bfloat16 or float16. It need not lie on the heap.
        reduce_op: "sum", "avg" for the sum divided by the number of ranks, "max" or "min" (NaN if one of them is);
            also as a torch.distributed.ReduceOp.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        a new contiguous tensor.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(reduce_op) is str:
        results = launch_again(OP, reduce_op, (x,), name, KINDS)
        if results is not None:
            return results[0]
        if needs_autograd_alone(x):
            return ALL_REDUCE.with_gradient(all_reduce.AllReduceCall(x, reduce_op, name))
    return call_op("all_reduce", group, x, validation.reduction(reduce_op, validation.ALL_REDUCE_OPS))


def one_shot_all_reduce_(x: Tensor, reduce_op: ReduceOp, group: Group = None) -> Tensor:
    """``x = all_reduce(x, reduce_op)``: ``one_shot_all_reduce`` in place.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import one_shot_all_reduce_
    >>> x = torch.ones(3)
    >>> one_shot_all_reduce_(x, "sum") is x
    True
    >>> bool((x == dist.get_world_size()).all())
    True

    Args:
        x: as for ``one_shot_all_reduce``; overwritten. It must not require a gradient.
        reduce_op: as for ``one_shot_all_reduce``.
        group: as for ``one_shot_all_reduce``.

    Returns:
        ``x``.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``one_shot_all_reduce``. What ``x`` holds after an error
            between ranks is worth nothing: a part of it may be overwritten already.
    """
    name = known_name(group)
    if name is not None and type(reduce_op) is str:
        done = launch_again(IN_PLACE, reduce_op, (x,), name, KINDS)
        if done is not None:
            return x
    call_op("all_reduce_", group, x, validation.reduction(reduce_op, validation.ALL_REDUCE_OPS))
    return x


def fused_matmul_all_reduce(A: Tensor, B: Tensor, reduce_op: ReduceOp, group: Group = None) -> Tensor:
    """``all_reduce(A @ B, reduce_op)``: overlapped where one kernel takes it, else one after the other.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_matmul_all_reduce
    >>> x, w = torch.randn(4, 8), torch.randn(8, 6)  # this rank's columns [M, K / W], and rows of the weight
    >>> y = fused_matmul_all_reduce(x, w, "sum")
    >>> total = x @ w
    >>> dist.all_reduce(total)
    >>> torch.testing.assert_close(y, total)

    On CUDA up to 16 rows, and large products, of 16 bits are one kernel, which sends partial sums to the other ranks
    as they are made; else cuBLAS, then the all-reduce in place. Partial products are summed in float32, in rank order,
    and rounded once: the same bits on every rank and in every run. To be sent they are rounded to the dtype; the local
    part of a large product is not.

    Differentiable. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes, but for
    K between CPU ranks (on CUDA all sizes choose the kernel).

    Args:
        A: [..., K], 2 or more dimensions; float32, bfloat16 or float16; any strides.
        B: [K, N] of the same dtype.
        reduce_op: "sum", or "avg" for the sum divided by the number of ranks; also as a torch.distributed.ReduceOp.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        [..., N], contiguous.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(reduce_op) is str:
        done = matmul_all_reduce.fast_matmul_all_reduce(A, B, reduce_op, name)
        if done is not None:
            return done
        if needs_autograd_alone(A, B):
            call = matmul_all_reduce.MatmulAllReduceCall(A, B, reduce_op, name)
            return MATMUL_ALL_REDUCE.with_gradient(call)
    return call_op("matmul_all_reduce", group, A, B, validation.reduction(reduce_op))
