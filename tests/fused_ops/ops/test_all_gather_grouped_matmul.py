"""fused_all_gather_grouped_matmul and its gradients against float64, ranks with rows and experts of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from algorithms import needs_gemm
from opcommon import BOUND, cells, check, gather, poison, refuses, same_on_all, world
from ranks import run_ranks, run_row
from torch import Tensor
from weft.fused_ops import fused_all_gather_grouped_matmul, last_plan, moe_route, plan
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.grouped_matmul.reference import activated

# Tokens of a rank, K, experts and experts of each token.
ROWS = [(13, 72, 9, 2), (64, 16, 4, 1), (5, 264, 40, 8), (0, 16, 4, 2), (1, 8, 1, 1)]


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, rank: int, ns: tuple[int, ...] = (40, 8)
) -> Any:
    """This rank's tokens, its Bs with K and with N contiguous, and the choices of all tokens, the same on all ranks;
    some are of no expert."""
    m, k, experts, choices = shape
    ids = same_on_all(m * world().size(), experts + choices).argsort(1)[:, :choices]
    bs = [torch.randn(experts, n, k).to(dtype).mT for n in ns]
    return torch.randn(m, k).to(dtype), [bs[0], *(b.contiguous() for b in bs[1:])], ids


def products(A: Tensor, B: Tensor, rows: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    ends = [0, *offs.tolist()]
    taken = A[rows.long()]
    found = [taken[ends[e] : ends[e + 1]] @ B[e] for e in range(len(offs))]
    return torch.cat([y if bias is None else y + bias[e] for e, y in enumerate(found)])


def drawn_biases(bs: list[Tensor]) -> list[Tensor]:
    return [torch.randn(b.shape[0], b.shape[2]).to(b.dtype) for b in bs]


def forward(rank: int, size: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for call in range(3):  # both buffers, one of them again, and gate and up
        x, bs, ids = drawn(shape, dtype, rank)
        first = rank % shape[2]  # ranks have other experts, and other numbers of them
        rows, offs, _ = moe_route(ids, shape[2], first_expert=first)
        bs = [b[first:] for b in bs]
        if call == 2:  # both with K and with N contiguous
            bs = [torch.cat([b.mT, -b.mT], 1).mT if b.stride(1) == 1 else torch.cat([b, -b], 2) for b in bs]
        poison(rank)
        biases = None if call == 2 else drawn_biases(bs)
        swiglu = call == 2
        named = {"return_A": call == 1, "biases": biases, "swiglu": swiglu}
        A, outs = fused_all_gather_grouped_matmul(x, bs, rows, offs, 0, world(), **named)
        every = torch.cat(gather(x))
        assert (A is None) == (call != 1)
        if A is not None:
            check("A", A, every, 0)
        for b, bias, out in zip(bs, biases or [None] * len(bs), outs, strict=True):
            want = products(every, b.double(), rows, offs, None if bias is None else bias.double())
            want = activated(want, swiglu=swiglu)
            assert out.shape == (rows.shape[0], want.shape[1]) and out.dtype == dtype
            check("product", out[: want.shape[0]], want, BOUND[dtype] * (1 + 2 * swiglu))


@pytest.mark.parametrize(("size", "device", "shape", "dtype"), cells((1, 2, 3), [(row,) for row in ROWS]))
def test_forward(size: int, device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    run_row(forward, size, shape, dtype, device=device)


def wild(rank: int, size: int) -> None:
    """Offs and rows that are none are taken for the nearest."""
    for offs, nearest in (
        ((6, 2, 8), (6, 6, 8)),
        ((-(2**31), 4, 3000), (0, 4, 11)),
        ((2**31 - 1, -9, 5), (11, 11, 11)),
    ):
        x, bs, _ = drawn((5, 16, 3, 1), torch.float32, rank)
        rows = torch.tensor([-(2**31), -5, *range(0, 5 * size, size), 9, 5, 5 * size, 10**9]).int()
        x, bs = x.requires_grad_(), [b.detach().requires_grad_() for b in bs]
        _, outs = fused_all_gather_grouped_matmul(x, bs, rows, torch.tensor(offs).int(), 0, world())
        every, inside = torch.cat(gather(x.detach())), rows.clamp(0, 5 * size - 1)
        for b, out in zip(bs, outs, strict=True):
            exact, grad = b.detach().double().requires_grad_(), torch.randn_like(out)
            want = products(every, exact, inside, torch.tensor(nearest))
            check("product", out[: want.shape[0]], want, BOUND[torch.float32])
            want.backward(grad[: want.shape[0]].double())
            out.backward(grad, retain_graph=True)
            assert b.grad is not None and exact.grad is not None
            check("gradient of B", b.grad, exact.grad, BOUND[torch.float32])


@pytest.mark.parametrize("size", [1, 2])
def test_wild_offs(size: int) -> None:
    run_row(wild, size)


def shuffled(rows: Tensor, offs: Tensor) -> Tensor:
    """Of each expert in another order; those of none as they were."""
    ends = [0, *offs.tolist(), rows.shape[0]]
    parts = [rows[begin:end] for begin, end in itertools.pairwise(ends)]
    return torch.cat([*(part[torch.randperm(len(part))] for part in parts[:-1]), parts[-1]])


def by_copy_engines(rank: int, size: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for call in range(4):
        x, bs, ids = drawn(shape, dtype, rank)
        first = rank % 2
        rows, offs, _ = moe_route(ids, shape[2], first_expert=first)
        bs = [b[first:] for b in bs]
        if call == 3:
            rows = shuffled(rows, offs)
        poison(rank)
        biases = drawn_biases(bs) if call == 0 else None
        with forced("copy_engine"):
            A, outs = fused_all_gather_grouped_matmul(
                x, bs, rows, offs, 0, world(), return_A=call == 1, biases=biases
            )
        assert last_plan().algorithm == "copy_engine"
        every = torch.cat(gather(x))
        if A is not None:
            check("A", A, every, 0)
        for b, bias, out in zip(bs, biases or [None] * len(bs), outs, strict=True):
            want = products(every, b.double(), rows, offs, None if bias is None else bias.double())
            check("product", out[: want.shape[0]], want, BOUND[dtype])


@needs_gemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(700, 72, 2, 2), *ROWS[:3]])
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (2, 3)])
def test_tokens_come_by_copy_engines(size: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    run_row(by_copy_engines, size, shape, dtype, device="cuda")


def backward(rank: int, size: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, bs, ids = drawn(shape, dtype, rank)
    rows, offs, _ = moe_route(ids, shape[2])
    x, bs = x.requires_grad_(), [b.detach().requires_grad_() for b in bs]
    biases = [bias.requires_grad_() for bias in drawn_biases(bs)]
    A, outs = fused_all_gather_grouped_matmul(x, bs, rows, offs, 0, world(), return_A=True, biases=biases)
    assert A is not None
    grads = [torch.randn_like(out) for out in (A, *outs)]
    poison(rank)
    torch.autograd.backward([A, *outs], grads)
    every, count = torch.cat(gather(x)).requires_grad_(), int(offs[-1])
    exact = [b.detach().double().requires_grad_() for b in bs]
    added = [bias.detach().double().requires_grad_() for bias in biases]
    terms = zip(exact, added, strict=True)
    found = [every, *(products(every, b, rows, offs, bias) for b, bias in terms)]
    torch.autograd.backward(found, [grads[0].double(), *(g[:count].double() for g in grads[1:])])
    assert every.grad is not None and x.grad is not None
    parts = [part.chunk(size)[rank] if part.numel() else part[:0] for part in gather(every.grad)]
    check("gradient of the tokens", x.grad, sum(parts), 2 * BOUND[dtype], parts)
    for b, like in zip(bs, exact, strict=True):
        assert b.grad is not None and like.grad is not None and b.grad.stride() == b.stride()
        check("gradient of B", b.grad, like.grad, BOUND[dtype])
    for bias, like in zip(biases, added, strict=True):
        assert bias.grad is not None and like.grad is not None
        check("gradient of a bias", bias.grad, like.grad, BOUND[dtype])


@pytest.mark.parametrize(("size", "device", "shape", "dtype"), cells((1, 2, 3), [(row,) for row in ROWS[:3]]))
def test_backward(size: int, device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    run_row(backward, size, shape, dtype, device=device)


def only_what_is_wanted(rank: int, size: int) -> None:
    x, (b, c), ids = drawn(ROWS[0], torch.float32, rank)
    rows, offs, _ = moe_route(ids, ROWS[0][2])
    for wanted in range(3):
        given = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, b, c))]
        _, outs = fused_all_gather_grouped_matmul(given[0], given[1:], rows, offs, 0, world())
        sum(out[: int(offs[-1])].sum() for out in outs).backward()  # type: ignore[union-attr]
        assert [t.grad is not None for t in given] == [i == wanted for i in range(3)]
    given[0].requires_grad_()
    _, outs = fused_all_gather_grouped_matmul(given[0], given[1:], rows, offs, 0, world())
    with pytest.raises(NotImplementedError, match="fused_all_gather_grouped_matmul: has no second gradient"):
        torch.autograd.grad(outs[0].sum(), given[0], create_graph=True)


def test_only_what_is_wanted() -> None:
    run_row(only_what_is_wanted, 2)


def plans(rank: int, size: int) -> None:
    x, bs, ids = drawn(ROWS[0], torch.float32, rank)
    rows, offs, _ = moe_route(ids, 9)
    expected = plan(fused_all_gather_grouped_matmul, x, bs, rows, offs, 0, world())
    fused_all_gather_grouped_matmul(x, bs, rows, offs, 0, world())
    assert last_plan() == expected and expected.algorithm == "host" and expected.workspace_bytes > 0


def test_plan() -> None:
    run_ranks(plans, 2, fresh=True)  # a workspace made before may be larger


def refused(rank: int, size: int) -> None:
    index, A, B = torch.zeros(3, dtype=torch.int32), torch.ones(4, 16), torch.ones(3, 16, 8)
    for *given, kind, message in (
        (torch.ones(2, 4, 16), [B], index, index, 0, ValueError, "A_shard: has 3 dimensions"),
        (A, [B], index, index, 1, ValueError, "gather_dim: is 1, must be 0: tokens are rows"),
        (A, [], index, index, 0, ValueError, "Bs: is empty"),
        (A, [B, B[:, :8]], index, index, 0, ValueError, r"Bs\[1\]: has shape \(3, 8, 8\), must be \[E, 16"),
        (A, [B[:2]], index, index, 0, ValueError, r"Bs\[0\]: has 2 experts, must have 3, as offs"),
        (A, [B[:, :, :7]], index, index, 0, ValueError, r"Bs\[0\]: has N = 7, must be a multiple of 8"),
        (A, [B.half()], index, index, 0, TypeError, r"Bs\[0\]: is torch.float16, must be torch.float32"),
        (A, [B], index.long(), index, 0, TypeError, "rows: is torch.int64, must be int32"),
        (A, [B], index, index.short(), 0, TypeError, "offs: is torch.int16, must be int32"),
    ):
        refuses(fused_all_gather_grouped_matmul, (*given, world()), kind, message)
    for biases, words in (
        ([], "biases: holds 0 tensors, must hold 1 as Bs does"),
        ([torch.ones(3, 7)], r"biases\[0\]: has shape \(3, 7\), must be \[3, 8\]"),
    ):
        with pytest.raises(ValueError, match=words):
            fused_all_gather_grouped_matmul(A, [B], index, index, 0, world(), biases=biases)
    for grad in (False, True):
        of = torch.ones_like(B).requires_grad_(grad)
        with pytest.raises(ValueError, match=r"Bs\[0\]: has N = 8, must be a multiple of 16"):
            fused_all_gather_grouped_matmul(A, [of], index, index, 0, world(), swiglu=True)
    with pytest.raises(TypeError, match="return_A: is of type int, must be True or False"):
        fused_all_gather_grouped_matmul(A, [B], index, index, 0, world(), return_A=1)  # type: ignore[arg-type]


def test_refused() -> None:
    run_row(refused, 2)
