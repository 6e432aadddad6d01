"""All-reduces with the norm after them, as functions; functional.py has the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.all_reduce_rms_norm import OP
from ..symm_mem import Group
from .dispatch.callers import known_name
from .dispatch.launch_cache import launch_again
from .dispatch.stand_alone import KINDS
from .library.call import call_op
from .ops import ALL_REDUCE_LAYER_NORM, ALL_REDUCE_RMS_NORM_QUANT
from .ops.all_reduce_rms_norm import AllReduceLayerNormCall
from .ops.all_reduce_rms_norm_quant import AllReduceRmsNormQuantCall, QuantResult, validate_quantization


def fused_all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """``sums = residual + all_reduce(x)`` and ``normed = sums / sqrt(mean(sums ** 2) + eps) * weight``, row by row.

    >>> import torch
    >>> from torch.nn.functional import rms_norm
    >>> from weft.fused_ops import fused_all_reduce_rms_norm, one_shot_all_reduce
    >>> x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    >>> normed, sums = fused_all_reduce_rms_norm(x, residual, weight, 1e-6)
    >>> torch.equal(sums, residual + one_shot_all_reduce(x, "sum"))
    True
    >>> torch.testing.assert_close(normed, rms_norm(sums, (8,), weight, 1e-6))

    One kernel on CUDA: a cluster of thread blocks receives a row, adds the residual and norms the row in float32.
    ``sums`` is bit for bit ``one_shot_all_reduce(x, "sum", group) + residual``, on each rank of its own residual. So
    ranks whose residuals and weights are equal get the same bits.

    Differentiable; gradients are taken at the rounded sum. Works under torch.compile and in a CUDA graph. Every rank
    must call it with the same shapes. The norm is `RMSNorm <https://arxiv.org/abs/1910.07467>`_ (Zhang and Sennrich,
    2019).

    Args:
        x: [..., hidden], any strides; float32, bfloat16 or float16.
        residual: like x; the ranks' may differ. None adds nothing.
        weight: [hidden], of the dtype of x or float32; the ranks' may differ.
        eps: 0 or more.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        weight_offset: is added to the weight, in float32: 1 for Gemma's norms.
        round_sum: whether the norm is that of ``sums``, which are rounded to the dtype of x. If not, it is that of the
            all-reduced x, rounded, and the residual, added in float32, as in vLLM's models.

    Returns:
        (normed, sums), contiguous, of the dtype of x; sums is the next residual.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(eps) is float and type(weight_offset) is float and type(round_sum) is bool:
        norm = eps if round_sum and weight_offset == 0 else (eps, weight_offset, round_sum)
        tensors = (x, weight) if residual is None else (x, residual, weight)
        done = launch_again(OP, norm, tensors, name, KINDS)
        if done is not None:
            return done[0], done[1]
    named: Any = {"weight_offset": weight_offset, "round_sum": round_sum}
    return call_op("all_reduce_rms_norm", group, x, residual, weight, eps, **named)  # type: ignore[no-any-return]


