"""Products around an all-to-all, and before an all-gather, as functions; collectives.py has these alone."""

from __future__ import annotations

from torch import Tensor

from ..kernels.all_gather_matmul.configs import EXCHANGED_OP
from ..kernels.matmul_all_gather import OP
from ..kernels.matmul_reduce_scatter.configs import APART_OP
from ..symm_mem import Group
from .dispatch.callers import known_name
from .dispatch.launch_cache import launch_again
from .library.call import call_op


def fused_matmul_all_to_all(A: Tensor, B: Tensor, gather_dim: int, group: Group = None) -> Tensor:
    """``one_shot_all_to_all(A @ B, -1, gather_dim)``: this rank's columns of all ranks' products.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_matmul_all_to_all
    >>> W = dist.get_world_size()
    >>> x, w = torch.randn(5, 16), torch.randn(16, 8 * W)  # 5 tokens of the sequence; 8 columns of heads a rank
    >>> q = fused_matmul_all_to_all(x, w, 0)  # the whole sequence, this rank's heads
    >>> q.shape == (5 * W, 8)
    True

    The products before Ulysses attention: each rank has a part of the sequence and all weights, and gets its heads of
    the whole sequence. Of q, k and v each is a call; or B has for each rank its columns of all three side by side.

    On Hopper 16-bit operands take one kernel, which sends each tile to the rank that it is for as soon as it is
    multiplied; small or other products are cuBLAS's, with ``one_shot_all_to_all``'s kernel after them. Rounded once, to
    A's dtype.

    Differentiable; the gradient is a ``fused_all_to_all_matmul``. Works under torch.compile and in a CUDA graph. Every
    rank must call it with the same shapes.

    Args:
        A: [..., K], 2 or more dimensions, any strides; float32, bfloat16 or float16.
        B: [K, N] of A's dtype, of which rank r's results have the r-th part of the columns. N must be a multiple of the
            number of ranks.
        gather_dim: the dimension along which the ranks' rows are joined, not the last one; may be negative.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        a new tensor, in memory with ``gather_dim`` in front.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(gather_dim) is int:
        done = launch_again(APART_OP, gather_dim, (A, B), name)
        if done is not None:
            return done[0]
    return call_op("matmul_all_to_all", group, A, B, gather_dim)  # type: ignore[no-any-return]


def fused_all_to_all_matmul(A: Tensor, B: Tensor, scatter_dim: int, group: Group = None) -> Tensor:
    """``one_shot_all_to_all(A, scatter_dim, -1) @ B``: of this rank's rows all ranks' columns, multiplied.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_all_to_all_matmul
    >>> W = dist.get_world_size()
    >>> heads, w = torch.randn(5 * W, 8), torch.randn(8 * W, 16)  # this rank's heads of the whole sequence
    >>> y = fused_all_to_all_matmul(heads, w, 0)  # 5 tokens of the sequence
    >>> y.shape == (5, 16)
    True

    The product after Ulysses attention: each rank has its heads of the whole sequence, and gets its part of the
    sequence.

    On Hopper 16-bit operands take one kernel, which multiplies what has come while it sends the rest; small or other
    products are cuBLAS's, after ``one_shot_all_to_all``'s kernel. Added up in float32, in rank order, rounded once.

    Differentiable; the gradient is a ``fused_matmul_all_to_all``. Works under torch.compile and in a CUDA graph. Every
    rank must call it with the same shapes.

    Args:
        A: [..., K], 2 or more dimensions, any strides; float32, bfloat16 or float16.
        B: [W * K, N] of A's dtype for W ranks, rank 0's rows first.
        scatter_dim: the dimension of which each rank gets a part, not the last one; may be negative. Its size must be a
            multiple of the number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        a new tensor, in memory with ``scatter_dim`` in front.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(scatter_dim) is int:
        done = launch_again(EXCHANGED_OP, (scatter_dim, False), (A, B), name)
        if done is not None:
            return done[0]
    out, _ = call_op("all_to_all_matmul", group, A, B, scatter_dim)
    return out  # type: ignore[no-any-return]


def fused_matmul_all_gather(A: Tensor, B: Tensor, group: Group = None) -> Tensor:
    """``one_shot_all_gather(A @ B, -1)``: the columns of all ranks' products.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_matmul_all_gather
    >>> W = dist.get_world_size()
    >>> x, w = torch.ones(5, 16), torch.randn(16, 8)  # the same tokens on all ranks; this rank's columns of the head
    >>> logits = fused_matmul_all_gather(x, w)
    >>> logits.shape == (5, 8 * W)
    True

    A column-parallel layer whose output is gathered, such as the head of a language model.

    On CUDA the product is cut into pieces, which copy engines send while cuBLAS multiplies the next ones; small ones
    are sent by ``one_shot_all_gather``'s kernel after the product. Rounded once, to A's dtype.

    Differentiable; the gradient begins with a ``one_shot_reduce_scatter``. Works under torch.compile and in a CUDA
    graph. Every rank must call it with the same shapes.

    Args:
        A: [..., K], 2 or more dimensions, any strides; float32, bfloat16 or float16.
        B: [K, N] of A's dtype, this rank's columns.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Returns:
        a new tensor [..., W * N] for W ranks, rank 0's columns first.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None:
        done = launch_again(OP, None, (A, B), name)
        if done is not None:
            return done[0]
    return call_op("matmul_all_gather", group, A, B)  # type: ignore[no-any-return]
