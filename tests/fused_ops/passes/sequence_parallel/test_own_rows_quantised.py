"""All-reduce, norm, quantisation to fp8, scaled product: on own rows, and as one op with the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import RS, copied, fake_ranks
from ranks import run_ranks
from scaled_graphs import AGS, BF16, by_rows, saturated, times
from spelled import ar
from test_sequence_parallel import graph_of, results
from torch import Tensor
from torch_versions import needs_row_wise_products
from weft.fused_ops import FusionPass

QUANT = "weft::fused_all_reduce_rms_norm_quant"
ROWS, INNER, HIDDEN, COLUMNS = 12, 32, 64, 48


def normed(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's, with the sum that it stores."""
    wide = ar(x @ w).to(torch.float32) + r
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y.to(BF16) * n, wide.to(BF16)


def static(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor, s: Tensor) -> Tensor:
    y, _ = normed(x, w, r, n)
    q = saturated(y.to(torch.float32) * s.reciprocal())
    return times(q, v, s, s.new_ones(()))


def row_wise(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor, s: Tensor) -> Tensor:
    q, scale = by_rows(normed(x, w, r, n)[0])
    return times(q, v, scale, s.new_ones(1, COLUMNS))


def layers(x: Tensor, w: Tensor, r: Tensor, n: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """The residual stays on own rows."""
    for _ in range(2):
        y, r = normed(x, w, r, n)
        z = times(saturated(y.to(torch.float32) * s.reciprocal()), v, s, s.new_ones(()))
        x = z[:, :INNER].contiguous()
    return z


def inputs(rank: int) -> list[Tensor]:
    own, shared = torch.Generator().manual_seed(5 + rank), torch.Generator().manual_seed(4)
    x, w = torch.randn(ROWS, INNER, generator=own), torch.randn(INNER, HIDDEN, generator=own)
    r, n = torch.randn(ROWS, HIDDEN, generator=shared), torch.randn(HIDDEN, generator=shared)
    v = torch.randn(COLUMNS, HIDDEN, generator=own).to(torch.float8_e4m3fn)
    return [*(t.to(BF16) for t in (x, w, r, n)), v, torch.tensor(0.02)]


def compared(rank: int, world: int, fn: Callable[..., Any], setting: bool) -> Any:
    given = inputs(rank)
    traced, fusion = graph_of(fn, given), FusionPass(sequence_parallel=setting)
    after = copied(traced.graph)
    fusion(after)
    exact, errors = unquantised(2 if fn is layers else 1, *given[:5]), []
    for graph in (after, traced.graph):
        (got,) = results(graph, given)
        assert (got.shape, got.dtype) == (exact.shape, BF16)
        errors.append(((got.double() - exact).norm() / exact.norm()).item())
    return [e.fused_into for e in fusion.report().entries], errors, fusion.report().details()


def unquantised(count: int, *given: Tensor) -> Tensor:
    """In float64."""
    x, w, r, n, v = (t.double() for t in given)
    for _ in range(count):
        r = ar(x @ w) + r
        z = r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6) * n @ v.t()
        x = z[:, :INNER].contiguous()
    return z


def check(fn: Callable[..., Any], setting: bool, want: list[str]) -> None:
    for fused, (with_it, without), text in run_ranks(compared, 2, fn, setting):
        assert fused == want, text
        # What 8 bits cut off, of numbers that were rounded otherwise now and then.
        assert 0.01 < without < 0.1
        assert with_it < 1.1 * without, (with_it, without)


# Of each layer; row-wise scales travel with the rows.
TAKEN = {static: [RS, AGS], row_wise: [RS, AGS, AGS], layers: [RS, AGS] * 2}
FORMS = [pytest.param(fn, marks=needs_row_wise_products) if fn is row_wise else fn for fn in TAKEN]


@pytest.mark.parametrize("fn", FORMS)
def test_fp8_is_gathered(fn: Callable[..., Any]) -> None:
    check(fn, True, TAKEN[fn])


@pytest.mark.parametrize("fn", FORMS)
def test_without_it_the_norm_is_fused_with_what_quantises_it(fn: Callable[..., Any]) -> None:
    check(fn, False, [QUANT] * (2 if fn is layers else 1))


def test_what_is_gathered_has_8_bits() -> None:
    with fake_ranks(2):
        graph = copied(graph_of(static, inputs(0)).graph)
        FusionPass(agree=False, sequence_parallel=True)(graph)
    (op,) = graph.find_nodes(op="call_function", target=torch.ops.weft.fused_all_gather_scaled_matmul.default)
    shard = op.args[0].meta["val"]
    assert (shard.dtype, tuple(shard.shape)) == (torch.float8_e4m3fn, (ROWS // 2, HIDDEN))
