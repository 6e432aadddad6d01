"""Norms whose eps is an attribute, compiled with ``dynamic=True``, which makes an input of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled import run_as_it_is
from graphs import fake_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.norms.eps_as_number import EARLY_SLOT
from weft.fused_ops.passes.pass_sequence import passes_of

NORM = "weft::fused_all_reduce_rms_norm"


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with fake_ranks(2):
        yield


class Norm(nn.Module):
    """Hugging Face's."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(8)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class Layers(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.norms = nn.ModuleList([Norm(1e-6), Norm(1e-5)])
        self.factor, self.checkpointed = 0.5, checkpointed

    def layer(self, x: Tensor, norm: nn.Module) -> Tensor:
        y = x + funcol.all_reduce(x @ self.w, "sum", dist.distributed_c10d._get_default_group())
        return norm(y)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = (
                checkpoint(self.layer, x, norm, use_reentrant=False)
                if self.checkpointed
                else self.layer(x, norm)
            )
        return x * self.factor


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fused_and_compiled_again_for_another_eps(checkpointed: bool) -> None:
    model, fusion = Layers(checkpointed), FusionPass()
    x = torch.randn(4, 8)

    def check(compiled: Any, graphs: int) -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        report = fusion.report()
        assert [e.fused_into for e in report.entries] == [NORM] * 2 * graphs, report
        assert report.runs.graphs == graphs

    compiled = torch.compile(model, options=fusion.options, dynamic=True)
    check(compiled, 1)
    model.factor = 0.25  # which stays an input
    check(compiled, 1)
    for norm in model.norms:
        norm.variance_epsilon = 0.5
    check(compiled, 2)
    # What lies in caches by now is for other numbers.
    torch._dynamo.reset()
    for norm in model.norms:
        norm.variance_epsilon = 2.0
    check(torch.compile(model, options=fusion.options, dynamic=True), 3)


def test_training_has_it_like_a_literal() -> None:
    found = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        fusion = FusionPass()
        with inductor_config.patch({**fusion.options, "fx_graph_cache": False}):
            model = torch.compile(Layers(True), backend=run_as_it_is, dynamic=dynamic)
            model(torch.randn(4, 8)).sum().backward()
        found.append(sorted(str(e.fused_into) for e in fusion.report().entries))
    assert found[0] == found[1] and NORM in found[0]


def test_it_runs_after_the_users_own_pass() -> None:
    others = [lambda graph: None]
    with inductor_config.patch({EARLY_SLOT: others[0]}):
        options = FusionPass().options
    own, ours = passes_of(options[EARLY_SLOT])
    assert own is others[0]
    # torch.compile compares options.
    assert FusionPass().options[EARLY_SLOT] is ours
    assert copy.deepcopy(ours) is ours
    assert pickle.loads(pickle.dumps(ours)) is ours
