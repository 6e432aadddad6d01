"""Experts' second product with the sum over choices and ranks, on real CPU processes, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from first_runs import loaded_at_first_run
from opcommon import BOUND, DEVICES, assert_fused, cells, check, gather, poison, refuses, same_on_all, world
from ranks import run_row
from torch import Tensor
from torch._subclasses import FakeTensorMode
from weft.fused_ops import (
    fused_grouped_matmul_all_reduce,
    fused_grouped_matmul_reduce_scatter,
    fused_moe_combine_all_reduce,
    grouped_matmul,
    last_plan,
    moe_route,
    plan,
)
from weft.fused_ops.dispatch.choice import choice_of_call
from weft.fused_ops.ops.experts import grouped_matmul_sums
from weft.symm_mem import set_checked

# Tokens of a rank, choices, K, N of a rank, experts.
ROWS = [(3, 2, 40, 8, 5), (16, 8, 16, 24, 9), (1, 1, 8, 8, 1), (33, 4, 72, 16, 4), (0, 2, 8, 8, 3)]


class Given(NamedTuple):
    """A [R, K], poisoned where no expert of this rank has rows; B, offs, slots, weights, and what is added."""

    A: Tensor
    B: Tensor
    offs: Tensor
    slots: Tensor
    weights: Tensor
    bias: Tensor
    shared: Tensor

    def total(self) -> Tensor:
        """This rank's rows in float64, one choice after the other; with gradients."""
        ends, rows = [0, *self.offs.tolist()], []
        for e in range(len(self.offs)):
            rows.append(self.A[ends[e] : ends[e + 1]].double() @ self.B[e].double() + self.bias[e].double())
        y = torch.cat([*rows, self.A.new_zeros(1, self.B.shape[2], dtype=torch.float64)])
        total = self.shared.double()
        for slot, weight in zip(self.slots.long().unbind(1), self.weights.double().unbind(1), strict=True):
            total = total + y[slot] * torch.where(slot >= 0, weight, 0)[:, None]
        return total


def drawn(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, rank: int, *, wide: bool = True, spread: bool
) -> Given:
    """``spread``: ranks have other experts, else slices of all. Some choices are of no expert of any rank."""
    tokens, choices, k, n, experts = shape
    tokens, n = tokens * world().size(), n * world().size()
    ids = same_on_all(tokens, experts + choices).argsort(1)[:, :choices]
    first = rank % experts if spread else 0
    _, offs, slots = moe_route(ids, experts, first_expert=first)
    A = torch.randn(tokens * choices, k).to(dtype)
    A[int(offs[-1]) :] = float("nan")
    B = torch.randn(experts - first, n, k).to(dtype).mT
    weights = same_on_all(tokens, choices, dtype=torch.float32).abs().to(torch.float32 if wide else dtype)
    weights = weights.masked_fill(slots < 0, float("nan"))  # adds nothing
    bias = torch.randn(experts - first, n).to(dtype)
    return Given(A, B, offs, slots, weights, bias, torch.randn(tokens, n).to(dtype))


