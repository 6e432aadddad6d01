"""grouped_matmul and its gradients against float64, on random rows and experts of any number of them."""

from __future__ import annotations

import itertools
from threading import Thread
from typing import Any

import pytest
import torch
from opcommon import check
from torch import Tensor
from torch.nn.functional import silu
from weft.fused_ops import grouped_matmul, moe_route
from weft.fused_ops.ops.experts import grouped_matmul as of_grouped_matmul
from weft.kernels.grouped_matmul import cuda_kernel
from weft.symm_mem import set_checked

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
COUNTS = {
    "empty": (0, 37, 0, 0, 1, 200, 0),
    "one": (0, 0, 150),
    "none": (0, 0),
    "alone": (65,),
    "many": tuple(torch.arange(70).remainder(7).tolist()),
    "large": (700, 3, 129),
}


def drawn(
    counts: tuple[int, ...], left: int, dtype: torch.dtype, device: str, kn: tuple[int, int] = (72, 104)
) -> Any:
    """A, B (K contiguous), offs, rows and bias; ``left`` rows are of no expert."""
    (k, n), tokens, experts = kn, 53, len(counts)
    A, B = torch.randn(tokens, k), torch.randn(experts, n, k)
    rows = torch.randint(tokens, (sum(counts) + left,), dtype=torch.int32)
    given = (
        A.to(dtype),
        B.to(dtype).mT,
        torch.tensor(counts).cumsum(0).int(),
        rows,
        torch.randn(experts, n).to(dtype),
    )
    return [x.to(device) for x in given]


