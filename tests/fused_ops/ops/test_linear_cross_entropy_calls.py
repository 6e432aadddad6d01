"""fused_linear_cross_entropy and its siblings in compiled graphs, with wrong arguments, and where a rank stays away."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from opcommon import DEVICES, check, refuses, same_on_all, world
from ranks import on_ranks, run_row
from torch import Tensor
from vocabularies import IGNORED, losses, problem
from weft.fused_ops import cross_entropy_of_sharded_logits, fused_linear_cross_entropy, fused_linear_log_probs
from weft.fused_ops.ops.vocabulary import chunks
from weft.symm_mem import set_checked


def compiled(rank: int, size: int) -> None:
    case, how = problem((7,), 90, torch.float32), {"softcap": 3.0, "label_smoothing": 0.1}

    def of(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        both = fused_linear_cross_entropy(x * 2, w, targets, world(), **how)
        alone = fused_linear_cross_entropy(x, w, targets, world(), reduction="none", z_loss=0.1)
        log_probs, entropy = fused_linear_log_probs(x, w, targets, world(), return_entropy=True)
        logits = cross_entropy_of_sharded_logits(x @ w.t(), targets, world())
        return both + (alone.sin() + log_probs.cos() + entropy).sum() + logits

    found = []
    torch._dynamo.reset()
    for call in (of, torch.compile(of, backend="aot_eager", fullgraph=True)):
        x, w, _ = case.parts()
        loss = call(x, w, case.targets)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for name, got, want in zip(("loss", "x", "weight"), found[1], found[0], strict=True):
        check(f"compiled {name}", got, want.double(), 2e-6)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    run_row(compiled, 2, device=device)


def opcheck(rank: int, size: int) -> None:
    name, ops = world().group_name, torch.ops.weft
    for grad in (False, True):
        x, w, b, targets, _ = problem((2, 3), 20, torch.float32)
        x, w, b = (t.requires_grad_(grad) for t in (x, w, b))
        for how in (
            {"summed": True},
            {"extra": "entropy"},
            {"summed": True, "extra": "mean", "label_smoothing": 0.1},
        ):
            torch.library.opcheck(ops.fused_linear_cross_entropy, (x, w, b, targets, name), how)
        torch.library.opcheck(
            ops.fused_linear_cross_entropy, (x, None, None, targets, name), {"vocab_start": 3}
        )
    made = {"summed": True, "of_x": True, "of_weight": True}
    torch.library.opcheck(ops.fused_linear_cross_entropy, (x.detach(), w.detach(), None, targets, name), made)
    bounds, terms = torch.zeros(2, dtype=torch.int64), torch.zeros(5, 6)
    for weight, wanted in ((w.detach(), (True, False, False)), (None, (True, False, False))):
        given = (x.detach(), weight, None, targets, bounds, terms, "", 2.0, 1.0, wanted)
        torch.library.opcheck(ops.linear_cross_entropy_gradients, given)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    run_row(opcheck, 2, device=device)


@on_ranks(2)
def test_what_is_refused(rank: int, size: int) -> None:
    x, w, targets = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, IGNORED])

    def call(*args: Any) -> Any:
        *given, named = args
        return fused_linear_cross_entropy(*given, **named)

    def bad(kind: type[Exception], words: str, *args: Any, **named: Any) -> None:
        refuses(call, (*(args or (x, w, targets)), named), kind, words)

    bad(ValueError, "x: has 1 dimensions, must have 2 or more", x[0], w, targets[0])
    bad(TypeError, "x: is torch.float64, must be float32, bfloat16 or float16", x.double(), w, targets)
    bad(ValueError, r"weight_shard: has shape \(3, 5\), must be \[V, 3\]", x, w.t(), targets)
    bad(TypeError, "weight_shard: is torch.bfloat16, must be torch.float32 like x", x, w.bfloat16(), targets)
    bad(TypeError, "targets: is torch.int32, must be int64", x, w, targets.int())
    bad(ValueError, r"targets: has shape \(3,\), must have \(4,\)", x, w, targets[1:])
    bad(ValueError, r"bias: has shape \(3,\), must be \[5\]", bias=torch.randn(3))
    bad(TypeError, "bias: is of type int, must be a tensor", bias=3)
    bad(ValueError, "vocab_start: is -1, must be 0 or more", vocab_start=-1)
    bad(TypeError, "vocab_start: is of type float, must be an integer", vocab_start=0.5)
    bad(ValueError, "sequence_dim: is 1, must not be the last dimension of x", sequence_dim=1)
    bad(ValueError, "reduction: is 'avg', must be one of 'none', 'mean' or 'sum'", reduction="avg")
    bad(ValueError, "label_smoothing: is 1.5, must be from 0 to 1", label_smoothing=1.5)
    bad(ValueError, "label_smoothing: is -0.5, must be from 0 to 1", label_smoothing=-0.5)
    bad(ValueError, "z_loss: is -1.0, must be finite, and 0 or more", z_loss=-1)
    bad(ValueError, "softcap: is 0.0, must be finite and above 0", softcap=0.0)
    bad(ValueError, "temperature: is inf, must be finite and above 0", temperature=float("inf"))
    with pytest.raises(ValueError, match="logits_shard: has 1 dimensions, must have 2 or more"):
        cross_entropy_of_sharded_logits(x[0], targets[0])


def twice(rank: int, size: int) -> None:
    case = problem((3,), 20, torch.float32)
    for reduction in ("mean", "none"):
        x, w, _ = case.parts()
        loss = fused_linear_cross_entropy(x, w, case.targets, reduction=reduction).sum()
        with pytest.raises(NotImplementedError, match="fused_linear_cross_entropy: has no second gradient"):
            torch.autograd.grad(loss, x, create_graph=True)
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        if reduction == "mean":
            with pytest.raises(RuntimeError, match=r"its backward has run, .* ask for reduction='none'"):
                torch.autograd.grad(loss, (x, w))
        else:
            assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, w))))


def no_target(rank: int, size: int) -> None:
    x, w = same_on_all(3, 4, dtype=torch.float32), torch.randn(5, 4)
    for wrong in (5 * size, -1, -99):
        targets = torch.tensor([0, wrong, IGNORED])
        for reduction, smoothing in product(("none", "mean"), (0.0, 1.0)):
            how: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            loss = fused_linear_cross_entropy(x, w, targets, **how)
            of_logits = cross_entropy_of_sharded_logits(x @ w.t(), targets, **how)
            for found in (loss, of_logits):
                assert found.flatten()[-2:].isinf().any() and not found.isnan().any()
            set_checked(True)
            with pytest.raises(ValueError, match=rf"targets: holds {wrong}, must be from 0 to 9"):
                fused_linear_cross_entropy(x, w, targets, reduction=reduction)
            set_checked(False)
    losses(rank, size, torch.float32, (3,), 20)  # the group is whole


def infinite(rank: int, size: int) -> None:
    """As of torch's loss, ignored rows have gradients of 0, whatever the loss is multiplied with."""
    for factor in (torch.inf, torch.nan):
        for reduction in ("mean", "sum", "none"):
            x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
            loss = fused_linear_cross_entropy(x, w, torch.tensor([0, IGNORED, 2, 1]), reduction=reduction)
            (loss.sum() * factor).backward()
            assert x.grad is not None and w.grad is not None
            assert x.grad[1].eq(0).all() and not x.grad[[0, 2, 3]].isfinite().any()
            assert not w.grad.isfinite().any()


