"""The loss of a vocabulary that the ranks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from accuracy import Expected, of_products
from measure import timed
from parts import Bench
from suite import Run, Suite, numbers
from timer import Schedule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from weft.fused_ops import FusionPass, fused_linear_cross_entropy

# M, H, V
SHAPES = {
    "cuda": [(1024, 4096, 131072), (4096, 4096, 131072), (8192, 2048, 131072), (4096, 4096, 152064)],
    "cpu": [(17, 16, 48), (5, 24, 96)],
}
CONTENDERS = ("weft", "compiled", "loss_parallel", "pass_whole", "pass_chunks")


class Problem(NamedTuple):
    """What all contenders are given."""

    x: Tensor  # [M, H]
    weight: Tensor  # [V / W, H]
    targets: Tensor  # [M]


LossOf = Callable[[Problem], Tensor]


class _Replicated(torch.autograd.Function):
    """x, whose gradients of all ranks' columns are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return collectives.all_reduce(grad, "sum", dist.distributed_c10d._get_default_group())


class _GatheredLogits(torch.autograd.Function):
    """All columns. As every rank computes the whole loss, its own columns' gradient is there."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # Along the first dimension: Dynamo of torch 2.11 traces no other, and runs all of this in eager mode then.
        whole = collectives.all_gather_tensor(logits, 0, dist.distributed_c10d._get_default_group())
        return torch.cat(whole.chunk(dist.get_world_size()), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def by_gathered_logits(p: Problem) -> Tensor:
    logits = _GatheredLogits.apply(_Replicated.apply(p.x) @ p.weight.t())
    return cross_entropy(logits.float(), p.targets)


def by_weft(p: Problem) -> Tensor:
    return fused_linear_cross_entropy(p.x, p.weight, p.targets)


def by_liger(p: Problem) -> Tensor:
    """Of this rank's columns alone."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Liger

    loss: Tensor = Liger.apply(p.x, p.weight, p.targets % len(p.weight))[0]
    return loss


def contenders(device: torch.device) -> dict[str, LossOf]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def by_loss_parallel(p: Problem) -> Tensor:
        x = DTensor.from_local(p.x, mesh, [Replicate()])
        weight = DTensor.from_local(p.weight, mesh, [Shard(0)])
        targets = DTensor.from_local(p.targets, mesh, [Replicate()])
        with loss_parallel():
            return cross_entropy((x @ weight.t()).float(), targets)

    def compiled(options: dict[str, Any] | None = None) -> LossOf:
        return torch.compile(by_gathered_logits, dynamic=False, fullgraph=True, options=options)

    passes = [FusionPass(loss_parallel=nbytes).options for nbytes in (1 << 60, 1)]
    calls = by_weft, compiled(), by_loss_parallel, *map(compiled, passes)
    return dict(zip(CONTENDERS, calls, strict=True))


def step(loss_of: LossOf, p: Problem) -> list[Tensor]:
    """The gradient of x; that of the weight is left in it."""
    p.x.grad = p.weight.grad = None
    loss = loss_of(p)
    with loss_parallel() if isinstance(loss, DTensor) else nullcontext():
        loss.backward()
    assert p.x.grad is not None and p.weight.grad is not None
    return [p.x.grad, p.weight.grad]


def products(p: Problem) -> list[Tensor]:
    """The three that all of them need."""
    x, weight = p.x.detach(), p.weight.detach()
    logits = x @ weight.t()
    return [logits @ weight, logits.t() @ x]


