"""loss_parallel=True: cross entropies of gathered logits, as programs spell them, on each rank's own columns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from graphs import captured, fake_ranks
from opcommon import check
from ranks import run_row
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.regather import joint_options

ROWS, HIDDEN, WIDTH = (2, 7), 8, 10
OP = "weft::cross_entropy_of_sharded_logits"
Gathered = Callable[[Tensor, Tensor], Tensor]


class GatheredLogits(torch.autograd.Function):
    """As transformers gathers the logits: the gradient is this rank's columns of its own one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(x.contiguous(), 0, dist.distributed_c10d._get_default_group())
        return torch.cat(torch.chunk(whole, dist.get_world_size(), 0), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.chunk(grad, dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    return GatheredLogits.apply(F.linear(x, w))


def summed_gradient(x: Tensor, w: Tensor) -> Tensor:
    """As torch gathers: the gradient is the sum of all ranks', reduce-scattered."""
    group = dist.distributed_c10d._get_default_group()
    return funcol.all_gather_tensor_autograd(F.linear(x, w), x.dim() - 1, group)


def uneven(x: Tensor, w: Tensor) -> Tensor:
    """As DTensor gathers: the last rank has fewer columns. It sums the gradient of x."""
    mesh, shape = MESH[0], (WIDTH * dist.get_world_size() - 1, HIDDEN)
    given = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    weight = DTensor.from_local(w, mesh, [Shard(0)], run_check=False, shape=shape, stride=(HIDDEN, 1))
    return F.linear(given, weight).redistribute(placements=[Replicate()]).to_local()


MESH: list[DeviceMesh] = []


def flat_loss(logits: Tensor, targets: Tensor, **named: Any) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.view(-1, logits.shape[-1]), targets.reshape(-1), **named)


def mean(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    return flat_loss(gathered(x, w), targets)


def shifted_targets(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """As transformers, which divides by the tokens of all of a batch."""
    labels = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    return flat_loss(gathered(x, w), labels, reduction="sum") / 5


def shifted_logits(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    logits = gathered(x, w)[..., :-1, :].contiguous()
    return flat_loss(logits, targets[..., 1:].contiguous())


def with_logits(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    logits = gathered(x, w)
    return flat_loss(logits, targets), logits


def with_what_is_made_of_logits(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    logits = gathered(x, w)
    return flat_loss(logits, targets) + logits.sin().mean()


def of_each_row(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    losses = flat_loss(gathered(x, w), targets, reduction="none")
    return (losses * torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype)).sum()


def compiled(program: Callable[..., Any], gathered: Gathered, **settings: Any) -> tuple[Any, FusionPass]:
    torch._dynamo.reset()
    fusion = FusionPass(loss_parallel=True, **settings)
    return torch.compile(lambda *given: program(gathered, *given), options=fusion.options), fusion


def right(rank: int, world: int, program: Any, gathered: Gathered, dtype: torch.dtype) -> None:
    """Each rank's loss counts ``rank + 1`` times."""
    MESH[:] = [DeviceMesh("cpu", list(range(world)))] if gathered is uneven else []
    count = WIDTH * world - (gathered is uneven)
    seed = torch.tensor([torch.seed() % 2**31])
    dist.broadcast(seed, 0)
    random = torch.Generator().manual_seed(int(seed))
    x, w = (torch.randn(s, HIDDEN, generator=random).to(dtype) for s in (ROWS[0] * ROWS[1], count))
    x, own = x.view(*ROWS, HIDDEN), slice(rank * WIDTH, (rank + 1) * WIDTH)
    targets = torch.randint(count, ROWS, generator=random)
    targets[0, 2] = -100

    logits = (x.double() @ w.double().t()).requires_grad_()
    of_all = program(lambda *_: logits, x, w, targets)
    want_loss, *more = of_all if isinstance(of_all, tuple) else (of_all,)
    want_loss.backward()
    weights = torch.arange(1.0, world + 1).double()
    of_logits, parts = logits.grad, [slice(r * WIDTH, (r + 1) * WIDTH) for r in range(world)]
    factor = weights.sum() if gathered is summed_gradient else weights[rank]
    of_x = [
        factor * of_logits[..., part] @ w[part].double() for factor, part in zip(weights, parts, strict=True)
    ]
    of_w = factor * of_logits[..., own].flatten(0, 1).t() @ x.double().flatten(0, 1)
    wanted = [
        want_loss,
        sum(of_x) if gathered is uneven else of_x[rank] * factor / weights[rank],
        of_w,
        *more,
    ]

    fn, fusion = compiled(program, gathered)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for run in (fn, lambda *given: program(gathered, *given)):
        given = x.clone().requires_grad_(), w[own].clone().requires_grad_()
        with inductor_config.patch(force_disable_caches=True):
            found = run(*given, targets)
            loss, *others = found if isinstance(found, tuple) else (found,)
            (loss * (rank + 1)).backward()
        got = [loss, *(g.grad for g in given), *others]
        for name, a, b in zip(("loss", "of x", "of w", "logits"), got, wanted, strict=False):
            check(f"{name}, {'fused' if run is fn else 'eager'}", a, b.detach(), bound)
    entries = [e for e in fusion.report().entries if e.collective == "all_gather_into_tensor"]
    assert entries[0].fused_into == OP and "loss parallel, " in entries[0].detail, fusion.report()
    stays = program in (with_logits, with_what_is_made_of_logits)
    assert len(entries) == 1 + stays, fusion.report()
    assert not fusion.report().disagreements


CASES = [
    (mean, summed_gradient, torch.float32),
    (mean, summed_gradient, torch.bfloat16),
    (shifted_targets, own_gradient, torch.bfloat16),
    (shifted_logits, own_gradient, torch.float32),
    (shifted_logits, summed_gradient, torch.bfloat16),
    (with_logits, own_gradient, torch.bfloat16),
    (with_what_is_made_of_logits, summed_gradient, torch.float32),
    (with_what_is_made_of_logits, own_gradient, torch.float32),
    (of_each_row, own_gradient, torch.float32),
    (mean, uneven, torch.float32),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("program", "gathered", "dtype"),
    CASES,
    ids=lambda v: getattr(v, "__name__", str(v).removeprefix("torch.")),
)
def test_losses_and_gradients(world_size: int, program: Any, gathered: Gathered, dtype: torch.dtype) -> None:
    run_row(right, world_size, program, gathered, dtype)


def dtensor_loss(given: dict[str, Any], columns: int, x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """By DTensor's loss_parallel, of logits that stay sharded."""
    rows = DTensor.from_local(x, MESH[0], [Replicate()], run_check=False)
    shape = (columns, HIDDEN)
    weight = DTensor.from_local(w, MESH[0], [Shard(0)], run_check=False, shape=shape, stride=(HIDDEN, 1))
    logits = F.linear(rows, weight)
    losses = F.cross_entropy(logits.float() if w.dtype != torch.float32 else logits, targets, **given)
    return losses.to_local().sum()


@functools.cache
def mesh_of(group: Any) -> DeviceMesh:
    """The same again: AOTAutograd of torch 2.13 does not compile the loss anew for a second mesh."""
    return DeviceMesh("cpu", list(range(dist.get_world_size(group))))


def sharded_loss(
    rank: int, world: int, given: dict[str, Any], width: int, dtype: torch.dtype, factor: float
) -> None:
    """The last rank has a column less where an ignored target is given. The loss counts ``factor`` times."""
    MESH[:] = [mesh_of(dist.group.WORLD)]
    columns = width * world - ("ignore_index" in given)
    seed = torch.tensor([torch.seed() % 2**31])
    dist.broadcast(seed, 0)
    random = torch.Generator().manual_seed(int(seed))
    x, w = (torch.randn(s, HIDDEN, generator=random).to(dtype) for s in (13, columns))
    targets = torch.randint(columns, (13,), generator=random)
    targets[4] = given.get("ignore_index", -100)
    wide = [t.double().requires_grad_() for t in (x, w)]
    want = F.cross_entropy(wide[0] @ wide[1].t(), targets, **given).sum() * factor
    want.backward()
    own = slice(rank * width, (rank + 1) * width)
    wanted = want, wide[0].grad, wide[1].grad[own]

    torch._dynamo.reset()
    fusion = FusionPass(loss_parallel=True)
    fn = torch.compile(
        lambda *tensors: dtensor_loss(given, columns, *tensors) * factor,
        options=fusion.options,
        dynamic=False,
    )
    leaves = x.clone().requires_grad_(), w[own].clone().requires_grad_()
    with loss_parallel(), inductor_config.patch(force_disable_caches=True):
        loss = fn(*leaves, targets)
        loss.backward()
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for name, a, b in zip(
        ("loss", "of x", "of w"), (loss, *(leaf.grad for leaf in leaves)), wanted, strict=True
    ):
        check(name, a, b.detach(), bound)
    report = fusion.report()
    taken = [e for e in report.entries if e.fused_into == OP]
    assert len(taken) == 3 and {e.collective for e in taken} == {"all_reduce"}, report
    assert [e.graph for e in report.entries if e not in taken] == [1], report  # x's gradient
    assert not report.disagreements


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("given", "width", "dtype"),
    [
        ({}, 10, torch.float32),
        ({"ignore_index": 1}, 2, torch.bfloat16),
        ({"reduction": "sum", "ignore_index": 3}, 10, torch.float32),
        ({"reduction": "none"}, 10, torch.bfloat16),
    ],
)
def test_losses_of_sharded_logits(
    world_size: int, given: dict[str, Any], width: int, dtype: torch.dtype
) -> None:
    run_row(sharded_loss, world_size, given, width, dtype, -1.5)


def smoothed(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return flat_loss(own_gradient(x, w), targets, label_smoothing=0.1)


def log_probabilities(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return own_gradient(x, w).float().flatten(0, 1).log_softmax(-1)


def gradient_of_all_columns(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    class Penalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / grad.norm()

    return flat_loss(Penalised.apply(own_gradient(x, w)), targets)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (smoothed, "its log-softmax is used by "),
        (log_probabilities, "its log-softmax is used by the graph's output"),
        (gradient_of_all_columns, "all columns of its gradient are used, by "),
    ],
)
def test_left_alone(program: Callable[..., Any], reason: str) -> None:
    fusion = FusionPass(agree=False, loss_parallel=True)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        captured(program, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
    (entry,) = (e for e in fusion.report().entries if e.collective == "all_gather_into_tensor")
    assert f"not loss parallel: {reason}" in (entry.reason or entry.detail), entry


def by_hand(filled: int, first: int, x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """As loss_parallel, of columns from WIDTH on, of which the last are ``filled`` up; ``first`` should be WIDTH."""
    group = dist.distributed_c10d._get_default_group()
    logits = F.linear(x, w).flatten(0, 1)
    shifted = logits - funcol.all_reduce(logits.amax(1, True), "max", group)
    log_probs = shifted - funcol.all_reduce(shifted.exp().sum(1, True), "sum", group).log()
    at = targets.reshape(-1, 1)
    outside = (at < WIDTH) | (at >= 2 * WIDTH - filled)
    picked = log_probs.gather(1, torch.where(outside, 0, at - first))
    return -funcol.all_reduce(torch.where(outside, 0, picked), "sum", group).mean()


def log_probs_by_hand(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    group = dist.distributed_c10d._get_default_group()
    logits = F.linear(x, w).flatten(0, 1)
    shifted = logits - funcol.all_reduce(logits.amax(1, True), "max", group)
    return shifted - funcol.all_reduce(shifted.exp().sum(1, True), "sum", group).log()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (functools.partial(by_hand, 0, WIDTH), None),
        (functools.partial(by_hand, 1, WIDTH), None),
        (
            functools.partial(by_hand, 0, WIDTH - 1),
            "its targets are not taken from this rank's first column on",
        ),
        (log_probs_by_hand, "of its log-softmax not one target's in each row is used"),
    ],
)
def test_which_reductions_are_a_loss(program: Callable[..., Any], reason: str | None) -> None:
    fusion = FusionPass(agree=False, loss_parallel=True)
    x, w = (torch.randn(*shape) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        captured(program, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
    entries = fusion.report().entries
    assert [e.fused_into == OP for e in entries] == [reason is None] * (3 if reason is None else len(entries))
    if reason is not None:
        assert f"not one exchange of a loss: {reason}" in (entries[0].reason or entries[0].detail), entries


def test_a_gather_that_stays_begins_after_the_loss() -> None:
    fusion = FusionPass(agree=False, loss_parallel=True)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        forward, _ = captured(
            lambda *given: with_logits(own_gradient, *given),
            *(x, w, torch.zeros(ROWS, dtype=torch.int64)),
            fusion=fusion,
            runs=False,
        )
    names = [getattr(n.target, "_opname", "") for n in forward.before.nodes]
    assert names.index("cross_entropy_of_sharded_logits") < names.index("all_gather_into_tensor")
