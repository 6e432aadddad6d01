"""Rows, and a vocabulary, that the ranks cannot share evenly: DTensor pads what it gathers and scatters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from compiled import CODEGEN, Outcome, check, outcomes, program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, HIDDEN, VOCABULARY = 16, 24, 37


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


def sharded(kind: type[nn.Module], mesh: DeviceMesh, plan: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """The model, and the unsharded one in float64."""
    torch.manual_seed(os.getppid())
    exact, model = kind().double(), kind()
    model.load_state_dict(exact.state_dict())
    return parallelize_module(model, mesh, plan), exact


def train(rank: int, world: int, shape: tuple[int, ...], codegen: bool) -> Outcome:
    rows, mesh = Shard(len(shape) - 1), init_device_mesh("cpu", (world,))
    plan = {
        "norm": SequenceParallel(sequence_dim=rows.dim),
        "up": ColwiseParallel(input_layouts=rows),
        "gate": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
    }
    model, exact = sharded(Model, mesh, plan)
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


class OddVocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embedding(tokens).sin())


def train_logits(rank: int, world: int, codegen: bool) -> Outcome:
    whole = Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    model, exact = sharded(OddVocabulary, init_device_mesh("cpu", (world,)), plan)
    tokens = torch.randint(VOCABULARY, (9,))
    with program(codegen) as run:
        got, want = run.compile(model)(tokens), exact(tokens)
        run.compare("logits", got, want)
        nn.functional.cross_entropy(got, tokens).backward()
        nn.functional.cross_entropy(want, tokens).backward()
        run.compare_gradients(model, exact)
        return run.outcome()


@CODEGEN
def test_logits(codegen: bool) -> None:
    # The embedding's sum, the padded logits; backward the head's sum.
    check(outcomes(train_logits, 2, codegen), 3, [])