@pytest.mark.parametrize("fn", [twice, no_target, infinite])
def test_errors(fn: Any) -> None:
    run_row(fn, 2)


@on_ranks(2)
def test_the_sum_of_chunks_is_rounded_once_a_chunk(rank: int, size: int) -> None:
    """The gradient of the weight is rounded after each chunk: by half a unit of the sum that it then has."""
    chunk, count, columns = 8, 13, 6
    x, weight = same_on_all(chunk * count, 24).bfloat16(), same_on_all(columns * size, 24).bfloat16() / 5
    targets = same_on_all(chunk * count).abs().mul(100).long() % (columns * size)
    own = weight[columns * rank : columns * (rank + 1)].clone().requires_grad_()
    with mock.patch.object(chunks, "ROWS", chunk):
        fused_linear_cross_entropy(x, own, targets, world(), reduction="sum").backward()
        cuts = chunks.chunks_of(len(x), x.shape[1])
    whole = (x.double() @ weight.double().t()).requires_grad_()
    torch.nn.functional.cross_entropy(whole, targets, reduction="sum").backward()
    assert whole.grad is not None and own.grad is not None
    of_logits = whole.grad[:, columns * rank : columns * (rank + 1)]
    parts = [of_logits[rows].t() @ x[rows].double() for rows in cuts]
    sums = torch.stack(parts).cumsum(0)
    # Logits of up to 4 are rounded, too, and so are their gradients.
    bound = 2**-9 * sums.abs().sum(0) + 2**-6 * of_logits.abs().t() @ x.double().abs()
    assert ((own.grad.double() - sums[-1]).abs() <= bound).all()
