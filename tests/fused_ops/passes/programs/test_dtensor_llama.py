"""A DTensor Llama, sharded as torchtitan does it: whole or block by block, with and without what can be left out."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import SLOW, Outcome, check, outcomes, program
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

EXAMPLES = str(Path(__file__).parents[4] / "examples")
WORLD, LAYERS, VOCABULARY = 2, 2, 96


@dataclass(frozen=True)
class Case:
    sequence: bool = True
    loss: bool = True
    blocks: bool = False  # compiled one by one, as torchtitan does it
    checkpoint: bool = False  # the backward pass computes again what torchtitan does not save


def selective() -> Any:
    """What torchtitan saves: the outcome of reduce-scatters, and of every second product."""
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in (
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        )
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            save = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def models(batch: int, seq: int) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """A Llama, the same one in float64, and that one's rotary tables."""
    sys.path.insert(0, EXAMPLES)
    from llama_model import Llama, Sizes, rotary_tables

    torch.manual_seed(os.getppid())
    small: dict[str, int] = {"vocabulary": VOCABULARY, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48}
    sizes = Sizes(layers=LAYERS, seq=seq, batch=batch, dtype="float32", **small)
    exact, model = Llama(sizes).double(), Llama(sizes)
    model.load_state_dict(exact.state_dict())
    return model, exact, rotary_tables(sizes, torch.device("cpu"))


def step(model: Any, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens, cos, sin).flatten(0, 1), labels.flatten())


def train(rank: int, world: int, case: Case, codegen: bool) -> Outcome:
    model, exact, tables = models(2, 10)
    from llama_model import shard

    tokens = torch.randint(VOCABULARY, (2, 11))
    given = tokens[:, :-1], tokens[:, 1:]
    step(exact, *given, *tables).backward()

    shard(model, init_device_mesh("cpu", (world,)), case.sequence, case.loss)
    with program(codegen) as p, loss_parallel() if case.loss else contextlib.nullcontext():
        for i in range(LAYERS):
            if case.checkpoint:
                wrapped = checkpoint_wrapper(model.layers[i], context_fn=selective, preserve_rng_state=False)
                model.layers[i] = wrapped
            if case.blocks:
                model.layers[i] = p.compile(model.layers[i], fullgraph=True)
        if case.blocks:
            # Uncompiled it gives a tensor that is still awaited, which torch 2.13's compiled block gives no gradient.
            model.embedding = p.compile(model.embedding, fullgraph=True)
        run = step if case.blocks else p.compile(step, fullgraph=True)
        loss = run(model, *given, *(t.float() for t in tables))
        loss.backward()
        p.compare("loss", loss, step(exact, *given, *tables))
        p.compare_gradients(model, exact)
        return p.outcome()


def expected(case: Case) -> int:
    """How many collectives the graphs have. All of them can be fused."""
    # One graph serves all blocks that are compiled by themselves.
    layers = 1 if case.blocks else LAYERS
    # Before attention and feed-forward and after them, forward and backward; without sequence parallelism after
    # them only, and backward each column-wise layer has its own.
    fused = (8 if case.sequence else 2 + 5) * layers
    if case.checkpoint:
        fused += 2 * layers  # gathered again
    # What the embedding's rows are scattered with, and their gradients gathered, alone; or they are all-reduced.
    fused += 2 if case.sequence else 1
    if not case.blocks:
        fused += 2 if case.sequence else 1  # of the head
        # Maximum, sum and the label's logit of each row; or the logits, gathered along the vocabulary.
        fused += 3 if case.loss else 1
    return fused


CASES = {
    "whole": Case(),
    "without sequence parallelism": Case(sequence=False),
    "blocks, checkpointed": Case(blocks=True, checkpoint=True),
    "whole, checkpointed": Case(checkpoint=True),
    "without loss parallelism": Case(loss=False),
    "neither": Case(sequence=False, loss=False),
}


@pytest.mark.parametrize(
    ("case", "codegen"),
    [
        *(
            pytest.param(c, False, id=n, marks=[] if i < 3 else SLOW)
            for i, (n, c) in enumerate(CASES.items())
        ),
        *(pytest.param(c, True, id=f"{n}, inductor", marks=SLOW) for n, c in CASES.items()),
    ],
)
def test_training(case: Case, codegen: bool) -> None:
    check(outcomes(train, WORLD, case, codegen), expected(case), [])
