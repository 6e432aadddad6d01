"""The ops of fp8 operands and their scales as functions; functional.py has those of other dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..symm_mem import Group
from . import validation
from .dispatch.callers import known_name
from .functional import ReduceOp
from .library.call import call_op
from .ops import ALL_GATHER_SCALED_MATMUL, SCALED_MATMUL_REDUCE_SCATTER
from .ops.all_gather_scaled_matmul import AllGatherScaledMatmulCall
from .ops.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatterCall
from .scaled_calls import output_dtype

_LISTS = (list, tuple)
_DEFAULTS = (None, None, None, False)  # of biases, result_scales, out_dtypes and use_fast_accum


def fused_all_gather_scaled_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group: Group = None,
    biases: Sequence[Tensor | None] | None = None,
    result_scales: Sequence[Tensor | None] | None = None,
    out_dtypes: Sequence[torch.dtype | None] | None = None,
    use_fast_accum: Sequence[bool] | None = None,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """``A = all_gather(A_shard, gather_dim)`` in fp8, with its scales, and ``torch._scaled_mm(A, B, ...)`` for each B.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_all_gather_scaled_matmul
    >>> def quantised(x):  # with a scale for each row
    ...     scale = x.abs().amax(1, keepdim=True) / 448
    ...     return (x / scale).to(torch.float8_e4m3fn), scale
    >>> (x, x_scale), (w, w_scale) = quantised(torch.randn(5, 32)), quantised(torch.randn(48, 32))  # w: [N, K]
    >>> A, (y,) = fused_all_gather_scaled_matmul(x, [w.t()], x_scale, [w_scale.t()], 0)
    >>> y.shape == (5 * dist.get_world_size(), 48), y.dtype, A.dtype
    (True, torch.bfloat16, torch.float8_e4m3fn)

    What is sent has a byte a number. Products are accumulated and scaled in float32, and rounded once. Along the last
    dimension the ranks' parts of a product are summed in float32, in rank order. Not differentiable. Works under
    torch.compile. Every rank must call it with the same shapes. Names and order of the arguments are those of
    ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.

    Args:
        A_shard: [..., K], 2 or more dimensions; torch.float8_e4m3fn or float8_e5m2; any strides. K is a multiple of 16.
        Bs: matrices [K, N_i] of this rank, column-major (the ``.t()`` of [N_i, K]), N_i a multiple of 16; for the last
            dimension [world_size * K, N_i]. fp8 like A; not both of e5m2.
        A_scale: float32. Tensor-wise one element, which counts for all ranks' rows; row-wise ``(*A_shard.shape[:-1],
            1)``, of the own rows, which is gathered, or of all ranks' rows; block-wise ``(*A_shard.shape[:-1], K /
            128)``, rounded up, which is gathered.
        B_scales: of each B float32, to go with A_scale: one element; [1, N_i]; [K / 128, N_i / 128], both rounded up.
        gather_dim: the dimension along which the shards are joined, in rank order; may be negative.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        biases: for each B [N_i] of the result's dtype, which is then no float32, or None.
        result_scales: for each B one float32 or None. As in torch it is for fp8 results: it makes no difference here.
        out_dtypes: for each B torch.bfloat16, which None stands for, float16 or float32.
        use_fast_accum: for each B whether products may be accumulated in the tensor cores' own precision.
        return_A: whether the gathered A is wanted, too.

    Returns:
        A (None without ``return_A``) and the products [..., N_i]. They are contiguous once ``gather_dim`` is moved to
        the front; for the last dimension as they are.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    known, lists = known_name(group), (biases, result_scales, out_dtypes, use_fast_accum)
    exact = (
        type(Bs) in _LISTS and type(B_scales) in _LISTS and type(gather_dim) is int and type(return_A) is bool
    )
    if known is not None and exact and all(given is None or type(given) in _LISTS for given in lists):
        of_each = [
            (default,) * len(Bs) if of is None else of for of, default in zip(lists, _DEFAULTS, strict=True)
        ]
        args: Any = (A_shard, Bs, A_scale, B_scales, gather_dim, known, *of_each, return_A)
        call = AllGatherScaledMatmulCall(*args)
        if (done := ALL_GATHER_SCALED_MATMUL.fast(call)) is not None:
            return done  # type: ignore[no-any-return]
    matrices, scales = validation.tensors("Bs", Bs), validation.tensors("B_scales", B_scales)
    count = len(matrices)
    of_each = [_for_each(*named, count) for named in (("biases", biases), ("result_scales", result_scales))]
    for name, given in zip(("biases", "result_scales"), of_each, strict=True):
        for i, value in enumerate(given):
            if value is not None:
                validation.tensor(f"{name}[{i}]", value)
    dtypes = _for_each("out_dtypes", out_dtypes, count)
    dtypes = [output_dtype(f"out_dtypes[{i}]", dtype) for i, dtype in enumerate(dtypes)]
    fast = [False] * count if use_fast_accum is None else _for_each("use_fast_accum", use_fast_accum, count)
    validation.flags(**{f"use_fast_accum[{i}]": value for i, value in enumerate(fast)})
    named = {"biases": of_each[0], "result_scales": of_each[1], "out_dtypes": dtypes, "use_fast_accum": fast}
    operands = A_shard, matrices, A_scale, scales, gather_dim
    return call_op("all_gather_scaled_matmul", group, *operands, **named, return_A=return_A)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: ReduceOp,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``reduce_scatter(torch._scaled_mm(A, B, ...), reduce_op, scatter_dim)`` of fp8 operands.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_scaled_matmul_reduce_scatter
    >>> W, one = dist.get_world_size(), torch.ones(())
    >>> x, w = torch.randn(3 * W, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn)  # w: [N, K]
    >>> y = fused_scaled_matmul_reduce_scatter(x, w.t(), one, one, "sum", 0)
    >>> total = x.float() @ w.float().t()
    >>> dist.all_reduce(total)
    >>> torch.testing.assert_close(y, total.chunk(W)[dist.get_rank()].bfloat16(), rtol=0.02, atol=0.1)

    A part travels while the next is computed. Partial products are accumulated, scaled and given their bias in float32;
    rounded to the result's dtype to be sent; summed in float32, in rank order, and rounded once: the same bits in every
    run. (Where the call runs unfused, the backend sums.) Not differentiable. Works under torch.compile. Every rank must
    call it with the same shapes. ``torch.ops.weft.fused_scaled_matmul_reduce_scatter`` has the arguments of
    ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``.

    Args:
        A: [..., K], 2 or more dimensions; torch.float8_e4m3fn or float8_e5m2; any strides. K is a multiple of 16.
        B: [K, N], column-major (the ``.t()`` of [N, K]), N a multiple of 16. fp8 like A; not both of e5m2.
        A_scale: float32. Tensor-wise one element; row-wise ``(*A.shape[:-1], 1)``; block-wise ``(*A.shape[:-1], K /
            128)``, rounded up.
        B_scale: float32, to go with A_scale: one element; [1, N]; [K / 128, N / 128], both rounded up.
        reduce_op: "sum", or "avg" for the sum divided by the number of ranks; also as a torch.distributed.ReduceOp.
        scatter_dim: the dimension of ``A @ B`` that is cut into one part a rank; may be negative. Its size must be a
            multiple of the number of ranks.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        bias: [N] of the result's dtype, which is then no float32; each rank's partial product gets its own.
        out_dtype: torch.bfloat16, which None stands for, float16 or float32; partial products travel in it.
        use_fast_accum: whether products may be accumulated in the tensor cores' own precision.

    Returns:
        the local part, contiguous.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    known, exact = known_name(group), type(reduce_op) is str and type(scatter_dim) is int
    if known is not None and exact and type(use_fast_accum) is bool:
        more = None, bias, None, out_dtype, use_fast_accum
        args: Any = (A, B, A_scale, B_scale, reduce_op, scatter_dim, scatter_dim, known, *more)
        made = ScaledMatmulReduceScatterCall(*args)
        if (sent := SCALED_MATMUL_REDUCE_SCATTER.fast(made)) is not None:
            return sent  # type: ignore[no-any-return]
    validation.tensor("A", A, 2)
    validation.dimension("scatter_dim", scatter_dim, "A", A.dim())
    dtype = output_dtype("out_dtype", out_dtype)
    given = A, B, A_scale, B_scale, validation.reduction(reduce_op), scatter_dim, scatter_dim
    named: Any = {"output_shape": None, "bias": bias, "out_dtype": dtype, "use_fast_accum": use_fast_accum}
    return call_op("scaled_matmul_reduce_scatter", group, *given, **named)  # type: ignore[no-any-return]


def _for_each(name: str, values: Any, count: int) -> list[Any]:
    """An element for each B; None where nothing is given."""
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{name}: is of type {type(values).__name__}, must be a list with an element for each B"
        )
    return list(values)
