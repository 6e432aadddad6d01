"""What the pass does on GPUs over NCCL: the ranks agree, what was fused runs fused and is right. On CPU ranks, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from opcommon import BOUND, DEVICES, check, world
from ranks import run_ranks
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from weft.fused_ops import Plan, last_plan
from weft.fused_ops.dispatch import plan
from weft.fused_ops.passes import FusionPass, Report

# Of a tensor-parallel layer: large enough for the kernels, small enough for float64 beside it.
SIZES = {"cpu": (24, 16, 40), "cuda": (4096, 1024, 2048)}


def sizes() -> tuple[int, int, int]:
    return SIZES[torch.get_default_device().type]


def gather(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, world())


def scatter(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world())


def reduced(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", world())


def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(F.relu(gather(x) @ a) @ b)


def layer_inputs(size: int) -> list[Tensor]:
    rows, dim, hidden = sizes()
    shapes = ((rows // size, dim), (dim, hidden), (hidden, dim))
    return [torch.randn(s).div(s[-1] ** 0.5).bfloat16() for s in shapes]


def summed_wide(x: Tensor, w: Tensor) -> Tensor:
    """What autocast makes of a layer's gradient."""
    return scatter((x @ w).float())


def wide_inputs(size: int) -> list[Tensor]:
    rows, dim, hidden = sizes()
    return [torch.randn(rows, hidden).bfloat16(), torch.randn(hidden, dim).bfloat16()]


def added(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Each rank with terms of its own."""
    return residual + (scatter(x @ w) + bias)


def added_inputs(size: int) -> list[Tensor]:
    rows, dim, hidden = sizes()
    shapes = ((rows, hidden), (hidden, dim), (dim,), (rows // size, dim))
    return [torch.randn(s).bfloat16() for s in shapes]


def normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each rank with a residual of its own."""
    y = residual + reduced(x @ w)
    return F.rms_norm(y, y.shape[-1:], weight, 1e-6), y


def layer_normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of two all-reduces, as of attention and MLP side by side."""
    y = residual + reduced(x @ w) + reduced(x.relu() @ w)
    return F.layer_norm(y, y.shape[-1:], weight, weight), y


def norm_inputs(size: int) -> list[Tensor]:
    rows, dim, hidden = sizes()
    shapes = ((rows // 64 + 3, hidden), (hidden, dim), (rows // 64 + 3, dim), (dim,))
    return [torch.randn(s).bfloat16() for s in shapes]


AG, RS, NORM = "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fused_all_reduce_rms_norm"
LAYER_NORM = "fused_all_reduce_layer_norm"
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Tensor]], set[str]]] = {
    "layer": (layer, layer_inputs, {AG, RS}),
    "summed in float32": (summed_wide, wide_inputs, {RS}),
    "bias and residual": (added, added_inputs, {RS}),
    "norm": (normed, norm_inputs, {NORM}),
    "LayerNorm": (layer_normed, norm_inputs, {LAYER_NORM}),
}


def compiled(fn: Callable[..., Any], steps: Callable[[Any], None]) -> Report:
    """What the pass says of ``fn`` after ``steps`` of it, compiled without caches."""
    torch._dynamo.reset()
    # "always" would take the product in, and leave the norm.
    fusion = FusionPass(fuse="auto" if fn in (normed, layer_normed) else "always")
    fusion.clear()
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
        plan.forced("fused"),
    ):
        steps(torch.compile(fn, options=fusion.options, dynamic=False))
    torch._dynamo.reset()
    return fusion.report()


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def right(rank: int, size: int, name: str) -> tuple[set[str], int, int, list[str], str, float]:
    fn, make, _ = PROGRAMS[name]

    def steps(ours: Any) -> None:
        for _ in range(4):
            given = make(size)
            want = leaves(fn(*(t.double() for t in given)))
            plan.ran(Plan("none"))
            for i, (a, b) in enumerate(zip(leaves(ours(*given)), want, strict=True)):
                check(f"{name}, result {i}", a, b, 3 * BOUND[torch.bfloat16])
                assert a.dtype == (torch.float32 if fn is summed_wide else torch.bfloat16)

    with torch.no_grad():
        report = compiled(fn, steps)
    asked = report.questions
    into = {e.fused_into.partition("::")[2] for e in report.entries if e.fused_into}
    assert fn is not added or "bias and residual added" in report.details()
    told = [str(d) for d in report.disagreements]
    return into, asked.count, asked.fused, told, last_plan().algorithm, asked.seconds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_fused_runs_fused(name: str, world_size: int, device: str) -> None:
    for into, asked, fused, told, algorithm, _ in run_ranks(right, world_size, name, device=device):
        assert into == PROGRAMS[name][2]
        assert (asked, fused, told) == (4, 4, [])
        assert algorithm in ("host", "push", "one_shot", "two_kernels"), algorithm


def trained(rank: int, size: int) -> tuple[int, int, list[str], float]:
    """Forward and backward, on CUDA the one in a thread of its own, with ranks that come late now and then."""

    def steps(ours: Any) -> None:
        for step in range(30):
            given = [t.requires_grad_() for t in layer_inputs(size)]
            exact = [t.detach().double().requires_grad_() for t in given]
            got, want = ours(*given), layer(*exact)
            grad = torch.randn_like(got)
            if got.is_cuda and (step + rank) % 5 == 0:
                torch.cuda._sleep(5_000_000)
            got.backward(grad)
            want.backward(grad.double())
            for i, (a, b) in enumerate(zip(given, exact, strict=True)):
                assert a.grad is not None
                assert b.grad is not None
                check(f"step {step}, gradient {i}", a.grad, b.grad, 6 * BOUND[torch.bfloat16])
        if torch.get_default_device().type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    report = compiled(layer, steps)
    asked = report.questions
    return asked.count, asked.fused, [str(d) for d in report.disagreements], asked.seconds / asked.count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_training(world_size: int, device: str, record_property: Callable[[str, object], None]) -> None:
    for asked, fused, told, seconds in run_ranks(trained, world_size, device=device):
        assert (asked, fused, told) == (60, 60, [])
        record_property("microseconds a question", round(seconds * 1e6))
        print(f"{seconds * 1e6:.0f} us a question, waiting included")
