"""Cross entropies of gathered logits, as programs spell them, and whether the pass computes them right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from opcommon import check, relative_error
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from weft.fused_ops import FusionPass
from weft.fused_ops.ops.vocabulary import chunks

ROWS, HIDDEN, WIDTH = (2, 7), 8, 10
OP, LINEAR = "weft::cross_entropy_of_sharded_logits", "weft::fused_linear_cross_entropy"
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


def with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A loss whose logits' gradient is changed."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad)

    return lambda x, w, targets: flat_loss(Changed.apply(own_gradient(x, w)), targets)


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


def softcapped(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """As Gemma's, and with a temperature."""
    return flat_loss((gathered(x, w) / 3).tanh() * 3 / 0.7, targets)


def smoothed(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    return flat_loss(gathered(x, w), targets, label_smoothing=0.1)


def in_16_bits(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """Its log-softmax is rounded."""
    return F.cross_entropy(gathered(x, w).flatten(0, -2), targets.reshape(-1))


def smoothed_in_16_bits(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(gathered(x, w).flatten(0, -2), targets.reshape(-1), label_smoothing=0.1)


def with_z_loss(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """Of the rows that count."""
    logits = gathered(x, w)
    z = logits.float() if logits.dtype != torch.float64 else logits
    squares = z.logsumexp(-1).square().where(targets != -100, 0)
    return flat_loss(logits, targets) + 0.1 * squares.sum() / 11


def with_z_loss_of_flat_rows(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    logits = gathered(x, w).flatten(0, -2)
    z = logits.float() if logits.dtype != torch.float64 else logits
    return flat_loss(logits, targets) + 0.1 * z.logsumexp(-1, keepdim=True).pow(2).mean()


def with_z_loss_before(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """Computed first, so that its gradient is added to that of the loss."""
    logits = gathered(x, w).flatten(0, -2)
    z = logits.float() if logits.dtype != torch.float64 else logits
    squares = 0.1 * z.logsumexp(-1).pow(2).mean()
    return flat_loss(z, targets) + squares


def smoothed_by_hand(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """As transformers' LabelSmoother."""
    log_probs = -gathered(x, w).log_softmax(-1)
    padding = targets.unsqueeze(-1).eq(-100)
    of_targets = log_probs.gather(-1, targets.unsqueeze(-1).clamp(min=0)).masked_fill(padding, 0.0)
    total = log_probs.sum(-1, keepdim=True, dtype=None if log_probs.dtype == torch.float64 else torch.float32)
    total = total.masked_fill(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * of_targets.sum() / count + 0.1 * total.sum() / (count * log_probs.shape[-1])


def by_temperature(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    """A tensor, and then one of each row."""
    size = x.detach().abs()
    logits = gathered(x, w) / (size.mean() + 0.5)
    return flat_loss(logits * (size.mean(-1, keepdim=True) + 0.5), targets)


def of_each_row(gathered: Gathered, x: Tensor, w: Tensor, targets: Tensor) -> Any:
    losses = flat_loss(gathered(x, w), targets, reduction="none")
    return (losses * torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype)).sum()


def right(
    rank: int, world: int, program: Any, gathered: Gathered, dtype: torch.dtype, by_chunks: bool = False
) -> None:
    """Each rank's loss counts ``rank + 1`` times."""
    chunks.ROWS = 4 if by_chunks else 2048
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

    torch._dynamo.reset()
    fusion = FusionPass(loss_parallel=int(by_chunks) or True)
    fn = torch.compile(lambda *given: program(gathered, *given), options=fusion.options)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    lost = [0.0] * 4  # by the program itself, in its dtype: more bits of some data than of other
    for run in (lambda *given: program(gathered, *given), fn):
        given = x.clone().requires_grad_(), w[own].clone().requires_grad_()
        with inductor_config.patch(fx_graph_cache=False):
            found = run(*given, targets)
            loss, *others = found if isinstance(found, tuple) else (found,)
            (loss * (rank + 1)).backward()
        got = [loss, *(g.grad for g in given), *others]
        for i, (name, a, b) in enumerate(zip(("loss", "of x", "of w", "logits"), got, wanted, strict=False)):
            if run is fn:
                check(f"{name}, fused", a, b.detach(), max(bound, 2 * lost[i]))
            else:
                check(f"{name}, eager", a, b.detach(), 2 * bound)
                lost[i] = relative_error(a, b.detach())
    entries = [e for e in fusion.report().entries if e.collective == "all_gather_into_tensor"]
    assert entries[0].fused_into == (LINEAR if by_chunks else OP), fusion.report()
    assert f"loss parallel, {WIDTH} columns" in entries[0].detail or gathered is uneven, fusion.report()
    stays = program in (with_logits, with_what_is_made_of_logits)
    assert len(entries) == 1 + stays, fusion.report()
    assert not fusion.report().disagreements
