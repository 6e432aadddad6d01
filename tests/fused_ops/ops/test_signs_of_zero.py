"""Between CPU ranks a sum is that of the ranks' terms in their order, bit for bit: of -0.0 it is -0.0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from weft import fused_ops


def zeros(seed: int, *shape: int) -> Tensor:
    """-0.0 in most places, also 0.0 and 1.0."""
    picked = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([-0.0] * 6 + [0.0, 1.0])[picked]


@pytest.mark.parametrize(
    "name",
    [
        "one_shot_all_reduce",
        "fused_all_reduce_rms_norm",
        "fused_all_reduce_rms_norm_quant",
        "fused_all_reduce_layer_norm",
        "fused_matmul_all_reduce",
        "fused_matmul_reduce_scatter",
        "fused_all_gather_matmul",
    ],
)
@on_ranks([2, 3])
def test_negative_zeros_stay(rank: int, size: int, name: str) -> None:
    m, n = 4 * size, 6 * size
    # Of one multiplication each: longer ones begin with 0.0, in torch.mm too.
    a = [zeros(10 + r, m, 1) for r in range(size)]
    b = [torch.rand(1, n, generator=torch.Generator().manual_seed(r)) + 0.5 for r in range(size)]
    residual = torch.full((m, n), -0.0)

    def summed(term: Callable[[int], Tensor]) -> Tensor:
        total = term(0)
        for r in range(1, size):
            total = total + term(r)
        return total

    if name == "one_shot_all_reduce":
        got, want = fused_ops.one_shot_all_reduce(a[rank], "sum", None), summed(lambda r: a[r])
    elif name.startswith("fused_all_reduce"):
        x = [zeros(20 + r, m, n) for r in range(size)]
        if "quant" in name:
            *_, got = fused_ops.fused_all_reduce_rms_norm_quant(x[rank], residual, torch.ones(n), 1e-5, None)
        elif "rms" in name:
            _, got = fused_ops.fused_all_reduce_rms_norm(x[rank], residual, torch.ones(n), 1e-5, None)
        else:
            _, got = fused_ops.fused_all_reduce_layer_norm(x[rank], residual, None, None, 1e-5, None)
        want = summed(lambda r: x[r]) + residual
        assert torch.equal(bits(fused_ops.one_shot_all_reduce(x[rank], "sum", None) + residual), bits(want))
    elif name == "fused_matmul_all_reduce":
        got = fused_ops.fused_matmul_all_reduce(a[rank], b[rank], "sum", None)
        want = summed(lambda r: torch.mm(a[r], b[r]))
    elif name == "fused_matmul_reduce_scatter":
        got = fused_ops.fused_matmul_reduce_scatter(a[rank], b[rank], "sum", 0, None, residual=residual[:4])
        want = summed(lambda r: torch.mm(a[r], b[r])).chunk(size)[rank] + residual[:4]
    else:
        B = torch.cat(b)
        got = fused_ops.fused_all_gather_matmul(a[rank], [B], 1, None)[1][0]
        want = summed(lambda r: torch.mm(a[r], b[r]))
    assert torch.signbit(want).any() and not torch.signbit(want).all(), "it shows something"
    assert torch.equal(bits(got), bits(want))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)
