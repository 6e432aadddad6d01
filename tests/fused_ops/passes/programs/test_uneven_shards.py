"""Rows that the ranks cannot share evenly: DTensor pads what it gathers and scatters, beside the products."""

from __future__ import annotations

import os

import pytest
import torch
from compiled import CODEGEN, Outcome, check, outcomes, program
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, HIDDEN = 16, 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.gate = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(torch.relu(self.up(y)) * self.gate(y))


def train(rank: int, world: int, shape: tuple[int, ...], codegen: bool) -> Outcome:
    torch.manual_seed(os.getppid())
    exact = Model().double()
    model = Model()
    model.load_state_dict(exact.state_dict())
    rows = Shard(len(shape) - 1)
    plan = {
        "norm": SequenceParallel(sequence_dim=rows.dim),
        "up": ColwiseParallel(input_layouts=rows),
        "gate": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
    }
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, plan)
    x = torch.randn(*shape, DIM)
    with program(codegen) as run:
        got = run.compile(model)(distribute_tensor(x, mesh, [rows])).full_tensor()
        want = exact(x.double())
        run.compare("result", got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        run.compare_gradients(model, exact)
        return run.outcome()


# Where a shard is empty, the backward of torch before 2.15 is given its padding as a tensor of the forward: it does not
# see that it is 0.
@pytest.mark.parametrize(
    ("world", "shape", "alone"),
    [(2, (7,), 0), (2, (1, 7), 0), (2, (2, 7), 0), (4, (5,), 2), (4, (3, 5), 2)],
    ids=["2 ranks", "of a batch", "of two", "empty shard", "of three"],
)
@CODEGEN
def test_feed_forward(world: int, shape: tuple[int, ...], alone: int, codegen: bool) -> None:
    found = outcomes(train, world, shape, codegen)
    check(found, 5, [])
    assert found[0].text.count("with no product") in (0, alone), found[0].text
