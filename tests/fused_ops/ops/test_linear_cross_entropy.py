"""fused_linear_cross_entropy and its siblings on ranks of unequal parts, against float64 of the whole vocabulary."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from opcommon import DEVICES, check, gather, same_on_all, world
from ranks import on_ranks, run_row
from torch.nn.functional import cross_entropy
from vocabularies import BOUND, HOWS, IGNORED, compare, factor_of, losses, problem, reference, scored
from weft.fused_ops import cross_entropy_of_sharded_logits, fused_linear_cross_entropy, fused_linear_log_probs
from weft.fused_ops.dispatch.plan import forced, last_plan
from weft.fused_ops.ops.vocabulary import chunks

SHAPES = [((1,), 1000), ((7,), 33), ((2, 5), 257)]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_gradients(world_size: int, device: str, dtype: torch.dtype) -> None:
    for shape, columns in SHAPES:
        run_row(losses, world_size, dtype, shape, columns, device=device)


@on_ranks([1, 3], fresh=True)
def test_rows_come_in_chunks(rank: int, size: int) -> None:
    """Of 24 columns of x: the first chunk lies in the weight's gradient, unless it has more rows than these."""
    chunks.COLUMNS = 7
    for chunks.ROWS, some in ((5, (4, 24, 25, 41)), (30, (23, 29, 31, 70))):
        for rows in some:
            losses(rank, size, torch.float32, (rows,), 65)


def test_logits_lie_in_the_gradient_of_the_weight() -> None:
    x, weight = torch.randn(2100, 2150), torch.randn(chunks.COLUMNS + 100, 2150)
    found = chunks.Gradients(x, weight, None, (True, True, False))
    ((rows, blocks),) = chunks.logits_by_chunks(x, weight, None, found)
    torch.testing.assert_close(torch.cat(blocks, 1), x @ weight.t())
    first, buffer = blocks
    of_weight = found.found()[1]
    assert rows == slice(0, 2100) and first.shape[1] == 100
    assert first.untyped_storage().data_ptr() == of_weight.untyped_storage().data_ptr()
    assert buffer.untyped_storage().nbytes() <= 4 * chunks.COLUMNS * (2100 + 64)


@pytest.mark.parametrize("rows", [1, 60, 100, 190, 199])
@pytest.mark.parametrize("hidden", [199, 200])
def test_blocks_overwrite_only_what_is_used(rows: int, hidden: int) -> None:
    """The logits as their own gradient."""
    x, weight = torch.randn(rows, hidden), torch.randn(300, hidden)
    found = chunks.Gradients(x, weight, None, (True, True, False))
    with mock.patch.object(chunks, "COLUMNS", 7):
        ((part, blocks),) = chunks.logits_by_chunks(x, weight, None, found)
        assert len(blocks) == 2 and blocks[1].shape == (rows, 7)
        found.add(part, blocks)
    logits = x.double() @ weight.double().t()
    of_x, of_weight = found.found()
    check("x", of_x, logits @ weight.double(), 2e-6)
    check("weight", of_weight, logits.t() @ x.double(), 2e-6)


