"""Random sharded programs on ranks that communicate: the pass changes nothing, to the last bit where that is exact."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from graphs import copied
from hypothesis import HealthCheck, given, settings
from random_programs import Random, c10d, interpreted
from random_writer import programs
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement.guard import GraphGuard

# Up to here every whole number is exact. Inputs are whole numbers, so that a sum is the same in any order.
EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11}
# Beyond it, relative to the norm: some roundings on the way to each result. Of fp8 a number may be the next one.
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3, torch.float8_e4m3fn: 2**-3}
# A rank that waits for a peer which does something else must not wait for long.
ENV = {"WEFT_TIMEOUT": "60"}

_groups: list[str] = []


def groups() -> list[str]:
    """Two groups of all ranks."""
    if not _groups:
        second = dist.new_group(list(range(dist.get_world_size())))
        _groups[:] = [dist.distributed_c10d._get_default_group().group_name, second.group_name]
    return _groups


class Watch(fx.Interpreter):
    """Runs a graph, and notes whether everything in it was exact, how much the coarsest of its dtypes rounds, and how
    many times as large a norm before a node makes that in a row that is small beside another one."""

    exact = True
    rounded = 0.0

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.magnified: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.magnified[n] = max((self.magnified[given] for given in n.all_input_nodes), default=1.0)
        if n.target is torch.ops.aten.rsqrt.default and result.numel():
            self.magnified[n] = max(self.magnified[n], float(result.max() / result.min()))
        if (
            getattr(n.target, "namespace", "") == "_c10d_functional"
            and n.target is not c10d.wait_tensor.default
        ):
            return result  # nothing is there yet
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel():
                # An average of two halves what is exact, and a fused op may round a sum of several to the dtype of one.
                self.exact &= t.dtype in EXACT and bool(t.abs().max() * 16 <= EXACT[t.dtype])
                self.rounded = max(self.rounded, ROUNDED.get(t.dtype, 0.0))
        return result


def values(program: Random, rank: int, seed: int) -> list[Tensor]:
    own, shared = (torch.Generator().manual_seed(1000 * seed + i) for i in (rank, 999))
    alike = {*program.shared} if program.rows else set()
    return [
        torch.randint(-2, 3, shape, generator=shared if i in alike else own).to(dtype)
        for i, (shape, dtype) in enumerate(program.inputs)
    ]


def strides(t: Tensor) -> list[int]:
    return [] if 0 in t.shape else [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def aliases(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first that has the same memory."""
    first: dict[int, int] = {}
    where = [t.untyped_storage().data_ptr() if t.numel() else -1 - i for i, t in enumerate(tensors)]
    return [first.setdefault(p, i) for i, p in enumerate(where)]


def alike_on_all_ranks(graph: fx.Graph) -> bool:
    """Whether the ranks would run the graph fused."""
    questions = graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default)
    mine = [GraphGuard(str(question.args[0])).name for question in questions]
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found.count(mine) == len(found)


