"""accelerate: its list of backends is closed, so the pass comes by TorchDynamoPlugin's options."""

from __future__ import annotations

import pytest
import torch
import weft
from opcommon import check, gather, world
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as funcol

pytest.importorskip("accelerate")

IN, OUT, BOUND = 12, 9, 1e-5


class Scatters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IN, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor_autograd(x @ self.weight, "sum", 0, world())


def accelerate_trains(rank: int, size: int) -> int:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    fusion, model = weft.FusionPass(), Scatters()
    start = model.weight.detach().clone()
    plugin = TorchDynamoPlugin(backend="inductor", options=fusion.options)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with inductor_config.patch(force_disable_caches=True):
        ready, optimizer = accelerator.prepare(model, optimizer)
        x = torch.randn(4 * size, IN)
        y = ready(x)
        parts = [p.chunk(size)[rank] for p in gather(x.double() @ start.double())]
        # Ranks hold different weights: each reduces its own.
        check("y", y, torch.stack(parts).sum(0), BOUND, parts)
        accelerator.backward(y.sum())
        optimizer.step()
    gradient = x.double().sum(0)[:, None].expand(IN, OUT)
    check("weight", model.weight.detach(), start.double() - 0.5 * gradient, BOUND)
    torch._dynamo.reset()
    return fusion.report().fused


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerate() -> None:
    assert min(run_ranks(accelerate_trains, 2, fresh=True, timeout=500)) >= 1
