"""float8_all_gather_matmul and float8_matmul_reduce_scatter between CPU ranks: what torchao's Float8Linear computes of
the whole layer, written out, and float64."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import assert_fused, gather, refuses, world
from ranks import on_ranks, run_row
from torch import Tensor
from weft.fused_ops import float8_all_gather_matmul, float8_matmul_reduce_scatter
from weft.fused_ops.layers.float8 import _cast_together

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# Of one rounding to the dtype, relative, and of a cast to fp8.
ROUND = {torch.float32: 2.0**-24, BF16: 2.0**-9, torch.float16: 2.0**-11}
CAST = {E4M3: (2.0**-4, 2.0**-10 / 448), E5M2: (2.0**-3, 2.0**-17 / 57344)}  # and of the largest, absolute


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torchao's hp_tensor_to_float8_dynamic of a whole tensor, as what it stands for, in float64."""
    largest = torch.finfo(dtype).max
    scale = (largest / torch.clamp(x.abs().max().to(torch.float64), min=1e-12)).to(torch.float32)
    numbers = (x.to(torch.float32) * scale).clamp(min=-largest, max=largest).to(dtype)
    return numbers.double() * scale.reciprocal().double()


def within(got: Tensor, A: Tensor, B: Tensor) -> None:
    """``A @ B`` of what operands stand for: each rank's part rounded and then their sum, by the dtype; sums of float32
    of up to 2**7 terms, and scales, before that."""
    bound = (2.1 * ROUND[got.dtype] + 2.0**-16) * (A.abs() @ B.abs())
    assert ((got.double() - A @ B).abs() <= bound + 1e-30).all()


def near(got: Tensor, exact: tuple[Tensor, Tensor], casts: tuple[torch.dtype, torch.dtype]) -> None:
    """``A @ B`` of what was cast: each element is off by a part of itself, and by one of the largest at most."""
    (A, B), (of_A, of_B) = exact, (CAST[dtype] for dtype in casts)
    more_A, more_B = (
        rel * x.abs() + tiny * x.abs().max() for x, (rel, tiny) in zip(exact, (of_A, of_B), strict=True)
    )
    bound = more_A @ B.abs() + A.abs() @ more_B + more_A @ more_B
    bound = bound + (2.1 * ROUND[got.dtype] + 2.0**-16) * ((A.abs() + more_A) @ (B.abs() + more_B))
    assert ((got.double() - A @ B).abs() <= bound).all()


def gathers(x: Tensor, B: Any, dim: Any, group: Any) -> Tensor:
    _, (y,) = float8_all_gather_matmul(x, [B], dim, group, return_A=False)
    return y


def scatters(A: Tensor, B: Any, dim: Any, group: Any) -> Tensor:
    return float8_matmul_reduce_scatter(A, B, "sum", dim, group)