@pytest.mark.parametrize("dtype", BOUND)
@on_ranks([1, 2, 3], device=DEVICES)
def test_log_probs_and_entropy(rank: int, size: int, dtype: torch.dtype) -> None:
    for how in ({}, {"softcap": 2.0, "temperature": 0.6}):
        case = problem((3, 4), 300, dtype)
        counts = case.targets != IGNORED
        operands = case.whole()
        logs = scored(operands[3], how).log_softmax(-1)
        of_target = logs.gather(-1, case.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(counts, 0)
        entropy = -(logs.exp() * logs).sum(-1).where(counts, 0)
        factors = same_on_all(3, 4), same_on_all(3, 4)
        total = (of_target * factors[0] + entropy * factors[1]).sum()
        wanted = torch.autograd.grad(total, operands)
        x, w, b = case.parts()
        got, of_rows = fused_linear_log_probs(x, w, case.targets, world(), bias=b, return_entropy=True, **how)
        check("entropy", of_rows.detach(), entropy.detach(), BOUND[dtype])
        (got * factors[0].float() + of_rows * factors[1].float()).sum().backward()
        found = got.detach(), x.grad, w.grad, b.grad
        compare(f"{how}", found, (of_target.detach(), *wanted), case, BOUND[dtype])  # type: ignore[arg-type]
        alone = fused_linear_log_probs(x, w, case.targets, world(), bias=b, **how)
        assert torch.equal(alone, got)


def of_logits(rank: int, size: int, dtype: torch.dtype) -> None:
    for how in HOWS:
        case = problem((6, 3), 130, dtype)
        logits = same_on_all(6, 3, 130, dtype=dtype)
        logits[2, 1, 5:90] = -torch.inf if not how.get("label_smoothing") else -9  # masked columns
        case.targets[2, 1] = 100
        whole = logits.double().requires_grad_()
        want = reference(whole, case.targets, how)
        factor = factor_of(want)
        (wanted,) = torch.autograd.grad((want * factor).sum(), whole)
        mine = logits[..., case.mine].detach().requires_grad_()  # columns of a larger tensor
        loss = cross_entropy_of_sharded_logits(mine, case.targets, world(), **how)
        (loss * factor.float()).sum().backward()
        check(f"{how}", loss.detach(), want.detach(), 2e-6)
        check(f"{how}, gradient", mine.grad, wanted[..., case.mine], BOUND[dtype])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_of_logits(world_size: int, device: str, dtype: torch.dtype) -> None:
    run_row(of_logits, world_size, dtype, device=device)


def sequence(rank: int, size: int, dim: int) -> None:
    shape = [2, 3]
    shape[dim] *= size
    case = problem(tuple(shape), 150, torch.float32)
    operands = case.whole()
    want = reference(operands[3], case.targets, {})
    of_x, *of_others = torch.autograd.grad(want, operands)
    x, w, b = case.parts()
    mine = x.detach().chunk(size, dim)[rank].requires_grad_()
    loss = fused_linear_cross_entropy(mine, w, case.targets, world(), bias=b, sequence_dim=dim)
    loss.backward()
    wanted = want.detach(), of_x, *of_others
    parts = torch.cat(gather(mine.grad), dim)  # type: ignore[arg-type]
    compare(f"dim {dim}", (loss.detach(), parts, w.grad, b.grad), wanted, case, 3e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_x_along_the_sequence(world_size: int, device: str) -> None:
    for dim in (0, 1):
        run_row(sequence, world_size, dim, device=device)


@pytest.mark.parametrize(("columns", "rows"), [(1000, 16_384), (152_064, 5), (262_144, 3)])
@on_ranks(3, device=DEVICES)
def test_vocabularies_of_models(rank: int, size: int, columns: int, rows: int) -> None:
    """Against torch's loss of gathered logits, of 16 bits."""
    case = problem((rows,), columns, torch.bfloat16, hidden=8)
    x, w, _ = case.parts()
    got = fused_linear_cross_entropy(x, w, case.targets, world())
    got.backward()
    logits = (case.x @ case.weight.t()).float().requires_grad_()
    want = cross_entropy(logits, case.targets)
    (of_logits,) = torch.autograd.grad(want, logits)
    check("loss", got.detach(), want.detach().double(), 1e-5)
    check("x", x.grad, of_logits.double() @ case.weight.double(), 1.5e-2)  # type: ignore[arg-type]
    of_weight = of_logits[:, case.mine].t().double() @ case.x.double()
    check("weight", w.grad, of_weight, 1.5e-2)  # type: ignore[arg-type]


def nothing(rank: int, size: int) -> None:
    x, w = torch.randn(0, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    total = fused_linear_cross_entropy(x, w, targets, reduction="sum")
    total.backward()
    assert total.item() == 0 and not w.grad.any() and x.grad.shape == x.shape  # type: ignore[union-attr]
    assert fused_linear_log_probs(x, w, targets, return_entropy=True)[1].shape == (0,)
    assert fused_linear_cross_entropy(x, w, targets).isnan()
    assert cross_entropy_of_sharded_logits(x @ w.t(), targets, reduction="none").shape == (0,)
    # Of one row, of which nothing counts.
    row = torch.randn(1, 5, requires_grad=True)
    fused_linear_cross_entropy(row, w, torch.tensor([IGNORED]), reduction="sum").backward()
    assert not row.grad.any()  # type: ignore[union-attr]


def test_no_rows() -> None:
    for size in (1, 2):
        run_row(nothing, size)


def frozen(rank: int, size: int) -> None:
    case = problem((9,), 60, torch.float32)
    for reduction in ("sum", "none"):
        for wanted in ((True, False), (False, True)):
            both = [t.requires_grad_(g) for t, g in zip(case.parts()[:2], wanted, strict=True)]
            every = case.parts()[:2]
            for operands in (both, every):
                fused_linear_cross_entropy(*operands, case.targets, reduction=reduction).sum().backward()
            for mine, whole, g in zip(both, every, wanted, strict=True):
                assert torch.equal(mine.grad, whole.grad) if g else mine.grad is None  # type: ignore[arg-type]


def turned(rank: int, size: int) -> None:
    """A weight whose columns are contiguous, whose gradient has its strides, and logits that lie in that."""
    case = problem((9,), 60, torch.float32)
    _, of_weight, *_ = operands = case.whole()
    reference(operands[3], case.targets, {}).backward()
    x, w, b = case.parts()
    w = w.detach().t().contiguous().t().requires_grad_()
    with mock.patch.object(chunks, "COLUMNS", 7):
        fused_linear_cross_entropy(x, w, case.targets, bias=b).backward()
    assert w.grad is not None and of_weight.grad is not None
    check("weight", w.grad, of_weight.grad[case.mine], 3e-6)
    check("x", x.grad, operands[0].grad, 3e-6)  # type: ignore[arg-type]


def padded(rank: int, size: int) -> None:
    """Rows of a weight that only fill it up, one of them NaN."""
    x, targets = same_on_all(5, 6, dtype=torch.float32), torch.arange(5) % (3 * size)
    weight = torch.randn(4, 6)
    weight[3] = torch.nan
    weight.requires_grad_()
    loss = fused_linear_cross_entropy(x, weight[:3], targets)
    loss.backward()
    rows = torch.cat(gather(weight[:3].contiguous()))
    check("loss", loss.detach(), cross_entropy(x.double() @ rows.t(), targets), 1e-6)
    assert weight.grad[:3].any() and not weight.grad[3].any()  # type: ignore[index]


def unfused(rank: int, size: int) -> None:
    with forced("unfused"):
        losses(rank, size, torch.float32, (6,), 40, fused=False)
        assert last_plan().algorithm == "unfused"


@pytest.mark.parametrize("fn", [frozen, turned, padded, unfused])
@pytest.mark.parametrize("device", DEVICES)
def test_parts(fn: Any, device: str) -> None:
    run_row(fn, 2, device=device)
