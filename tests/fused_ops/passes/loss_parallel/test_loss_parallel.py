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
from gathered_losses import (
    HIDDEN,
    MESH,
    OP,
    ROWS,
    WIDTH,
    Gathered,
    by_temperature,
    flat_loss,
    in_16_bits,
    mean,
    of_each_row,
    own_gradient,
    right,
    shifted_logits,
    shifted_targets,
    smoothed,
    smoothed_by_hand,
    smoothed_in_16_bits,
    softcapped,
    summed_gradient,
    uneven,
    with_gradient,
    with_logits,
    with_what_is_made_of_logits,
    with_z_loss,
    with_z_loss_before,
    with_z_loss_of_flat_rows,
)
from graphs import captured, fake_ranks
from opcommon import check
from ranks import run_row
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.joint import joint_options

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
    (softcapped, summed_gradient, torch.bfloat16),
    (softcapped, uneven, torch.float32),
    (smoothed, own_gradient, torch.bfloat16),
    (smoothed, summed_gradient, torch.float32),
    (mean, uneven, torch.float32),
    (with_z_loss, own_gradient, torch.bfloat16),
    (with_z_loss, summed_gradient, torch.float32),
    (with_z_loss_of_flat_rows, own_gradient, torch.float32),
    (with_z_loss_before, own_gradient, torch.float32),
    (with_z_loss_before, summed_gradient, torch.bfloat16),
    (smoothed_by_hand, own_gradient, torch.float32),
    (smoothed_by_hand, summed_gradient, torch.float32),
    (smoothed_by_hand, own_gradient, torch.bfloat16),
    (in_16_bits, own_gradient, torch.bfloat16),
    (smoothed_in_16_bits, summed_gradient, torch.bfloat16),
    (by_temperature, own_gradient, torch.float32),
    (by_temperature, summed_gradient, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("program", "gathered", "dtype", "world_size"),
    [(*case, 2 + i % 2) for i, case in enumerate(CASES)],
    ids=lambda v: getattr(v, "__name__", str(v).removeprefix("torch.")),
)
def test_losses_and_gradients(program: Any, gathered: Gathered, dtype: torch.dtype, world_size: int) -> None:
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
    fusion = FusionPass(loss_parallel=1)
    fn = torch.compile(
        lambda *tensors: dtensor_loss(given, columns, *tensors) * factor,
        options=fusion.options,
        dynamic=False,
    )
    leaves = x.clone().requires_grad_(), w[own].clone().requires_grad_()
    with loss_parallel(), inductor_config.patch(fx_graph_cache=False):
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
    assert all("its logits are whole: how many columns other ranks have" in e.detail for e in taken), report
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


def log_probabilities(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return own_gradient(x, w).float().flatten(0, 1).log_softmax(-1)


def learned_temperature(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return flat_loss(own_gradient(x, w) / w.sum(), targets)


def transposed(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """As torch takes classes."""
    return F.cross_entropy(own_gradient(x, w).transpose(1, 2), targets)


def without_some_columns(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    logits = own_gradient(x, w)
    return flat_loss(logits.masked_fill(torch.arange(logits.shape[-1]) > WIDTH, -1e4), targets)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (transposed, "its columns meet permute"),
        (without_some_columns, "its columns meet where (where.self)"),
        (with_gradient(lambda grad: grad * grad), "all columns of its gradient are used, by "),
        (learned_temperature, "its temperature is learned, and the gradient of that sums up all columns"),
        (log_probabilities, "its log-softmax is used by the graph's output"),
        (with_gradient(lambda grad: grad / grad.norm()), "all columns of its gradient are used, by "),
    ],
)
def test_left_alone(program: Callable[..., Any], reason: str) -> None:
    fusion = FusionPass(agree=False, loss_parallel=True)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        captured(program, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
    (entry,) = (e for e in fusion.report().entries if e.collective == "all_gather_into_tensor")
    assert f"not loss parallel: {reason}" in (entry.reason or entry.detail), entry


def early_z_loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """The loss needs it."""
    logits = own_gradient(x, w)
    z = logits.logsumexp(-1)
    return flat_loss(logits, targets + (z > 3)) + z.mean()


def z_loss_of_other_rows(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return shifted_logits(own_gradient, x, w, targets) + own_gradient(x, w).logsumexp(-1).mean()


def z_loss_otherwise(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Its gradient is another one."""
    logits = own_gradient(x, w)
    return flat_loss(logits, targets) + (logits - logits.logsumexp(-1, keepdim=True)).exp().square().sum()


@pytest.mark.parametrize("program", [early_z_loss, z_loss_of_other_rows, z_loss_otherwise])
def test_logsumexps_that_stay(program: Callable[..., Any]) -> None:
    """With the gathered logits, which they take."""
    fusion = FusionPass(agree=False, loss_parallel=True)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        captured(program, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
    entries = [e for e in fusion.report().entries if e.collective == "all_gather_into_tensor"]
    assert any(e.fused_into != OP for e in entries), fusion.report()


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


def masked_by_hand(rank: int, world: int) -> None:
    """A target of -100 is on no rank, and its row does not count."""
    start, group = rank * WIDTH, dist.distributed_c10d._get_default_group()

    def loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, w)
        shifted = logits - funcol.all_reduce(logits.amax(1, True), "max", group)
        log_probs = shifted - funcol.all_reduce(shifted.exp().sum(1, True), "sum", group).log()
        at = targets.reshape(-1, 1)
        outside = (at < start) | (at >= start + WIDTH)
        picked = log_probs.gather(1, torch.where(outside, 0, at - start))
        picked = funcol.all_reduce(torch.where(outside, 0, picked), "sum", group)
        return -(picked.squeeze(1) * (targets >= 0)).sum()

    torch.manual_seed(7)
    x, w = torch.randn(5, HIDDEN), torch.randn(world * WIDTH, HIDDEN)
    targets = torch.tensor([0, WIDTH + 1, -100, 2, 2 * WIDTH - 1])
    fusion = FusionPass(loss_parallel=True)
    compiled = torch.compile(loss, options=fusion.options)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        got = compiled(x, w[start : start + WIDTH], targets)
    rows = [0, 1, 3, 4]
    check("loss", got, F.cross_entropy((x @ w.t()).double()[rows], targets[rows], reduction="sum"), 1e-5)
    assert {e.fused_into for e in fusion.report().entries} == {OP}


def test_rows_that_are_masked_by_hand() -> None:
    run_row(masked_by_hand, 2)
