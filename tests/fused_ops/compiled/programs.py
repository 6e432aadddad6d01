"""Programs that call weft's ops between local work, and the calls that they make op by op and compiled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import weft.fused_ops  # noqa: F401  (the ops)
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

WIDTH = 16
ops = torch.ops.weft
Calls = list[tuple[str, tuple[int, ...]]]  #: op and shape of its first tensor, in order


@dataclass
class Program:
    """Steps of values of WIDTH columns; each call gets rows of a number that no other call of the program gets.

    Attributes:
        steps: (op, which value it gets, rows, whether its result is used).
        heavy: for each step, how often the rank repeats the rows that it works on before it: its own choice.
        checkpointed: the steps of an activation checkpoint, as (first, after the last).
    """

    group: str
    steps: list[tuple[str, int, int, bool]]
    heavy: list[int] = field(default_factory=list)
    checkpointed: tuple[int, int] = (0, 0)

    def __call__(self, x: Tensor, w: Tensor) -> list[Tensor]:
        values = [x]
        first, behind = self.checkpointed
        for i in range(len(self.steps)):
            if first < behind and i == first:
                values += checkpoint(self._region, tuple(values), w, use_reentrant=False)
            elif not first <= i < behind:
                self._step(i, values, w)
        return [values[-1], values[0] + 1, *values[1::3]]

    def _region(self, given: tuple[Tensor, ...], w: Tensor) -> list[Tensor]:
        values = list(given)
        for i in range(*self.checkpointed):
            self._step(i, values, w)
        return values[len(given) :]

    def _step(self, i: int, values: list[Tensor], w: Tensor) -> None:
        op, which, rows, used = self.steps[i]
        v = values[which % len(values)]
        heavy = self.heavy[i] if self.heavy else 1
        work = (v.mean(0, keepdim=True).expand(rows * heavy, WIDTH) @ w).view(heavy, rows, WIDTH).mean(0)
        result = call(op, work, w, self.group)
        if used:
            values.append(result)
        if heavy > 2:
            values[0] = values[0] + work.detach().mean()


def call(op: str, x: Tensor, w: Tensor, group: str) -> Tensor:
    if op == "one_shot_all_reduce":
        return ops.one_shot_all_reduce(x, "avg", group)
    if op == "one_shot_all_reduce_":
        y = x.detach().clone()
        ops.one_shot_all_reduce_(y, "avg", group)
        return y
    if op == "fused_all_gather_matmul":
        A, (y, z) = ops.fused_all_gather_matmul(x, [w, w.t()], 0, group)
        return y + z + A
    if op == "products alone":
        return ops.fused_all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]
    if op == "fused_matmul_reduce_scatter":
        return ops.fused_matmul_reduce_scatter(x, w, "avg", 0, group)
    if op == "fused_all_reduce_rms_norm":
        normed, _ = ops.fused_all_reduce_rms_norm(x, x, w[0], 1e-5, group)
        return normed
    return ops.fused_matmul_all_reduce(x, w, "avg", group)


OPS = (
    "one_shot_all_reduce",
    "one_shot_all_reduce_",
    "fused_all_gather_matmul",
    "products alone",
    "fused_matmul_reduce_scatter",
    "fused_all_reduce_rms_norm",
    "fused_matmul_all_reduce",
)


def drawn(seed: int, group: str, *, checkpoints: bool = False) -> Program:
    rng = random.Random(seed)
    count = rng.randint(6, 10)
    steps = [(rng.choice(OPS), rng.randrange(99), 2 * i + 4, rng.random() < 0.75) for i in range(count)]
    region = (0, 0)
    if checkpoints:
        first = rng.randrange(count - 2)
        region = (first, rng.randint(first + 1, count))
        # What a checkpoint computes again is what gradients need, so unused results in one are none of its calls.
        steps = [(op, -1, rows, True) for op, _, rows, _ in steps if op != "one_shot_all_reduce_"]
        region = (min(region[0], len(steps) - 1), min(region[1], len(steps)))
    return Program(group, steps, checkpointed=region)


def with_work(program: Program, seed: int) -> Program:
    """The same for a rank that works otherwise in between."""
    rng = random.Random(seed)
    heavy = [rng.choice((1, 1, 2, 8, 512)) for _ in program.steps]
    return Program(program.group, program.steps, heavy, program.checkpointed)


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self.calls.append((func._schema.name, tuple(tree_leaves(args)[0].shape)))
        return func(*args, **(kwargs or {}))


def written(fn: Callable[..., Any], shapes: Sequence[tuple[int, ...]], grad: bool) -> Calls:
    """The calls that the program makes op by op, without data; with gradients also those of its backward."""
    with FakeTensorMode(), _Record() as record, torch.set_grad_enabled(grad):
        results = fn(*(torch.empty(s, requires_grad=grad) for s in shapes))
        if grad:
            sum(r.sum() for r in results if r.requires_grad).backward()
    return record.calls


@contextlib.contextmanager
def generated() -> Iterator[Calls]:
    """The calls in the order in which Inductor writes them into the code of what is compiled inside."""
    calls: Calls = []
    as_always = ir.FallbackKernel.codegen

    def codegen(self: Any, wrapper: Any) -> None:
        if getattr(self.op_overload, "namespace", "") == "weft":
            sizes = tuple(int(s) if getattr(s, "is_number", True) else 0 for s in self.inputs[0].get_size())
            calls.append((self.op_overload._schema.name, sizes))
        as_always(self, wrapper)

    with patch.object(ir.FallbackKernel, "codegen", codegen):
        yield calls


class _Written(Exception):
    pass


def compiled(
    fn: Callable[..., Any], shapes: Sequence[tuple[int, ...]], grad: bool, **named: Any
) -> tuple[Calls, Calls]:
    """The calls in the code for the forward and for the backward, which is written and not compiled."""
    parts: list[tuple[bool, Calls]] = []

    def compile_to_module(self: GraphLowering) -> Any:
        with generated() as calls:
            self.codegen()
        parts.append((self.is_backward, calls))

        class Module:
            __file__ = key = "none"

            @staticmethod
            def call(*args: Any) -> Any:
                raise _Written

        return Module

    torch._dynamo.reset()
    with (
        patch.object(GraphLowering, "compile_to_module", compile_to_module),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
        torch.set_grad_enabled(grad),
        contextlib.suppress(_Written),
    ):
        torch.compile(fn, fullgraph=True, **named)(*(torch.randn(s, requires_grad=grad) for s in shapes))
    assert parts, "nothing was compiled"
    forward, backward = ([c for back, calls in parts if back is b for c in calls] for b in (False, True))
    return forward, backward
