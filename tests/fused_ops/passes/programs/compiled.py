"""What the tests of whole programs share: torch.compile with the pass, comparison with the unsharded model, a verdict.

A program runs on ranks that communicate. Its graphs go through torch.compile up to and with Inductor's own passes; the
code that Inductor would write takes long to compile, so they then run as they are, but for the tests marked slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from graphs import by_inductors_passes
from ranks import run_ranks
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor
from weft.fused_ops.passes import FusionPass

# Relative to the norm of the float64 result, of anything that a few layers of these sizes compute in float32.
BOUND = 1e-5
# Inductor's code for one program takes a minute to compile, and several on a busy machine.
VOTE_DEADLINE = 1000.0  # seconds
SLOW = [pytest.mark.slow, pytest.mark.timeout(VOTE_DEADLINE + 100)]
CODEGEN = pytest.mark.parametrize(
    "codegen", [False, pytest.param(True, marks=SLOW)], ids=["passes", "inductor"]
)


def _without_questions(gm: fx.GraphModule) -> Any:
    # Interpreted, the question refuses to be passed by; here all ranks run the same graphs.
    for question in gm.graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
        gm.graph.erase_node(question)
    gm.recompile()
    return make_boxed_func(gm.forward)


run_as_it_is = by_inductors_passes(_without_questions)


@dataclass
class Outcome:
    """What became of a program's collectives, and how far its results are from the unsharded model's.

    ``left`` holds the kind and the reason of each collective that was left alone.
    """

    fused: int
    left: list[tuple[str, str]]
    text: str
    errors: dict[str, float] = field(default_factory=dict)


class Program:
    """A program under torch.compile with the pass; ``outcome`` is what a rank returns."""

    def __init__(self, fusion: FusionPass, codegen: bool) -> None:
        self.fusion = fusion
        self.codegen = codegen
        self.errors: dict[str, float] = {}

    def compile(self, fn: Any, **options: Any) -> Any:
        backend = "inductor" if self.codegen else run_as_it_is
        return torch.compile(fn, backend=backend, **options)

    def compare(self, name: str, got: Tensor, want: Tensor) -> None:
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        whole, want = whole.detach().double(), want.detach()
        assert whole.shape == want.shape, f"{name}: shape {tuple(whole.shape)}, expected {tuple(want.shape)}"
        self.errors[name] = ((whole - want).norm() / want.norm().clamp_min(1e-30)).item()

    def compare_gradients(self, got: nn.Module, want: nn.Module) -> None:
        wanted = dict(want.named_parameters())
        for wrapped, parameter in got.named_parameters():
            name = wrapped.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            assert parameter.grad is not None, f"no gradient of {name}"
            gradient = wanted.pop(name).grad
            assert gradient is not None
            self.compare(f"gradient of {name}", parameter.grad, gradient)
        assert not wanted, f"the sharded model has no {', '.join(wanted)}"

    def outcome(self) -> Outcome:
        report = self.fusion.report()
        for e in report.entries:
            assert e.source, f"no line of the model: {e}"
            assert e.reason if e.fused_into is None else e.form, f"not explained: {e}"
        left = [(e.collective, e.reason) for e in report.entries if e.fused_into is None]
        return Outcome(report.fused, left, report.details(), self.errors)


@contextlib.contextmanager
def program(codegen: bool = False, **options: Any) -> Iterator[Program]:
    """
    Args:
        options: of the FusionPass.
    """
    fusion = FusionPass(**options)
    torch._dynamo.reset()
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch({**fusion.options, "fx_graph_cache": False}),
    ):
        yield Program(fusion, codegen)
    torch._dynamo.reset()


def outcomes(fn: Any, world: int, *args: Any) -> list[Outcome]:
    """Of ``fn(rank, world, *args, codegen)`` on each rank; ``codegen`` is the last of ``args``."""
    return run_ranks(fn, world, *args, timeout=VOTE_DEADLINE if args[-1] else 240.0)


def check(found: Iterable[Outcome], fused: int, left: Iterable[str] | None) -> None:
    """Results are the unsharded model's, and of the collectives only these kinds were left alone.

    Args:
        found: of all ranks.
        fused: how many collectives of the program can be fused.
        left: the kinds of those that cannot, in any order. None for any.
    """
    first, *others = found
    for other in others:
        assert (other.fused, other.left) == (first.fused, first.left), f"{first.text}\n--- and\n{other.text}"
    assert first.errors
    far = {n: e for o in (first, *others) for n, e in o.errors.items() if not e <= BOUND}
    assert not far, far
    assert first.fused == fused, f"{fused} can be fused\n{first.text}"
    if left is not None:
        assert sorted(kind for kind, _ in first.left) == sorted(left), first.text
