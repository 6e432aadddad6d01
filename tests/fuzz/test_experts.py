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
from weft import fused_ops
from weft.fused_ops.dispatch import plan
from weft.kernels.all_reduce_rms_norm.reference import rms_norm

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}


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
        draw(st.integers(0, 4)),
        draw(st.sampled_from((1, 2, 8))),
        draw(st.integers(1, 5)),
    )
    kind = draw(st.sampled_from(("random", "random", "one", "none")))
    routes = Routes(RANKS * part, choices, experts, kind, draw(v.seeds))
    k, n, dtype = 8 * draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3)), draw(v.dtypes)
    tokens, rows = routes.tokens, routes.tokens * choices

    def tensor(*shape: int, of: str = dtype) -> v.Tensor:
        return v.Tensor(shape, of, draw(v.layouts), draw(v.seeds))

    def perhaps(*shape: int) -> v.Tensor | None:
        return tensor(*shape) if draw(st.booleans()) else None

    op = draw(
        st.sampled_from(
            (
                "grouped_matmul",
                "fused_all_gather_grouped_matmul",
                "fused_moe_combine_all_reduce",
                "fused_moe_combine_all_reduce_rms_norm",
                "fused_moe_combine_reduce_scatter",
                "fused_grouped_matmul_all_reduce",
                "fused_grouped_matmul_reduce_scatter",
            )
        )
    )
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


def product(A: torch.Tensor, B: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64; zeros in rows of no expert."""
    out, first = A.new_zeros(A.shape[0], B.shape[2], dtype=torch.float64), 0
    for e, end in enumerate(offs.tolist()):
        out[first:end] = A[first:end].double() @ B[e].double()
        out[first:end] += 0 if bias is None else bias[e].double()
        first = end
    return out


def summed(args: Arguments, y: torch.Tensor) -> torch.Tensor:
    total = y.new_zeros(args["slots"].shape[0], y.shape[1])
    for slot, weight in zip(args["slots"].unbind(1), args["weights"].double().unbind(1), strict=True):
        if y.shape[0]:
            total += torch.where(slot >= 0, weight, 0)[:, None] * y[slot.clamp(min=0).long()]
    return total if args["shared"] is None else total + args["shared"].double()


def compare(op: str, got: Any, every: list[Arguments], rank: int) -> None:
    mine = every[rank]
    if "gather" in op or op == "grouped_matmul":
        shards = [args["A_shard" if "gather" in op else "A"] for args in every]
        A = torch.cat(shards) if "gather" in op else shards[rank]
        Bs, biases = (mine["Bs"], mine["biases"]) if "gather" in op else ([mine["B"]], [mine["bias"]])
        if "gather" in op:
            assert mine["return_A"] == (got[0] is not None)
            assert got[0] is None or torch.equal(got[0], A)
            got = got[1]
        else:
            got = [got]
        count, taken = int(mine["offs"][-1]), A[mine["rows"].long()] if A.shape[0] else A
        for out, B, bias in zip(got, Bs, biases or [None] * len(Bs), strict=True):
            want = product(taken, B, mine["offs"], bias)
            check(op, out[:count].double(), want[:count], 4 * BOUND[out.dtype])
        return
    if "combine" in op:
        products = [args["y"].double() for args in every]
    else:
        products = [product(args["A"], args["B"], args["offs"], args["bias"]) for args in every]
    parts = [summed(args, y) for args, y in zip(every, products, strict=True)]
    total = sum(parts) / (RANKS if mine.get("reduce_op") == "avg" else 1)
    norms = [*parts, total, *(args["shared"].double() for args in every if args["shared"] is not None)]
    for y, args in zip(products, every, strict=True):
        norms += [y * args["weights"].abs().max().double()] if y.numel() else []
    if op.endswith("scatter"):
        total = total.tensor_split(RANKS, mine["scatter_dim"])[rank]
    if mine.get("residual") is not None:
        total = total + mine["residual"].double()
        norms.append(mine["residual"].double())
    if op.endswith("norm"):
        normed, got = got
        want = rms_norm(got.double(), mine["weight"].double(), float(mine["eps"]))
        check(op, normed.double(), want, 4 * BOUND[normed.dtype])
    check(op, got.double(), total, 4 * BOUND[got.dtype], norms)


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
        got = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, got)
        plain = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, every)
        compare(op, got, plain, rank)
    return (kind, text), v.fake_outcome(partial(v.invoke, op), every[rank])


@v.SETTINGS
@given(calls())
def test_any_arguments_to_ops_of_experts(case: Case) -> None:
    v.check_alike(run_ranks(attempt, RANKS, case, env=ENV), case[2])
