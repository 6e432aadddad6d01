"""Lightning Fabric: a module that is compiled by weft and sharded by hand, set up and trained by Fabric."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import weft
from opcommon import check, gather, world
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as funcol

pytest.importorskip("lightning.fabric")

IN, OUT, BOUND = 12, 9, 1e-5


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_gather_tensor_autograd(x, 0, world()) @ self.weight


def fabric_trains(rank: int, size: int, folder: Path, by_pass: bool) -> int:
    """Fabric compiles again what was compiled before it was set up, with the same arguments, deeply copied."""
    from lightning.fabric import Fabric

    os.chdir(folder)
    torch._dynamo.reset()
    fabric = Fabric(accelerator="cpu", devices=1, strategy="auto")
    model, fusion = Gathers(), weft.FusionPass()
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(model, options=fusion.options) if by_pass else weft.compile(model)
        ready, optimizer = fabric.setup(compiled, optimizer)
        x = torch.randn(5, IN)
        y = ready(x)
        check("y", y, torch.cat(gather(x)) @ start.double(), BOUND)
        fabric.backward(y.sum())
        optimizer.step()
    gradient = torch.cat(gather(x)).sum(0)[:, None].expand(IN, OUT)
    check("weight", model.weight.detach(), start.double() - 0.5 * gradient, BOUND)
    torch._dynamo.reset()
    return (fusion.report() if by_pass else weft.passes.fusion_report()).fused


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_pass", [False, True], ids=["weft.compile", "options"])
def test_fabric(by_pass: bool, tmp_path: Path) -> None:
    assert min(run_ranks(fabric_trains, 2, tmp_path, by_pass, fresh=True, timeout=500)) >= 1
