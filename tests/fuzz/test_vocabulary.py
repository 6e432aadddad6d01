"""Any arguments to the ops of a shared vocabulary: the right losses, or an error that names the argument; fake tensors
say the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from opcommon import world
from ranks import run_ranks
from references import exact
from torch.utils._pytree import tree_leaves
from weft.fused_ops.dispatch import plan

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of logits below 4, absolute
OPS = ("fused_linear_cross_entropy", "fused_linear_log_probs", "cross_entropy_of_sharded_logits")


@dataclass(frozen=True)
class Vocabulary:
    """All ranks' operands: ``columns`` of each rank, of which one may have none."""

    lead: tuple[int, ...]
    hidden: int
    columns: tuple[int, int]
    dtype: str
    seed: int

    def made(self, op: str, rank: int, sequence: bool) -> dict[str, Any]:
        generator, count = torch.Generator().manual_seed(self.seed), sum(self.columns)
        dtype, first = getattr(torch, self.dtype), self.columns[0] * rank
        x = torch.randn(*self.lead, self.hidden, generator=generator).to(dtype)
        weight = (torch.randn(count, self.hidden, generator=generator) / max(self.hidden, 1)).to(dtype)
        targets = torch.randint(-1, max(count, 1), self.lead, generator=generator)
        mine = weight[first : first + self.columns[rank]]
        made: dict[str, Any] = {"targets": targets.where(targets >= 0, -100), "group": world()}
        if op.endswith("logits"):
            return {"logits_shard": (x.float() @ mine.float().t()).to(dtype), **made}
        return {"x": x.chunk(RANKS)[rank] if sequence else x, "weight_shard": mine, **made}


Case = tuple[str, Vocabulary, dict[str, Any], bool]


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """An op, operands, other arguments that fit, and whether some of all are then exchanged."""
    op, lead = draw(st.sampled_from(OPS)), draw(st.lists(v.sizes, min_size=1, max_size=2))
    named: dict[str, Any] = {"ignore_index": draw(st.sampled_from((-100, 1)))}
    named |= {"softcap": draw(st.sampled_from((None, 2))), "temperature": draw(st.sampled_from((1.0, 2)))}
    if op == "fused_linear_log_probs":
        named["return_entropy"] = draw(st.booleans())
    else:
        named["reduction"] = draw(st.sampled_from(("none", "sum", "mean")))
        named |= {
            "label_smoothing": draw(st.sampled_from((0.0, 0.1, 1))),
            "z_loss": draw(st.sampled_from((0.0, 0.1))),
        }
    if op.startswith("fused") and draw(st.booleans()):
        lead[0] *= RANKS
        named["sequence_dim"] = 0
    columns = draw(v.sizes), draw(st.integers(1, 6))
    vocabulary = Vocabulary(tuple(lead), draw(v.sizes), columns, draw(v.dtypes), draw(v.seeds))
    exchanged = draw(st.integers(0, 2))
    names = [*named, "targets", "group", "vocab_start"]
    names += ["logits_shard"] if op.endswith("logits") else ["x", "weight_shard"]
    for _ in range(exchanged):
        name = draw(st.sampled_from(names))
        bad = v.bad_groups if name == "group" else st.one_of(v.bad_tensors, v.junk, v.numbers)
        named[name] = draw(bad)
    return op, vocabulary, named, exchanged > 0


def attempt(rank: int, world_size: int, case: Case) -> tuple[Any, Any]:
    """What the op says to real and to fake tensors. Whatever it says, the next call is right."""
    op, vocabulary, named, exchanged = case
    args = vocabulary.made(op, rank, "sequence_dim" in named)
    args |= {name: v.build(value, rank) for name, value in named.items()}
    untouched = plan.Plan("nothing was launched")
    plan.ran(untouched)
    kind, text, got = v.outcome(partial(v.invoke, op, args))
    assert kind == "fine" or plan.last_plan() is untouched, f"{text}: refused after {plan.last_plan()}"
    assert exchanged or kind == "fine", text
    if not exchanged:
        every = [{**vocabulary.made(op, r, "sequence_dim" in named), **named} for r in range(world_size)]
        for a, (b, _) in zip(tree_leaves(got), exact(op, every, rank), strict=True):
            bound = BOUND[getattr(torch, vocabulary.dtype)] * max(vocabulary.lead)
            torch.testing.assert_close(a.double(), b, atol=bound, rtol=bound, equal_nan=True)
    return (kind, text), v.fake_outcome(partial(v.invoke, op), args)


@v.SETTINGS
@given(calls())
def test_any_arguments_to_ops_of_a_vocabulary(case: Case) -> None:
    v.check_alike(run_ranks(attempt, RANKS, case, env=ENV), [*case[2], "x", "targets", "logits_shard"])