def in_float64(A: Tensor, B: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows that are taken already, those of experts."""
    ends = [0, *offs.tolist()]
    counts = [end - begin for begin, end in itertools.pairwise(ends)]
    # Split: the gradient of an index is as large as all experts, for each of them.
    shares = A.double()[: ends[-1]].split(counts)
    parts = [a @ b for a, b in zip(shares, B.double().unbind(), strict=True)]
    return torch.cat(parts if bias is None else [x + y for x, y in zip(parts, bias.double(), strict=True)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", COUNTS)
def test_products(kind: str, dtype: torch.dtype, device: str) -> None:
    for i, kn in enumerate([(72, 104), (8, 8), (264, 360), (128, 192)]):
        A, B, offs, rows, bias = drawn(COUNTS[kind], 5 * (i % 2), dtype, device, kn)
        taken = A[rows.long()]
        for b in (
            B,
            B.contiguous(),
            torch.cat([B, B], 2)[:, :, : kn[1]],
            torch.cat([B, B], 1).mT[..., : kn[0]].mT,
        ):
            for named in ({}, {"bias": bias}):
                want = in_float64(taken, b, offs, named.get("bias"))
                for of, more in ((A, {"rows": rows}), (taken, {})):
                    got = grouped_matmul(of, b, offs, **named, **more)
                    assert got.shape == (rows.shape[0], kn[1]) and got.dtype == dtype
                    check(f"{kn} {[*named, *more]}", got[: want.shape[0]], want, BOUNDS[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", COUNTS)
def test_swiglu(kind: str, dtype: torch.dtype, device: str) -> None:
    """With a gradient, on the CPU, and of B with N contiguous, gate and up are rounded before."""
    for i, kn in enumerate([(72, 80), (8, 16), (264, 544), (128, 192)]):
        A, B, offs, rows, bias = drawn(COUNTS[kind], 5 * (i % 2), dtype, device, kn)
        A, B = A / kn[0] ** 0.25, B / kn[0] ** 0.25
        for b, added in itertools.product(
            (B, B.contiguous(), torch.cat([B, B], 2)[:, :, : kn[1]]), (None, bias)
        ):
            given = [x.detach().requires_grad_() for x in (A, b)]
            exact = [x.detach().double().requires_grad_() for x in (A, b)]
            gate, up = in_float64(exact[0][rows.long()], exact[1], offs, added).chunk(2, 1)
            want = silu(gate) * up
            for of in ((A, b), given):
                got = grouped_matmul(*of, offs, rows=rows, bias=added, swiglu=True)
                assert got.shape == (rows.shape[0], kn[1] // 2) and got.dtype == dtype
                check(f"{kn}", got[: want.shape[0]], want, 3 * BOUNDS[dtype])
            grad = torch.randn_like(got)
            got.backward(grad)
            want.backward(grad[: want.shape[0]].double())
            for name, x, like in zip("AB", given, exact, strict=True):
                assert x.grad is not None and like.grad is not None
                check(f"gradient of {name}", x.grad, like.grad, 4 * BOUNDS[dtype])


def test_swiglu_of_what_is_none() -> None:
    A, B, offs, rows, _ = drawn((3, 5), 0, torch.float32, "cpu")
    for of in (B, B.clone().requires_grad_()):
        with pytest.raises(
            ValueError, match="B: has N = 24, must be a multiple of 16 from 16 on, gate and up"
        ):
            grouped_matmul(A, of[:, :, :24], offs, rows=rows, swiglu=True)
    with pytest.raises(TypeError, match="swiglu: is of type int, must be True or False"):
        grouped_matmul(A, B, offs, rows=rows, swiglu=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_is_added_before_the_sum_is_rounded(dtype: torch.dtype) -> None:
    A, B, offs, rows, _ = drawn((30, 0, 70), 0, dtype, "cpu")
    taken, ends = A[rows.long()], [0, *offs.tolist()]
    product = in_float64(taken, B, offs, None)
    bias = torch.stack([-product[min(end, 99)] for end in ends[:-1]]).to(dtype)  # of some rows little is left
    got = grouped_matmul(A, B, offs, rows=rows, bias=bias)
    want = in_float64(taken, B, offs, bias)
    in_float32 = 2.0**-24 * 73 * (in_float64(taken.abs(), B.abs(), offs, bias.abs()))
    assert ((got.double() - want).abs() <= torch.finfo(dtype).eps / 2 * want.abs() + in_float32).all()


@pytest.mark.gpu(1)
def test_rows_in_any_order() -> None:
    """Also such as are of tokens that are not there, which are taken for the nearest, and long ones."""
    for k, counts in ((72, (2000, 0, 1300)), (4104, (30, 1))):
        A, B, offs, rows, bias = drawn(counts, 5, torch.bfloat16, "cuda", (k, 104))
        rows = rows * 3 - 50
        want = in_float64(A[rows.clamp(0, 52).long()], B, offs, bias)
        got = grouped_matmul(A, B, offs, rows=rows, bias=bias)
        check(f"K = {k}", got[: want.shape[0]], want, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("device", DEVICES)
def test_operands_that_lie_otherwise(device: str) -> None:
    A, B, offs, rows, bias = drawn((3, 0, 90), 0, torch.bfloat16, device)
    odd = torch.zeros(bias.numel() + 1, dtype=A.dtype, device=device)[1:].view(bias.shape).copy_(bias)
    biased = grouped_matmul(A, B, offs, rows=rows, bias=odd)
    check("bias", biased, in_float64(A[rows.long()], B, offs, bias), BOUNDS[A.dtype])
    want = in_float64(A[rows.long()], B, offs, None)
    wide = torch.zeros(53, 150, dtype=A.dtype, device=device)
    wide[:, 1:145:2] = A
    beside = torch.zeros(53 * 72 + 1, dtype=A.dtype, device=device)[1:].view(53, 72).copy_(A)
    for a in (wide[:, 1:145:2], A.t().contiguous().t(), beside):
        check("A", grouped_matmul(a, B, offs, rows=rows), want, BOUNDS[A.dtype])
    every = torch.stack([rows, rows], 1)[:, 0]
    check("rows", grouped_matmul(A, B, offs, rows=every), want, BOUNDS[A.dtype])
    apart = torch.zeros(3, 72, 208, dtype=A.dtype, device=device)[:, :, ::2].copy_(B)
    check("B", grouped_matmul(A, apart, offs, rows=rows), want, BOUNDS[A.dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_what_moe_route_returns(k: int, device: str) -> None:
    """Of ids of which some are sentinels; each choice is its token's product with its expert."""
    experts, tokens = 9, 41
    ids = torch.rand(tokens, experts + 3).argsort(1)[:, :k].to(device)
    A, B = torch.randn(tokens, 40, device=device), torch.randn(experts, 40, 24, device=device)
    rows, offs, slots = moe_route(ids, experts, first_expert=2, num_local_experts=5)
    got = grouped_matmul(A, B[2:7], offs, rows=rows)
    here = (ids >= 2) & (ids < 7)
    want = torch.einsum("tk,tjkn->tjn", A.double(), B.double()[ids.clamp(max=experts - 1)])
    check("choices", got[slots[here].long()], want[here], BOUNDS[torch.float32])


@pytest.mark.gpu(1)
def test_the_first_call_of_a_thread() -> None:
    """Before anything of torch's: the thread has no CUDA context."""
    A, B, offs, rows, _ = drawn(COUNTS["large"], 4, torch.bfloat16, "cuda")
    found = [grouped_matmul(A, B, offs, rows=rows)]
    torch.cuda.synchronize()
    thread = Thread(target=lambda: found.append(grouped_matmul(A, B, offs, rows=rows)))
    thread.start()
    thread.join()
    assert len(found) == 2 and torch.equal(*(each[: int(offs[-1])] for each in found))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", ["empty", "one", "none", "large"])
def test_gradients(kind: str, by_rows: bool, dtype: torch.dtype, device: str) -> None:
    A, B, offs, rows, bias = drawn(COUNTS[kind], 4, dtype, device)
    A = A if by_rows else A[rows.long()]
    grad = torch.randn(rows.shape[0], 104, device=device).to(dtype)
    for b in (B, B.contiguous()):
        given = [x.detach().requires_grad_() for x in (A, b, bias)]
        out = grouped_matmul(given[0], given[1], offs, rows=rows if by_rows else None, bias=given[2])
        out.backward(grad)
        wanted = [x.detach().double().requires_grad_() for x in (A, b, bias)]
        taken = wanted[0][rows.long()] if by_rows else wanted[0]
        want = in_float64(taken, wanted[1], offs, wanted[2])
        want.backward(grad[: want.shape[0]].double())
        for name, got, like in zip(("A", "B", "bias"), given, wanted, strict=True):
            assert got.grad is not None and like.grad is not None and got.grad.dtype == dtype
            check(f"gradient of {name}", got.grad, like.grad, BOUNDS[dtype])
        assert given[1].grad is not None and given[1].grad.stride() == b.stride()


def test_only_what_is_wanted() -> None:
    A, B, offs, rows, bias = drawn((3, 5), 0, torch.float32, "cpu")
    for wanted in range(3):
        given = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((A, B, bias))]
        grouped_matmul(given[0], given[1], offs, rows=rows, bias=given[2]).sum().backward()
        assert [x.grad is not None for x in given] == [i == wanted for i in range(3)]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_bits(device: str) -> None:
    """One token is in all rows: its gradient is a sum in one order."""
    A, B, offs, rows, _ = drawn((300, 700), 0, torch.bfloat16, device)
    A.requires_grad_()
    grad = torch.randn(1000, 104, device=device).bfloat16()
    found = [
        torch.autograd.grad(grouped_matmul(A, B, offs, rows=torch.zeros_like(rows)), A, grad)[0]
        for _ in range(3)
    ]
    assert all(torch.equal(x, found[0]) for x in found)


