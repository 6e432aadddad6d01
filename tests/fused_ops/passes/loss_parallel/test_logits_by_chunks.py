"""loss_parallel with large logits: a product and its loss as ``fused_linear_cross_entropy``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathered_losses import (
    HIDDEN,
    LINEAR,
    MESH,
    OP,
    ROWS,
    WIDTH,
    Gathered,
    GatheredLogits,
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
    softcapped,
    summed_gradient,
    uneven,
    with_gradient,
    with_logits,
    with_z_loss,
)
from graphs import captured, fake_ranks
from opcommon import check
from ranks import run_row
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh
from weft.fused_ops import FusionPass
from weft.fused_ops.ops.vocabulary import chunks
from weft.fused_ops.passes.joint import joint_options


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("program", "gathered", "dtype"),
    [
        (mean, summed_gradient, torch.bfloat16),
        (shifted_targets, own_gradient, torch.float32),
        (in_16_bits, summed_gradient, torch.bfloat16),
    ],
    ids=lambda v: getattr(v, "__name__", str(v).removeprefix("torch.")),
)
def test_logits_by_chunks(world_size: int, program: Any, gathered: Gathered, dtype: torch.dtype) -> None:
    run_row(right, world_size, program, gathered, dtype, True)


def without_gradients(rank: int, world: int) -> None:
    chunks.ROWS = 4
    seed = torch.tensor([torch.seed() % 2**31])
    dist.broadcast(seed, 0)
    random = torch.Generator().manual_seed(int(seed))
    x, w = (torch.randn(s, HIDDEN, generator=random) for s in (ROWS[0] * ROWS[1], WIDTH * world))
    targets = torch.randint(WIDTH * world, ROWS, generator=random)
    torch._dynamo.reset()
    fusion = FusionPass(loss_parallel=1)
    fn = torch.compile(lambda *given: of_each_row(own_gradient, *given), options=fusion.options)
    with inductor_config.patch(fx_graph_cache=False), torch.no_grad():
        got = fn(x.view(*ROWS, HIDDEN), w[rank * WIDTH : (rank + 1) * WIDTH], targets)
    logits = x.double() @ w.double().t()
    check("loss", got, of_each_row(lambda *_: logits.view(*ROWS, -1), x, w, targets), 1e-5)
    assert [e.fused_into for e in fusion.report().entries] == [LINEAR], fusion.report()


def nothing_counts(rank: int, world: int) -> None:
    torch._dynamo.reset()
    fn = torch.compile(
        lambda *given: mean(summed_gradient, *given), options=FusionPass(loss_parallel=1).options
    )
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with inductor_config.patch(fx_graph_cache=False):
        loss = fn(x, w, torch.full(ROWS, -100))
        loss.backward()
    assert loss.isnan() and x.grad.eq(0).all() and w.grad.eq(0).all()


def infinite(rank: int, world: int) -> None:
    torch._dynamo.reset()
    options = FusionPass(loss_parallel=1).options
    fn = torch.compile(lambda *given: mean(summed_gradient, *given), options=options)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    targets = torch.zeros(ROWS, dtype=torch.int64)
    targets[1, :3] = -100
    with inductor_config.patch(fx_graph_cache=False):
        (fn(x, w, targets) * torch.inf).backward()
    assert x.grad[1, :3].eq(0).all() and not x.grad[1, 3:].isfinite().any() and not w.grad.isfinite().any()


@pytest.mark.parametrize("fn", [nothing_counts, infinite])
def test_chunks_of_rows_that_do_not_count(fn: Any) -> None:
    run_row(fn, 2)


def test_logits_by_chunks_without_gradients() -> None:
    run_row(without_gradients, 2)


def written(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """What no result has is in the graph of forward and backward, too."""
    logits = torch.nn.functional.linear(x, w)
    loss = flat_loss(GatheredLogits.apply(logits), targets + 0)
    targets.copy_(logits.detach().argmax(-1))
    return loss


def own(program: Any) -> Callable[..., Any]:
    return functools.wraps(program)(functools.partial(program, own_gradient))


@pytest.mark.parametrize(
    ("program", "dtype", "reason"),
    [
        (own(mean), torch.float32, None),
        (own(mean), torch.float16, "they are no product alone, of float32 or bfloat16"),
        (own(shifted_logits), torch.float32, "they are no product alone, "),
        (own(softcapped), torch.float32, "they are no product alone, "),
        (own(with_logits), torch.float32, "they are needed for more than the loss"),
        (own(of_each_row), torch.float32, "its rows' losses are not only summed, or count differently"),
        (own(with_z_loss), torch.float32, "they are needed for more than the loss"),
        (own(smoothed_by_hand), torch.float32, "its rows' losses are not only summed, or count differently"),
        (own(smoothed), torch.float32, "its rows' losses are not only summed, or count differently"),
        (with_gradient(lambda grad: grad / 2), torch.float32, "their gradient is changed"),
        (written, torch.float32, "they are needed for more than the loss"),
        (functools.partial(mean, uneven), torch.float32, "some ranks fill theirs up, "),
    ],
)
def test_which_logits_are_whole(program: Callable[..., Any], dtype: torch.dtype, reason: str | None) -> None:
    shapes = (*ROWS, HIDDEN), (WIDTH, HIDDEN)
    for nbytes, whole in ((1, reason), (14 * WIDTH * dtype.itemsize + 1, "")):
        fusion = FusionPass(agree=False, loss_parallel=nbytes)
        x, w = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
        with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
            MESH[:] = [DeviceMesh("cpu", [0, 1])]
            captured(program, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
        entry = fusion.report().entries[0]
        assert entry.fused_into == (LINEAR if whole is None else OP), entry
        assert (f"; its logits are whole: {whole}" in entry.detail) == bool(whole), entry


def two_losses(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return mean(own_gradient, x, w, targets) + mean(own_gradient, 2 * x, w, targets)


def test_one_loss_of_a_weight_is_by_chunks() -> None:
    """Each would keep a gradient of it."""
    fusion = FusionPass(agree=False, loss_parallel=1)
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((*ROWS, HIDDEN), (WIDTH, HIDDEN)))
    with fake_ranks(2), inductor_config.patch(joint_options(fusion)):
        captured(two_losses, x, w, torch.zeros(ROWS, dtype=torch.int64), fusion=fusion, runs=False)
    assert sorted(entry.fused_into for entry in fusion.report().entries) == [OP, LINEAR]
    assert "its logits are whole: their weight is another loss's, too" in str(fusion.report().entries)


def test_bytes_of_logits() -> None:
    assert (
        FusionPass(loss_parallel=True).logits == 256 << 20 and FusionPass(loss_parallel=4096).logits == 4096
    )
    with pytest.raises(
        TypeError, match=r"loss_parallel: is '1', must be True or False, or the bytes of a rank's"
    ):
        FusionPass(loss_parallel="1")  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="loss_parallel: is -1, must be 0 or more"):
        FusionPass(loss_parallel=-1)