def forward(rank: int, size: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    for wide, spread in ((True, False), (False, True)):
        poison(rank)
        given = drawn(shape, dtype, rank, wide=wide, spread=spread)
        *first, bias, shared = given
        named = {"bias": bias, "shared": shared}
        parts = gather(given.total())
        want = sum(parts)
        norms = [*parts, *gather(shared)]
        total = fused_grouped_matmul_all_reduce(*first, "sum", world(), **named)
        if total.numel() and size > 1:
            assert_fused()
        assert total.is_contiguous() and total.dtype == dtype
        check("sum", total, want, BOUND[dtype], norms)
        assert torch.equal(total, fused_grouped_matmul_all_reduce(*first, "sum", world(), **named)), (
            "other bits"
        )
        y = grouped_matmul(*first[:3], bias=bias)
        assert torch.equal(total, fused_moe_combine_all_reduce(y, *first[3:], world(), shared=shared))
        mean = fused_grouped_matmul_all_reduce(*first, "avg", world(), **named)
        check("avg", mean, want / size, BOUND[dtype], [p / size for p in norms])
        plain = fused_grouped_matmul_all_reduce(*first, "sum", world())
        of_none = given._replace(bias=bias * 0, shared=shared * 0).total()
        check("no terms", plain, sum(gather(of_none)), BOUND[dtype], [*parts, *gather(of_none)])
        residual = torch.randn_like(total)
        added = fused_grouped_matmul_all_reduce(*first, "sum", world(), **named, residual=residual)
        assert torch.equal(added, total + residual)
        for dim in (0, 1, -1):
            for op, whole in (("sum", total), ("avg", mean)):
                part = fused_grouped_matmul_reduce_scatter(*first, op, dim, world(), **named)
                if part.numel() and size > 1:
                    assert_fused()
                assert part.is_contiguous() and torch.equal(part, whole.chunk(size, dim)[rank]), (op, dim)
            residual = torch.randn_like(part)
            added = fused_grouped_matmul_reduce_scatter(
                *first, "sum", dim, world(), **named, residual=residual
            )
            assert torch.equal(added, total.chunk(size, dim)[rank] + residual)


@pytest.mark.parametrize(("size", "device", "shape", "dtype"), cells((1, 2, 3), [(row,) for row in ROWS]))
def test_forward(size: int, device: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    run_row(forward, size, shape, dtype, device=device)


def backward(rank: int, size: int, dim: int | None, reduce_op: str, dtype: torch.dtype) -> None:
    for spread, shape in ((False, ROWS[1]), (True, ROWS[0])):
        given = drawn(shape, dtype, rank, wide=True, spread=spread)
        given = given._replace(weights=given.weights.nan_to_num())
        leaves = given.A, given.B, given.weights, given.bias, given.shared
        A, B, weights, bias, shared = (t.detach().requires_grad_() for t in leaves)
        first = A, B, given.offs, given.slots, weights
        whole, on = torch.empty_like(given.shared), torch.randn_like(given.shared)
        part = whole if dim is None else whole.chunk(size, dim)[rank]
        residual = torch.randn_like(part).requires_grad_()
        named = {"bias": bias, "shared": shared, "residual": residual}
        if dim is None:
            out = fused_grouped_matmul_all_reduce(*first, reduce_op, world(), **named)
            on_whole = sum(gather(on))
        else:
            out = fused_grouped_matmul_reduce_scatter(*first, reduce_op, dim, world(), **named)
            on = on.chunk(size, dim)[rank]
            on_whole = torch.cat(gather(on), dim)
        poison(rank)
        out.backward(on, retain_graph=True)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        mine = Given(exact[0], exact[1], given.offs, given.slots, exact[2], exact[3], exact[4])
        mine.total().backward(on_whole / size if reduce_op == "avg" else on_whole)
        names = ("A", "B", "weights", "bias", "shared")
        for name, got, want in zip(names, (A, B, weights, bias, shared), exact, strict=True):
            assert got.grad is not None and want.grad is not None and got.grad.dtype == got.dtype
            check(f"gradient of {name}", got.grad, want.grad, 2 * BOUND[dtype])
        assert B.grad is not None and B.grad.stride() == B.stride() and torch.equal(residual.grad, on)
        with pytest.raises(NotImplementedError, match=r"fused_grouped_matmul_.*: has no second gradient"):
            torch.autograd.grad(out.sum(), A, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "reduce_op"), [(None, "sum"), (0, "avg"), (-1, "sum")])
@pytest.mark.parametrize("device", DEVICES)
def test_backward(device: str, dim: int | None, reduce_op: str, dtype: torch.dtype) -> None:
    run_row(backward, 2, dim, reduce_op, dtype, device=device)


def only_what_is_wanted(rank: int, size: int) -> None:
    given = drawn(ROWS[0], torch.float32, rank, spread=False)
    leaves = given.A, given.B, given.weights.nan_to_num(), given.bias, given.shared
    for wanted in range(len(leaves)):
        A, B, weights, bias, shared = (t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves))
        used = A * 1
        first = used, B, given.offs, given.slots, weights
        out = fused_grouped_matmul_all_reduce(*first, "sum", world(), bias=bias, shared=shared)
        if wanted not in (1, 2):
            used.detach().zero_()  # those of B and of weights alone need it
        out.sum().backward()
        found = [t.grad is not None for t in (A, B, weights, bias, shared)]
        assert found == [i == wanted for i in range(len(leaves))]


def test_only_what_is_wanted() -> None:
    run_row(only_what_is_wanted, 2)


def planned(rank: int, size: int) -> None:
    first = drawn(ROWS[0], torch.float32, rank, spread=False)[:5]
    for op, more in ((fused_grouped_matmul_all_reduce, ()), (fused_grouped_matmul_reduce_scatter, (0,))):
        expected = plan(op, *first, "sum", *more, world())
        op(*first, "sum", *more, world())
        assert last_plan() == expected and expected.algorithm == "host" and expected.workspace_bytes > 0


def test_plan() -> None:
    run_row(planned, 2)