def test_no_second_gradient() -> None:
    A, B, offs, rows, _ = drawn((3, 5), 0, torch.float32, "cpu")
    A.requires_grad_()
    out = grouped_matmul(A, B, offs, rows=rows)
    with pytest.raises(NotImplementedError, match="grouped_matmul: has no second gradient"):
        torch.autograd.grad(out.sum(), A, create_graph=True)


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    def layer(A: Tensor, B: Tensor, scores: Tensor) -> Tensor:
        rows, offs, slots = moe_route(scores.topk(2, dim=1)[1], 8)
        return grouped_matmul(A, B, offs, rows=rows)[slots.long()].sin().sum(1)

    scores = torch.randn(19, 8, device=device)
    found = []
    torch._dynamo.reset()
    for call in (layer, torch.compile(layer, fullgraph=True)):
        torch.manual_seed(0)
        A = torch.randn(19, 16, device=device, requires_grad=True)
        B = torch.randn(8, 16, 24, device=device, requires_grad=True)
        out = call(A, B, scores)
        out.cos().sum().backward()
        found.append((out.detach(), A.grad, B.grad))
    for got, want in zip(found[1], found[0], strict=True):
        check("compiled", got, want.double(), 2e-6)  # type: ignore[union-attr, arg-type]


def test_opcheck() -> None:
    A, B, offs, rows, bias = drawn((3, 0, 5), 0, torch.float32, "cpu", (16, 24))
    for grad in (False, True):
        given = [x.detach().requires_grad_(grad) for x in (A, B, bias)]
        for swiglu in (False, True):
            of = given[0], given[1][..., :16], offs, rows, given[2][:, :16], swiglu
            torch.library.opcheck(torch.ops.weft.grouped_matmul, of)
    grad = torch.randn(8, 24)
    for transposed in (False, True):
        torch.library.opcheck(torch.ops.weft.grouped_matmul_gradient_of_b, (A, grad, offs, rows, transposed))
    torch.library.opcheck(torch.ops.weft.sum_by_index, (grad, rows, 53))