def operands(rank: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Ranks' maxima differ."""
    return [(torch.randn(*shape) * (1 + rank)).to(dtype) for shape in shapes]


def joined(x: Tensor, dim: int) -> Tensor:
    return torch.cat(gather(x.detach().float()), dim).to(x.dtype)


def column_wise(rank: int, size: int, lead: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    k, n = 32, 48
    x, w, g = operands(rank, (*lead, k), (n, k), (1,), dtype=dtype)
    whole = [*lead]
    whole[dim] *= size
    g = (torch.randn(*whole, n) * (2 - rank)).to(dtype)
    x.requires_grad_(), w.requires_grad_()
    y = gathers(x, w.t(), dim, world())
    assert_fused()
    assert (y.shape, y.dtype) == ((*whole, n), dtype)
    y.backward(g)
    assert x.grad is not None and w.grad is not None and w.grad.stride() == w.stride()
    X, W = joined(x, dim), joined(w, 0)  # the unsharded layer: its weight has all ranks' rows
    G = joined(g, -1)
    rows = X.flatten(0, -2), G.flatten(0, -2)
    (xq, gq), wq = (cast(rows[0], E4M3), cast(rows[1], E5M2)), cast(W, E4M3)
    mine = slice(rank * n, (rank + 1) * n)
    within(y.detach().flatten(0, -2), xq, wq[mine].t())
    near(y.detach().flatten(0, -2), (rows[0].double(), W[mine].t().double()), (E4M3, E4M3))
    grad_x = joined(x.grad, dim).flatten(0, -2)
    within(grad_x, gq, wq)
    near(grad_x, (rows[1].double(), W.double()), (E5M2, E4M3))
    within(w.grad, gq[:, mine].t(), xq)
    near(w.grad, (rows[1][:, mine].t().double(), rows[0].double()), (E5M2, E4M3))


def row_wise(rank: int, size: int, lead: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    k, n = 32, 48
    whole = [*lead]
    whole[dim] *= size
    x, w, g = operands(rank, (*whole, k), (n, k), (*lead, n), dtype=dtype)
    x.requires_grad_(), w.requires_grad_()
    y = scatters(x, w.t(), dim, world())
    assert_fused()
    assert (y.shape, y.dtype) == ((*lead, n), dtype) and y.is_contiguous()
    y.backward(g)
    assert x.grad is not None and w.grad is not None
    X, W, G = joined(x, -1).flatten(0, -2), joined(w, 1), joined(g, dim).flatten(0, -2)
    xq, wq, gq = cast(X, E4M3), cast(W, E4M3), cast(G, E5M2)
    mine = slice(rank * k, (rank + 1) * k)
    Y = joined(y, dim).flatten(0, -2)
    within(Y, xq, wq.t())
    near(Y, (X.double(), W.t().double()), (E4M3, E4M3))
    within(x.grad.flatten(0, -2), gq, wq[:, mine])
    near(x.grad.flatten(0, -2), (G.double(), W[:, mine].double()), (E5M2, E4M3))
    within(w.grad, gq.t(), xq[:, mine])
    near(w.grad, (G.t().double(), X[:, mine].double()), (E5M2, E4M3))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("lead", "dim"), [((16,), 0), ((4, 8), 1), ((2, 3, 16), -2)])
@pytest.mark.parametrize("fn", [column_wise, row_wise])
def test_a_layer(fn: Callable[..., None], lead: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    run_row(fn, 2, lead, dim % (len(lead) + 1), dtype)


@on_ranks(2)
def test_one_gradient(rank: int, size: int) -> None:
    """Of the operand that wants one; and results without."""
    for fn, rows in ((gathers, 8), (scatters, 16)):
        grads: dict[int, list[Any]] = {}
        x, w = torch.randn(rows, 32), torch.randn(48, 32)
        for which in (0, 1, 2):
            a, b = x.clone().requires_grad_(which != 1), w.clone().requires_grad_(which != 0)
            y = fn(a, b.t(), 0, world())
            torch.manual_seed(5)
            y.backward(torch.randn(y.shape))
            grads[which] = [a.grad, b.grad]
        assert grads[0][1] is None and grads[1][0] is None
        assert torch.equal(grads[0][0], grads[2][0]) and torch.equal(grads[1][1], grads[2][1])
        assert not fn(x, w.t(), 0, world()).requires_grad
        a = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(a, w.t(), 0, world()).square().sum(), a, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@on_ranks(2)
def test_zeros_and_compiled(rank: int, size: int) -> None:
    """Nothing but zeros has the scale of the smallest maximum; and torch.compile computes the same."""
    w = torch.randn(48, 32, dtype=BF16)
    assert not gathers(torch.zeros(8, 32, dtype=BF16), w.t(), 0, world()).any()
    name, results = world().group_name, []

    def both(x: Tensor, v: Tensor) -> Tensor:
        A, (y, z) = float8_all_gather_matmul(x, [v.t(), v[:16].t()], 0, name)
        assert A is not None
        return scatters(x, v.t(), 0, name).sum() + y.sum() + z.square().sum() + A.square().sum()

    for fn in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(rank)
        x, v = torch.randn(16, 32).requires_grad_(), torch.randn(48, 32).requires_grad_()
        y = fn(x, v)
        y.backward()
        results.append((y.detach(), x.grad, v.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_several_matrices_and_what_is_gathered(rank: int, size: int) -> None:
    """Matrices, and A: each product is that of its own call, and A's gradient is added to theirs."""
    x, v, w, of_A = operands(rank, (8, 32), (48, 32), (16, 32), (8 * size, 32), dtype=BF16)
    of_y, of_z = operands(rank, (8 * size, 48), (8 * size, 16), dtype=BF16)
    x.requires_grad_(), w.requires_grad_()
    A, (y, z) = float8_all_gather_matmul(x, [v.t(), w.t()], 0, world())
    assert A is not None and A.dtype == BF16
    exact = cast(joined(x, 0), E4M3)
    rounding = 1.01 * 2.0**-8  # to bfloat16, relative, and to float32 before it
    assert ((A.double() - exact).abs() <= rounding * exact.abs()).all()
    torch.autograd.backward([A, y, z], [of_A, of_y, of_z])
    x1, w1 = x.detach().requires_grad_(), w.detach().requires_grad_()
    y1, z1 = gathers(x1, v.t(), 0, world()), gathers(x1, w1.t(), 0, world())
    assert torch.equal(y, y1) and torch.equal(z, z1)
    (by_y,), (by_z, grad_w) = torch.autograd.grad(y1, x1, of_y), torch.autograd.grad(z1, (x1, w1), of_z)
    assert x.grad is not None and w.grad is not None and torch.equal(w.grad, grad_w)
    terms = [sum(gather(of_A.double())).chunk(size)[rank], by_y.double(), by_z.double()]
    bound = 3 * rounding * sum(term.abs() for term in terms)  # one reduction and two additions
    assert ((x.grad.double() - sum(terms)).abs() <= bound).all()
    A, (y,) = float8_all_gather_matmul(x.detach(), [w.t()], 0, world())
    assert A is not None and not A.requires_grad and y.requires_grad


@on_ranks(2)
def test_an_average(rank: int, size: int) -> None:
    """Of two ranks: half of the sum, to the bit, and so are its gradients."""
    found = []
    x, w, g = operands(rank, (16, 32), (48, 32), (8, 48), dtype=torch.float32)
    for reduce_op in ("sum", dist.ReduceOp.AVG):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = float8_matmul_reduce_scatter(a, b.t(), reduce_op, 0, world())
        y.backward(g)
        found.append((y.detach(), a.grad, b.grad))
    for total, mean in zip(*found, strict=True):
        assert total is not None and mean is not None and torch.equal(mean, total / 2)


@on_ranks(2)
def test_what_is_refused(rank: int, size: int) -> None:
    x, w = torch.randn(16, 32), torch.randn(48, 32)
    of_x = "A_shard", "gather_dim"
    for fn, (name, dim), of_B in ((gathers, of_x, r"Bs\[0\]"), (scatters, ("A", "scatter_dim"), "B")):
        for args, kind, words in (
            ((x[0], w.t(), 0, None), ValueError, name),
            ((x.to(E4M3), w.t(), 0, None), TypeError, f"{name}: is torch.float8_e4m3fn, must be"),
            ((x, w.t().double(), 0, None), TypeError, f"{of_B}: is torch.float64, must be torch.float32"),
            ((x, w, 0, None), ValueError, f"{of_B}: has 48 rows, must have 32"),
            (
                (x, torch.randn(32, 9), 0, None),
                ValueError,
                f"{of_B}: has 9 columns, must have a multiple of 16",
            ),
            ((x, w.t(), 1, None), ValueError, f"{dim}: is 1, the last dimension"),
            ((x, w.t(), 5, None), ValueError, dim),
            (([1.0], w.t(), 0, None), TypeError, name),
        ):
            refuses(fn, args, kind, words)
        with pytest.raises(ValueError, match=f"{name}: makes .* must make a multiple of 16 where {of_B}"):
            fn(x[:6], w.t().requires_grad_(), 0, None)
    refuses(scatters, (x[:5], w.t(), 0, None), ValueError, "must be a multiple of 2 ranks")
    for fn, args, kind, words in (
        (float8_all_gather_matmul, (x, [], 0), ValueError, "Bs: is empty, must have one matrix or more"),
        (float8_all_gather_matmul, (x, w.t(), 0), TypeError, "Bs: is a tensor, must be a sequence"),
        (float8_matmul_reduce_scatter, (x, w.t(), "max", 0), ValueError, "reduce_op: is 'max', must be"),
        (float8_matmul_reduce_scatter, (x, w.t(), 0, 0), TypeError, "reduce_op: is of type int, must be"),
    ):
        refuses(fn, args, kind, words)
    with pytest.raises(TypeError, match="return_A: is of type int, must be True or False"):
        float8_all_gather_matmul(x, [w.t()], 0, return_A=1)


def as_torchao_casts(x: Tensor, whole: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hp_tensor_to_float8_dynamic of a part of a tensor: its numbers, and by what they are multiplied."""
    largest = torch.finfo(dtype).max
    scale = (largest / torch.clamp(whole.abs().max().to(torch.float64), min=1e-12)).to(torch.float32)
    return (x.to(torch.float32) * scale).clamp(min=-largest, max=largest).to(dtype), scale.reciprocal()


def cast_bits(rank: int, size: int, of: torch.dtype) -> None:
    """Every bit of a cast is torchao's, of one tensor and of two together; what is returned lies as kernels take it."""
    x = torch.randn(37, 48).mul(torch.exp2(torch.randint(-40, 3, (37, 1)).float())).to(of) * (1 + rank)
    least = torch.full((16, 16), 2.0**-60 if of != torch.float16 else 2.0**-24).to(of)
    lone, edge = x.clone(), torch.linspace(-1, 1, 4096).to(of).view(64, 64)
    lone[3, 5] = inf
    for dtype in (E4M3, E5M2):
        for given in ((x,), (x, edge), (least, x.t()[::2]), (torch.zeros(3, 16).to(of), lone), (x[:0], edge)):
            across = [t.shape[0] % 16 == 0 for t in given]
            found = _cast_together(given, dtype, world().group_name, across)
            for t, (numbers, inverse, transposed) in zip(given, found, strict=True):
                whole = torch.cat([each.flatten() for each in gather(t.float().contiguous())])
                want, scale = as_torchao_casts(t, whole if whole.numel() else torch.zeros(1), dtype)
                assert torch.equal(numbers.view(torch.uint8), want.contiguous().view(torch.uint8))
                assert torch.equal(inverse, scale) and inverse.dtype == torch.float32 and inverse.dim() == 0
                assert numbers.is_contiguous() and inverse.data_ptr() % 16 == 0
                assert (transposed is not None) == (t.shape[0] % 16 == 0)
                if transposed is not None:
                    assert transposed.is_contiguous()
                    assert torch.equal(transposed.view(torch.uint8), want.view(torch.uint8).t())


@pytest.mark.parametrize("of", ROUND)
def test_casts_are_torchaos(of: torch.dtype) -> None:
    run_row(cast_bits, 2, of)
