"""Any routes and any arguments to the ops of experts: the right result, or an error that names the argument; fake
tensors say the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from opcommon import BOUND, check
from ranks import run_ranks
from references import exact, norm, results_of
from torch.utils._pytree import tree_map_only
from weft import fused_ops
from weft.fused_ops.dispatch import plan

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
OPS = (
    *("grouped_matmul", "fused_all_gather_grouped_matmul", "fused_moe_combine_all_reduce"),
    *("fused_moe_combine_all_reduce_rms_norm", "fused_moe_combine_reduce_scatter"),
    *("fused_grouped_matmul_all_reduce", "fused_grouped_matmul_reduce_scatter"),
)


@dataclass(frozen=True)
class Routes:
    """What a router has chosen, of all ranks' tokens; ``kind``: "random" with some that are of no expert, "one" expert
    for all, or "none"."""

    tokens: int
    choices: int
    experts: int
    kind: str
    seed: int

    def made(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(-1, self.experts + 1, (self.tokens, self.choices), generator=generator)
        if self.kind != "random":
            ids = torch.full_like(ids, {"one": self.experts - 1, "none": -1}[self.kind])
        rows, offs, slots = fused_ops.moe_route(ids, self.experts)
        return {"rows": rows, "offs": offs, "slots": slots}


Arguments = dict[str, Any]  # an index under its own name: "rows", "offs" or "slots"
Case = tuple[str, Routes, Arguments, bool]


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """An op, routes, arguments that fit, and whether some of them are then exchanged."""
    part, choices, experts = (
        draw(of) for of in (st.integers(0, 4), st.sampled_from((1, 2, 8)), st.integers(1, 5))
    )
    kind = draw(st.sampled_from(("random", "random", "one", "none")))
    routes = Routes(RANKS * part, choices, experts, kind, draw(v.seeds))
    k, n, dtype = 8 * draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3)), draw(v.dtypes)
    tokens, rows = routes.tokens, routes.tokens * choices

    def tensor(*shape: int, of: str = dtype) -> v.Tensor:
        return v.Tensor(shape, of, draw(v.layouts), draw(v.seeds))

    def perhaps(*shape: int) -> v.Tensor | None:
        return tensor(*shape) if draw(st.booleans()) else None

    op = draw(st.sampled_from(OPS))
    weights = tensor(tokens, choices, of=draw(st.sampled_from((dtype, "float32"))))
    dim, group = draw(st.integers(-2, 1)), draw(v.groups)
    shape = [tokens, n]
    if op.endswith("scatter"):
        shape[dim] //= RANKS
    args: Arguments
    if op == "grouped_matmul":
        args = {"A": tensor(tokens, k), "B": tensor(experts, k, n), "offs": "offs", "rows": "rows"}
        args["bias"] = perhaps(experts, n)
    elif op == "fused_all_gather_grouped_matmul":
        Bs = [tensor(experts, k, n), tensor(experts, k, 8)][: draw(st.integers(1, 2))]
        args = {"A_shard": tensor(part, k), "Bs": Bs, "rows": "rows", "offs": "offs", "gather_dim": 0}
        biases = [tensor(experts, B.shape[2]) for B in Bs] if draw(st.booleans()) else None
        args |= {"group": group, "return_A": draw(st.booleans()), "biases": biases}
    elif "combine" in op:
        args = {"y": tensor(rows, n), "slots": "slots", "weights": weights, "group": group}
        args["shared"] = perhaps(tokens, n)
    else:
        args = {"A": tensor(rows, k), "B": tensor(experts, k, n), "offs": "offs", "slots": "slots"}
        args |= {"weights": weights, "reduce_op": draw(st.sampled_from(("sum", "avg"))), "group": group}
        args |= {"bias": perhaps(experts, n), "residual": perhaps(*shape), "shared": perhaps(tokens, n)}
    if op.endswith("scatter"):
        args["scatter_dim"] = dim
    if op.endswith("norm"):
        args |= {"residual": perhaps(tokens, n), "weight": tensor(n), "eps": draw(st.sampled_from((1e-6, 1)))}
    exchanged = draw(st.integers(0, 2))
    for _ in range(exchanged):
        name = draw(st.sampled_from(sorted(args)))
        if isinstance(args[name], v.Group):
            args[name] = draw(v.bad_groups)
        else:
            args[name] = draw(st.one_of(v.bad_tensors, v.junk, v.numbers))
    return op, routes, args, exchanged > 0


def built(routes: Routes, args: Arguments, rank: int) -> Arguments:
    index = routes.made()
    return {
        name: index[name].clone() if isinstance(value, str) and value == name else v.build(value, rank)
        for name, value in args.items()
    }


def compare(op: str, results: list[torch.Tensor], every: list[Arguments], rank: int) -> None:
    mine, wanted = every[rank], exact(op, every, rank)
    if "gather" in op:
        assert len(results) == len(mine["Bs"]) + mine["return_A"]
    if op.endswith("norm"):
        wanted[0] = norm(op, mine, results[1].double()), []
    # What cancels out in a sum of products was rounded all the same.
    sums = [
        args["y"].double() * args["weights"].abs().max().double()
        for args in every
        if "combine" in op and args["y"].numel()
    ]
    for got, (want, parts) in zip(results, wanted, strict=True):
        check(op, got[: len(want)].double(), want, 4 * BOUND[got.dtype], [*parts, *sums] if parts else None)


def attempt(rank: int, world_size: int, case: Case) -> tuple[Any, Any]:
    """What the op says to real and to fake tensors. Whatever it says, the next call is right."""
    op, routes, args, exchanged = case
    every = [built(routes, args, r) for r in range(world_size)]
    untouched = plan.Plan("nothing was launched")
    plan.ran(untouched)
    kind, text, got = v.outcome(partial(v.invoke, op, every[rank]))
    assert kind == "fine" or plan.last_plan() is untouched, f"{text}: refused after {plan.last_plan()}"
    assert exchanged or kind == "fine", text
    if not exchanged:
        got, plain = tree_map_only(torch.Tensor, torch.Tensor.detach, (got, every))
        compare(op, results_of(got), plain, rank)
    return (kind, text), v.fake_outcome(partial(v.invoke, op), every[rank])


@v.SETTINGS
@given(calls())
def test_any_arguments_to_ops_of_experts(case: Case) -> None:
    v.check_alike(run_ranks(attempt, RANKS, case, env=ENV), case[2])