I32 = torch.int32
WILD = {  # offs that are none of 11 rows, and the nearest that are
    "far": ((2**31 - 1, -(2**31), 5), (11, 11, 11)),
    "too large": ((4, 9, 3000), (4, 9, 11)),
    "negative": ((-(2**31), -7, 11), (0, 0, 11)),
    "decreasing": ((6, 2, 8), (6, 6, 8)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("name", WILD)
def test_wild_numbers_stay_inside(name: str, by_rows: bool, device: str) -> None:
    offs, nearest = torch.tensor(WILD[name], dtype=I32, device=device)
    A, B, _, _, bias = drawn((3, 5, 0), 3, torch.float32, device)
    A = A if by_rows else A[:11].clone()
    rows = torch.tensor([-(2**31), -5, *range(1, 8), 53, 10**9], dtype=I32, device=device)
    named = {"rows": rows} if by_rows else {}
    B.requires_grad_()
    bias.requires_grad_()
    got = grouped_matmul(A, B, offs, bias=bias, **named)
    exact = [x.detach().double().requires_grad_() for x in (B, bias)]
    want = in_float64(A[rows.clamp(0, 52).long()] if by_rows else A, exact[0], nearest, exact[1])
    check("clamped", got[: want.shape[0]], want, 2e-6)
    grad = torch.randn_like(got)
    got.backward(grad)
    want.backward(grad[: want.shape[0]].double())
    for given, like in zip((B, bias), exact, strict=True):
        assert given.grad is not None and like.grad is not None
        check("gradient", given.grad, like.grad, 2e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "integers": (
        {"A": torch.ones(5, 16, dtype=I32)},
        "A: is torch.int32, must be float32, bfloat16 or float16",
    ),
    "three dimensions": ({"A": torch.ones(2, 5, 16)}, "A: has 3 dimensions, must be a matrix [T, K]"),
    "another K": ({"B": torch.ones(3, 24, 8)}, "B: has shape (3, 24, 8), must be [E, 16, N]"),
    "a matrix": ({"B": torch.ones(16, 8)}, "B: has shape (16, 8), must be [E, 16, N]"),
    "another dtype": (
        {"B": torch.ones(3, 16, 8).half()},
        "B: is torch.float16, must be torch.float32 like A",
    ),
    "no experts": ({"B": torch.ones(0, 16, 8)}, "B: has 0 experts, must have from 1 to 2048"),
    "odd N": ({"B": torch.ones(3, 16, 12)}, "B: has N = 12, must be a multiple of 8"),
    "odd K": ({"A": torch.ones(5, 4), "B": torch.ones(3, 4, 8)}, "B: has K = 4, must be a multiple of 8"),
    "other counts": (
        {"offs": torch.zeros(4, dtype=I32)},
        "offs: has 4 elements, must have 3, as B has experts",
    ),
    "long counts": ({"offs": torch.zeros(3).long()}, "offs: is torch.int64, must be int32"),
    "rows of rows": ({"rows": torch.zeros(3, 1, dtype=I32)}, "rows: has 2 dimensions, must have 1"),
    "no tokens": ({"A": torch.ones(0, 16), "rows": torch.zeros(3, dtype=I32)}, "A: has no rows"),
    "bias": ({"bias": torch.ones(8)}, "bias: has shape (8,), must be [3, 8]"),
    "no tensor": ({"bias": 1.0}, "bias: is of type float, must be a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    wrong, message = REFUSED[name]
    given = {"A": torch.ones(5, 16), "B": torch.ones(3, 16, 8), "offs": torch.zeros(3, dtype=I32), **wrong}
    for device in ("cpu", "meta"):
        on = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
        with pytest.raises((ValueError, TypeError)) as raised:
            grouped_matmul(**on)  # type: ignore[arg-type]
        assert str(raised.value).startswith(message)


def test_numbers_that_the_checked_mode_refuses() -> None:
    A, B, offs, rows, _ = drawn((3, 5), 0, torch.float32, "cpu")
    set_checked(True)
    try:
        grouped_matmul(A, B, offs, rows=rows)
        for numbers, message in (
            ((3, 2), r"offs\[1\]: is 2, must be from 3 to 8"),
            ((3, 9), r"offs\[1\]: is 9, must be from 3 to 8"),
        ):
            with pytest.raises(ValueError, match=message):
                grouped_matmul(A, B, torch.tensor(numbers, dtype=I32), rows=rows)
        with pytest.raises(ValueError, match="rows: holds 53, must be from 0 to 52"):
            grouped_matmul(A, B, offs, rows=rows.index_fill(0, torch.tensor(1), 53))
    finally:
        set_checked(False)


def test_a_launcher_is_made_for_the_operands_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_kernel, "GroupedMatmul", lambda *given: made.append(given))
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        layout = ((64, 64), (64, 1)), (((2, 64, 64), (4096, 64, 1)),), torch.bfloat16, device
        of_grouped_matmul._prepared(layout, 132, gated=False)
    assert len(made) == 2
    of_grouped_matmul._prepared.cache_clear()


def test_no_rows_with_any_strides() -> None:
    A, B, offs = torch.empty(8, 0).t(), torch.randn(1, 8, 8), torch.zeros(1, dtype=torch.int32)
    assert grouped_matmul(A, B, offs).shape == (0, 8)
    assert grouped_matmul(A, B, offs, bias=torch.randn(1, 8)).shape == (0, 8)
