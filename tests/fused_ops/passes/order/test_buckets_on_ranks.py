"""Compiled programs with buckets: gradients are the same bits, and ranks agree on what is in one call."""

from __future__ import annotations

from typing import Any

import torch
from memory_check.verified import verified
from ranks import run_ranks
from sharded_weights import model
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass, Report

c10d = torch.ops._c10d_functional
LAYERS = 3


def trained(rank: int, world: int, settings: list[dict[str, Any]]) -> tuple[list[Tensor], Report, list[str]]:
    torch.manual_seed(rank)
    shards = [(torch.randn(64, 130) / 12).requires_grad_() for _ in range(LAYERS)]
    x = torch.randn(250, 128) / 12
    fusion = FusionPass([], **settings[rank])  # fuses nothing
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, options=fusion.options)

        def step() -> Tensor:
            y = compiled(x, shards)
            y.square().sum().backward()
            return y

        y, codes = run_and_get_code(step)
    grads = [s.grad for s in shards if s.grad is not None]
    assert len(grads) == LAYERS
    return [y.detach(), *grads], fusion.report(), codes


def results_of(ranks: list[tuple[list[Tensor], Report, list[str]]]) -> list[Tensor]:
    return [t for results, _, _ in ranks for t in results]


def test_gradients_are_the_same_bits() -> None:
    plain = run_ranks(trained, 2, [{}, {}])
    settings = {"buckets": True, "reorder": 1.0}
    ranks = run_ranks(verified, 2, trained, [settings, settings])
    for mine, theirs in zip(results_of(ranks), results_of(plain), strict=True):
        assert torch.equal(mine, theirs)
    for _, report, (forward, backward) in ranks:
        assert forward.count("all_gather_into_tensor_coalesced.default([") == 1
        assert backward.count("reduce_scatter_tensor_coalesced.default([") == 1
        assert "all_gather_into_tensor.default(" not in forward
        assert [sum(len(b.of) for b in o.buckets) for o in report.orders] == [LAYERS, LAYERS]
        assert all(o.peak_after <= 2 * o.peak_before and o.after < o.before for o in report.orders)
        assert (report.questions.count, report.questions.fused) == (2, 2)
    # One rank has none: both run what they were given, and say why.
    mixed = run_ranks(trained, 2, [settings, {}])
    for mine, theirs in zip(results_of(mixed), results_of(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert [r.questions.fused for _, r, _ in mixed] == [0, 0]
    assert "ran unfused" in str(mixed[0][1])