def refused(rank: int, size: int) -> None:
    A, B, offs = torch.randn(6, 16), torch.randn(3, 16, 8), torch.tensor([2, 4, 6], dtype=torch.int32)
    slots, weights = torch.arange(6, dtype=torch.int32).view(3, 2), torch.rand(3, 2)
    first = A, B, offs, slots, weights
    ops = torch.ops.weft
    name = world().group_name
    for at, wrong, kind, words in [
        (0, A[0], ValueError, "A: has 1 dimensions, must be a matrix"),
        (0, A[0, 0], ValueError, "A: has 0 dimensions, must be a matrix"),
        (1, B[:, :8], ValueError, r"B: has shape \(3, 8, 8\), must be \[E, 16, N\]: A has 16 columns"),
        (1, B[:, :, :7], ValueError, "B: has N = 7, must be a multiple of 8"),
        (2, offs.long(), TypeError, "offs: is torch.int64, must be int32"),
        (2, offs[:2], ValueError, "offs: has 2 elements, must have 3, as B has experts"),
        (3, slots.long(), TypeError, "slots: is torch.int64, must be torch.int32"),
        (4, weights[:2], ValueError, r"weights: has shape \(2, 2\), must have \(3, 2\) like slots"),
        (4, weights.half(), TypeError, "weights: is torch.float16, must be torch.float32 like A"),
    ]:
        given = (*first[:at], wrong, *first[at + 1 :])
        refuses(ops.fused_grouped_matmul_all_reduce, (*given, "sum", name), kind, words)
        refuses(ops.fused_grouped_matmul_reduce_scatter, (*given, "sum", 1, name), kind, words)
    scatter = ops.fused_grouped_matmul_reduce_scatter
    refuses(ops.fused_grouped_matmul_all_reduce, (*first, "max", name), ValueError, "reduce_op: is 'max'")
    refuses(scatter, (*first, "sum", 2, name), ValueError, "scatter_dim: is 2, must be from -2 to 1")
    refuses(scatter, (*first, "sum", 0, name), ValueError, "scatter_dim: what is scattered has size 3 there")
    for term, wrong, kind, words in [
        ("bias", torch.ones(3, 7), ValueError, r"bias: has shape \(3, 7\), must be \[3, 8\]"),
        ("residual", torch.ones(3, 8), ValueError, r"residual: has shape \(3, 8\), must have \(3, 4\)"),
        ("residual", torch.ones(3, 4).half(), TypeError, "residual: is torch.float16, must be"),
        ("shared", torch.ones(3, 4), ValueError, r"shared: has shape \(3, 4\), must have \(3, 8\)"),
    ]:
        with pytest.raises(kind, match=words):
            fused_grouped_matmul_reduce_scatter(*first, "sum", 1, world(), **{term: wrong})
    set_checked(True)
    try:
        for at, wrong, words in [
            (2, offs.flip(0), r"offs\[1\]: is 4, must be from 6 to 6"),
            (3, slots + 1, "slots: holds 6, must be from -1 to 5, as A has rows"),
            (3, slots.clamp(max=4), "slots: holds 4 more than once, must hold each row once at most"),
        ]:
            with pytest.raises(ValueError, match=words):
                fused_grouped_matmul_all_reduce(*first[:at], wrong, *first[at + 1 :], "sum", world())
        A = first[0].detach().requires_grad_()
        with pytest.raises(ValueError, match="slots: holds 6, must be from -1 to 5, as A has rows"):
            fused_grouped_matmul_all_reduce(A, *first[1:3], slots + 1, *first[4:], "sum", world())
        with pytest.raises(ValueError, match="A: has 0 dimensions, must be a matrix"):
            fused_grouped_matmul_all_reduce(torch.ones(()), *first[1:], "sum", world())
    finally:
        set_checked(False)


def test_refused() -> None:
    run_row(refused, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of GPUs that are none")
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_on_cuda_the_first_run_loads_the_program_of_the_choice(
    monkeypatch: pytest.MonkeyPatch, reduce_op: str, two: str
) -> None:
    monkeypatch.setattr(
        grouped_matmul_sums,
        "multiply",
        lambda A, terms, *_: [A.new_empty(A.shape[0], B.shape[2]) for B, _ in terms],
    )
    weft = torch.ops.weft
    for op, more in (
        (weft.fused_grouped_matmul_all_reduce, ()),
        (weft.fused_grouped_matmul_reduce_scatter, (0,)),
        (weft.fused_grouped_matmul_reduce_scatter, (1,)),
    ):
        with FakeTensorMode():
            A, B, weights = (
                torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
                for shape in ((128, 64), (4, 64, 256), (64, 2))
            )
            offs = torch.empty(4, dtype=torch.int32, device="cuda")
            slots = torch.empty(64, 2, dtype=torch.int32, device="cuda")
            given = A, B, offs, slots, weights, reduce_op, *more, "0"
            found, choice = choice_of_call(op, given, {})
            loaded = loaded_at_first_run(op.default, given, {})
        assert found.algorithm == "push" and found == plan(op, *given)
        (program,) = choice.programs()
        assert [str(program)] == [*map(str, loaded)]