def differences(
    program: Random, rank: int, seed: int, pass_: FusionPass | Wrong | None = None
) -> tuple[str, Counter[str]]:
    """What differs with the pass and without it, "" for nothing; and what the pass did."""
    inputs = values(program, rank, seed)
    mode = "symbolic" if program.dynamic else "fake"
    traced = make_fx(interpreted(program, groups()), tracing_mode=mode)(*[t.clone() for t in inputs])
    if program.normalized:
        view_to_reshape(traced)
    settings = {"collectives": program.alone, "sequence_parallel": program.rows}
    fusion = pass_ or FusionPass(**settings)
    after = copied(traced.graph)
    fusion(after)
    if (program.own_numbers or program.rows) and not alike_on_all_ranks(after):
        if program.own_numbers:
            return "", Counter({"left: numbers that differ": 1})
        # Rows that a graph takes may be those of one rank, which cannot know that all take these.
        fusion, after = FusionPass(**settings, agree=False), copied(traced.graph)
        fusion(after)
    # Interpreted, the question refuses to be passed by.
    for question in after.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
        after.erase_node(question)
    did = Counter(e.fused_into or f"left: {e.collective}" for e in fusion.report().entries)
    did["on own rows"] += sum("of an all-reduce, sequence" in e.detail for e in fusion.report().entries)
    plain = Watch(traced)
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    want = [*theirs, *plain.run(*theirs)]
    got = [*mine, *Watch(fx.GraphModule(torch.nn.Module(), after)).run(*mine)]
    # What is no whole number, but a third or a root.
    thirds = program.world == 3 and any("avg" in step for step in program.steps)
    whole = not thirds and not any(step[0].startswith("norm") for step in program.steps)
    outputs = [None] * len(inputs) + tree_leaves(traced.graph.output_node().args)
    texts = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        name = f"input {i}" if i < len(inputs) else f"output {i - len(inputs)}"
        if (a.shape, a.dtype, strides(a)) != (b.shape, b.dtype, strides(b)):
            texts.append(
                f"{name} is {a.dtype} {tuple(a.shape)} {a.stride()}, not {b.dtype} {tuple(b.shape)} {b.stride()}"
            )
        elif plain.exact and whole:
            if not torch.equal(a, b):
                texts.append(f"{name} is\n{a}\nnot\n{b}")
        elif b.isfinite().all():
            error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1)).item()
            # Thirds are rounded where they are summed: what is 0 in one order is not in another.
            magnified = plain.magnified.get(outputs[i], 1.0) if thirds else 1.0
            if not error <= plain.rounded * magnified:
                texts.append(f"{name} differs by {error}")
    if aliases(got) != aliases(want):
        texts.append(f"tensors share memory as in {aliases(got)}, not {aliases(want)}")
    if texts:
        texts.append(f"{fusion.report()}\n{traced.graph}\n--- with the pass\n{after}")
    return "\n".join(texts), did


class Wrong:
    """A pass that changes what a graph returns: the values, strides, aliases, or nothing."""

    def __init__(self, change: str) -> None:
        self.change = change

    def __call__(self, graph: fx.Graph) -> None:
        output = graph.output_node()
        (first, *others) = output.args[0]  # type: ignore[misc, union-attr]
        aten = torch.ops.aten
        transposed = (aten.t.default, aten.contiguous.default, aten.t.default)
        ops = {"value": (aten.neg.default,), "strides": transposed, "alias": (aten.clone.default,)}
        with graph.inserting_before(output):
            for op in ops.get(self.change, ()):
                first = graph.call_function(op, (first,))
        output.args = ([first, *others],)

    def report(self) -> Report:
        return Report()


def noticed(rank: int, world: int) -> dict[str, str]:
    steps = [("input", 0), ("gather", 0, 0, ""), ("input", 1), ("mm", 1, 2), ("reshape", 3, [-1])]
    inputs = [((2, 3), torch.float32), ((3, 5), torch.float32)]
    program = Random(world, steps, inputs, outputs=[3, 4])
    changes = ("none", "value", "strides", "alias")
    return {c: differences(program, rank, 1, Wrong(c))[0].partition("\n")[0] for c in changes}


def test_a_wrong_pass_is_noticed() -> None:
    for found in run_ranks(noticed, 2):
        assert found["none"] == ""
        assert found["value"] == "output 0 is"
        assert "output 0 is torch.float32 (4, 5) (1, 4), not torch.float32 (4, 5) (5, 1)" in found["strides"]
        assert "tensors share memory as in [0, 1, 2, 3], not [0, 1, 2, 2]" in found["alias"]


def compared(rank: int, world: int, program: Random, seed: int) -> tuple[str, Counter[str]]:
    # An exception, too, is to leave the ranks as they are, for the next program.
    try:
        with patch.dict(os.environ, ENV):
            return differences(program, rank, seed)
    except Exception:
        return traceback.format_exc(), Counter()


@pytest.mark.parametrize(
    "count", [40, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_the_pass_changes_nothing(count: int) -> None:
    did: Counter[str] = Counter()
    seen = fused = 0

    @settings(max_examples=count, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(programs())
    def check(program: Random) -> None:
        nonlocal seen, fused
        seen += 1
        results = run_ranks(compared, program.world, program, seen)
        for rank, (text, _) in enumerate(results):
            assert not text, f"rank {rank}\n{text}"
        assert all(r[1] == results[0][1] for r in results), "the ranks fused differently"
        did.update(results[0][1])
        fused += any("::" in k for k in results[0][1])

    check()
    print(f"{seen} programs, {fused} with something fused; collectives: {dict(did)}")
    assert fused >= seen / 8, "too few programs with a form that the pass knows"