def fused_all_reduce_rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: Group = None,
    *,
    scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_op: str = "reciprocal",
    smallest: float | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``normed`` and ``sums`` of ``fused_all_reduce_rms_norm``, and ``normed`` in fp8 instead of itself.

    >>> import torch
    >>> from weft.fused_ops import fused_all_reduce_rms_norm, fused_all_reduce_rms_norm_quant
    >>> x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    >>> quantized, scales, sums = fused_all_reduce_rms_norm_quant(x, residual, weight, 1e-6)
    >>> normed, _ = fused_all_reduce_rms_norm(x, residual, weight, 1e-6)
    >>> torch.equal(scales, (normed.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512)))
    True
    >>> steps = (normed * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    >>> torch.equal(quantized.float(), steps.float())
    True

    One kernel on CUDA. The norm is rounded to the dtype of x before it is quantised in float32: numbers and scales are
    bit for bit those of the steps after ``fused_all_reduce_rms_norm``, whose divisions are rounded correctly.
    ``largest`` is that of out_dtype; what is beyond it becomes it. By ``scale_op``:

    - "reciprocal", as in vLLM: ``normed * (1 / scale)``; the scale of a row is ``max(amax / largest, smallest)``.
    - "divide", as in torchao's ``quantize_``: ``normed / scale``; the scale of a row is ``max(amax, smallest) /
      largest``, both in the dtype of x.
    - "multiply", as in torchao's Float8Linear: ``normed * scale``; the scale of a row is ``largest / max(amax,
      smallest)``, in float64. What the numbers are multiplied by again is its reciprocal.

    A NaN in a row's norm makes its scale and all of its numbers NaN. So are the numbers of a row of zeros where
    smallest is 0 (with "divide" 1e-12 is, in float16). Beside what is infinite, which becomes NaN, others become 0.

    Not differentiable. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes.

    Args:
        x: [..., hidden], any strides; float32, bfloat16 or float16.
        residual: like x; the ranks' may differ. None adds nothing.
        weight: [hidden], of the dtype of x or float32; the ranks' may differ.
        eps: 0 or more.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        scale: float32, one element, of all rows; the ranks' may differ. None makes one for each row of amax, the
            largest absolute value of its norm.
        out_dtype: torch.float8_e4m3fn or float8_e5m2.
        scale_op: "reciprocal", "divide" or "multiply".
        smallest: 0 or more; only without a scale. None is what the libraries take: ``1 / (512 * largest)`` for
            "reciprocal", else 1e-12.
        weight_offset: is added to the weight, in float32: 1 for Gemma's norms.
        round_sum: as for ``fused_all_reduce_rms_norm``.

    Returns:
        (quantized, scales, sums): of out_dtype like x; the scale that is given, or float32 [..., 1]; like x. All but a
        given scale are contiguous.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    quant = scale, out_dtype, scale_op, smallest
    exact = type(eps) is type(weight_offset) is float and type(round_sum) is bool
    exact = exact and type(out_dtype) is torch.dtype and type(scale_op) is str
    if name is not None and exact and type(smallest) in (float, type(None)):
        args: Any = (x, residual, weight, eps, name, *quant, weight_offset, round_sum)
        call = AllReduceRmsNormQuantCall(*args)
        done = ALL_REDUCE_RMS_NORM_QUANT.fast(call)
        if done is not None:
            return _with_scale(done, scale)
    validate_quantization(out_dtype, scale_op)
    named: Any = {"scale": scale, "out_dtype": out_dtype, "scale_op": scale_op, "smallest": smallest}
    named |= {"weight_offset": weight_offset, "round_sum": round_sum}
    return _with_scale(call_op("all_reduce_rms_norm_quant", group, x, residual, weight, eps, **named), scale)


def _with_scale(results: QuantResult, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    quantized, scales, sums = results
    found = scale if scales is None else scales
    assert found is not None, "of the two one is there"
    return quantized, found, sums


def fused_all_reduce_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``sums = residual + all_reduce(x)`` and ``normed = layer_norm(sums, (hidden,), weight, bias, eps)``, row by row.

    >>> import torch
    >>> from torch.nn.functional import layer_norm
    >>> from weft.fused_ops import fused_all_reduce_layer_norm, one_shot_all_reduce
    >>> x, residual, weight, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8), torch.randn(8)
    >>> normed, sums = fused_all_reduce_layer_norm(x, residual, weight, bias, 1e-5)
    >>> torch.equal(sums, residual + one_shot_all_reduce(x, "sum"))
    True
    >>> torch.testing.assert_close(normed, layer_norm(sums, (8,), weight, bias, 1e-5))

    One kernel on CUDA, that of ``fused_all_reduce_rms_norm``: the mean and the variance around it are taken in float32,
    of numbers that are there, so no difference of large squares is taken. ``sums`` and the ranks' bits are as there.

    Differentiable. Works under torch.compile and in a CUDA graph. Every rank must call it with the same shapes. The
    norm is `LayerNorm <https://arxiv.org/abs/1607.06450>`_ (Ba, Kiros and Hinton, 2016).

    Args:
        x: [..., hidden], any strides; float32, bfloat16 or float16.
        residual: like x; the ranks' may differ. None adds nothing.
        weight: [hidden], of the dtype of x or float32; the ranks' may differ. None multiplies by nothing.
        bias: [hidden], of the dtype of the weight, if there is one; the ranks' may differ. None adds nothing.
        eps: 0 or more.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        weight_offset: is added to the weight, in float32: 1 for Nemotron's norms.

    Returns:
        (normed, sums), contiguous, of the dtype of x; sums is the next residual.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
    """
    name = known_name(group)
    if name is not None and type(eps) is float and type(weight_offset) is float:
        call = AllReduceLayerNormCall(x, residual, weight, bias, eps, name, weight_offset)
        if (done := ALL_REDUCE_LAYER_NORM.fast(call)) is not None:
            return done[0], done[1]
    given = x, residual, weight, bias, eps
    return call_op("all_reduce_layer_norm", group, *given, weight_offset=weight_offset)  # type: ignore[no-any-return]
