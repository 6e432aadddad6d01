"""A vocabulary that the ranks cannot share evenly: DTensor pads what it gathers."""

from __future__ import annotations

import os
from typing import Any

import torch
from compiled import CODEGEN, Outcome, check, outcomes, program
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

WORLD, VOCABULARY, DIM, ROWS = 2, 37, 16, 9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embedding(tokens).sin())


def train(rank: int, world: int, codegen: bool) -> Outcome:
    torch.manual_seed(os.getppid())
    exact = Model().double()
    model = Model()
    model.load_state_dict(exact.state_dict())
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    tokens = torch.randint(VOCABULARY, (ROWS,))
    with program(codegen) as run:
        got, want = run.compile(model)(tokens), exact(tokens)
        run.compare("logits", got, want)
        F.cross_entropy(got, tokens).backward()
        F.cross_entropy(want, tokens).backward()
        run.compare_gradients(model, exact)
        return run.outcome()


@CODEGEN
def test_logits(codegen: bool) -> None:
    # The embedding's sum, the padded logits; backward the head's sum.
    check(outcomes(train, WORLD, codegen), 3, [])