def drawn(shape: tuple[int, int, int], run: Run) -> Problem:
    m, h, v = shape
    if v % run.world:
        raise ValueError(f"--shapes: has a vocabulary of {v}, must be a multiple of {run.world} ranks")
    dtype = torch.bfloat16 if run.on_gpus else torch.float32
    torch.manual_seed(0)
    x = torch.randn(m, h, device=run.device, dtype=dtype)
    targets = torch.randint(v, (m,), device=run.device)
    torch.manual_seed(1 + run.rank)
    weight = torch.randn(v // run.world, h, device=run.device, dtype=dtype) / h**0.5
    return Problem(x.requires_grad_(), weight.requires_grad_(), targets)


def expected(p: Problem, dtype: torch.dtype) -> list[Expected]:
    """The step's results, in float64."""
    x, weight = p.x.detach().double(), p.weight.detach().double()
    grad = (x @ weight.t()).exp_()  # of columns near 0: without the largest taken off
    sums = grad.sum(1, keepdim=True)
    dist.all_reduce(sums)
    grad.div_(sums)
    columns = p.targets - dist.get_rank() * len(weight)
    (own,) = torch.where((columns >= 0) & (columns < len(weight)))
    grad[own, columns[own]] -= 1
    grad.div_(len(x))
    of_x, of_weight = grad @ weight, grad.t() @ x
    dist.all_reduce(of_x)
    # The logits, their gradient and the result are rounded.
    return [of_products(found, found.abs(), 3, dtype) for found in (of_x, of_weight)]


def peak_bytes(call: LossOf, p: Problem) -> int:
    """Of a step, beyond what is there before it."""
    p.x.grad = p.weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(call, p)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Vocabulary(Suite):
    """Forward and backward of linear cross entropy, tensor-parallel over the vocabulary.

    Contenders: ``fused_linear_cross_entropy``; torch.compile of the logits' all-gather before ``cross_entropy``, whose
    backward sums the gradient of x; DTensor's ``loss_parallel``; the second by the pass, with whole logits of a rank's
    columns and with chunks of them; where it is installed, Liger Kernel's fused loss of one rank's columns, which sends
    nothing. The others' gradients of x and weight are compared with float64. Rows: microseconds in turns of the slowest
    rank, "product" and "limit" those of the three products that all need, and on GPUs the peak of memory beyond what is
    there before a step, "weight_gradient_bytes" of which are the gradient's.
    """

    plots = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--shapes", nargs="+", type=numbers, help="M,H,V ...")

    def rows(self, given: argparse.Namespace) -> list[tuple[int, int, int]]:
        shapes: list[tuple[int, int, int]] = given.shapes or SHAPES[given.device]
        if wrong := [shape for shape in shapes if len(shape) != 3 or min(shape) < 1]:
            raise ValueError(f"--shapes: has {wrong}, must have M,H,V, each 1 or more")
        return shapes

    def begin(self, run: Run) -> None:
        torch._dynamo.config.recompile_limit = 64  # three contenders compile one function anew for each row
        self._calls = contenders(run.device)
        if run.on_gpus and find_spec("liger_kernel"):
            self._calls["liger"] = by_liger
        run.say(
            f"{'M':>6}{'H':>6}{'V':>8}"
            + "".join(f"{name:>15}" for name in (*self._calls, "product"))
            + "  us"
        )

    def measure(self, row: tuple[int, int, int], run: Run) -> None:
        p = drawn(row, run)
        calls: dict[str, Any] = {
            name: lambda _, call=call: step(call, p) for name, call in self._calls.items()
        }
        calls["product"] = lambda _: products(p)
        plan = Schedule(4) if run.on_gpus else Schedule(2, 1)
        wanted = dict.fromkeys(CONTENDERS, expected(p, p.x.dtype))
        found = timed(Bench(calls, wanted, 1), plan, "eager", run.device)
        cells = {f"{name}_us": found.medians.get(name) for name in calls}
        cells["limit_us"] = cells["product_us"]
        if run.on_gpus:
            right = [name for name in self._calls if name in found.rounds]
            cells |= {f"{name}_peak_bytes": peak_bytes(self._calls[name], p) for name in right}
        sizes = dict(zip("MHV", row, strict=True))
        run.rows.append(
            {"op": "linear_cross_entropy", **sizes, **cells, "weight_gradient_bytes": p.weight.nbytes}
        )
        run.say(f"{row[0]:>6}{row[1]:>6}{row[2]:>8}{found.cells(list(calls), 15)}", *found.problems)
        run.wrong |= bool(found.problems)


SUITE = Vocabulary()
