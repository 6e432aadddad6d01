"""Quantisation as torchao and others write it, and the machine of graphs.py with scaled products."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graphs import Ranks
from torch import Tensor, fx

AGS, SRS = "weft::fused_all_gather_scaled_matmul", "weft::fused_scaled_matmul_reduce_scatter"
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
_weft = torch.ops.weft


def all_reduce(x: Tensor, op: str = "max") -> Tensor:
    return funcol.all_reduce(x, op, dist.distributed_c10d._get_default_group())


def scale_of(amax: Tensor, dtype: torch.dtype = E4M3, *, power_of_two: bool = False) -> Tensor:
    """torchao's amax_to_scale: what is multiplied with."""
    scale = (torch.finfo(dtype).max / torch.clamp(amax.to(torch.float64), min=1e-12)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def saturated(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """torchao's to_fp8_saturated."""
    largest = torch.finfo(dtype).max
    return x.clamp(min=-largest, max=largest).to(dtype)


def by_scale(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return saturated(x.to(torch.float32) * scale, dtype)


def by_rows(x: Tensor, dtype: torch.dtype = E4M3, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Numbers and the scale of each row, with which they are multiplied again."""
    scale = scale_of(x.abs().amax(-1, keepdim=True), dtype, power_of_two=power_of_two)
    return by_scale(x, scale, dtype), scale.reciprocal()


def by_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """With a scale for each 128 of a row, as vLLM and DeepSeek have it; scales lie with rows contiguous."""
    rows, k = x.shape
    blocks = x.view(rows, k // 128, 128).to(torch.float32)
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448.0
    numbers = (blocks / scale.unsqueeze(-1)).to(E4M3).view(rows, k)
    return numbers, scale.t().contiguous().t()


def whole_amax(x: Tensor) -> Tensor:
    return torch.max(torch.abs(x))


def times(q: Tensor, w: Tensor, s: Tensor, ws: Tensor, **more: Any) -> Tensor:
    """``w`` is [N, K]."""
    return torch._scaled_mm(q, w.t(), s, ws, **{"out_dtype": BF16, "use_fast_accum": True} | more)


class ScaledRanks(Ranks):
    """With scaled products of what operands stand for; inputs number ``same`` are the same on all ranks."""

    def __init__(self, world: int, *same: int) -> None:
        super().__init__(world)
        self.same = same

    def inputs(self, graph: fx.Graph) -> list[list[Any]]:
        found = super().inputs(graph)
        for of_rank in found:
            for i in self.same:
                of_rank[i] = found[0][i]
        return found

    def call(self, target: Any, args: list[Any]) -> list[Any]:
        if target is torch.ops.aten._scaled_mm.default:
            return [_product(*a[0][:4], *a[0][4:5]) for a in args]
        if target is torch.ops.aten._scaled_mm_v2.default:
            return [_product(*a[0][:2], a[0][2][0], a[0][5][0], a[0][8]) for a in args]
        if target not in (
            _weft.fused_all_gather_scaled_matmul.default,
            _weft.fused_scaled_matmul_reduce_scatter.default,
        ):
            return super().call(target, args)
        assert [a[1]["group_size"] for a in args] == [self.world] * len(args)
        if target is _weft.fused_all_gather_scaled_matmul.default:
            return [self._gathered(a[0], a[1], [b[0] for b in args]) for a in args]
        partial = []
        for (A, B, A_scale, B_scale, *_), _ in args:
            (*lead, k), bias = A.shape, None
            flat_scale = A_scale if A_scale.dim() == 0 else A_scale.flatten(0, -2)
            partial.append(_product(A.reshape(-1, k), B, flat_scale, B_scale, bias).view(*lead, -1))
        for i, (given, _) in enumerate(args):
            if len(given) > 9 and given[9] is not None:
                partial[i] = partial[i] + given[9]
        op, dim = args[0][0][4:6]
        return [p.contiguous() for p in self.reduced(partial, op).chunk(self.world, dim)]

    def _gathered(self, mine: Any, named: Any, of_ranks: list[Any]) -> Any:
        shard, Bs, scale, B_scales, dim, _, biases, *_ = mine
        A = torch.cat([each[0] for each in of_ranks], dim)
        travels = scale.dim() > 0 and scale.shape[:-1] == shard.shape[:-1]
        whole = torch.cat([each[2] for each in of_ranks], dim) if travels else scale
        flat_scale = whole if whole.dim() == 0 else whole.flatten(0, -2)
        front = 0 if dim == A.dim() - 1 else dim
        outs = [
            _product(A.flatten(0, -2), B, flat_scale, s, b).view(*A.shape[:-1], -1)
            for B, s, b in zip(Bs, B_scales, biases, strict=True)
        ]
        laid = [t.movedim(front, 0).contiguous().movedim(0, front) for t in (A, *outs)]
        return (laid[0] if named["return_A"] else None), laid[1:]


def _product(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    (m, k), n = A.shape, B.shape[1]
    if A_scale.numel() > 1 and A_scale.shape[1] > 1:
        A_scale = A_scale.repeat_interleave(128, 1)[:, :k]
        B_scale = B_scale.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    assert A_scale.numel() == 1 or A_scale.shape[0] == m
    total = (A * A_scale) @ (B * B_scale)
    return total if bias is None else total + bias
