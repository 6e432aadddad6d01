"""Further products that fused_matmul_reduce_scatter adds: on real CPU processes, and as CUDA launches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import NAME, Stage, run_on_cuda
from opcommon import BOUND, DEVICES, DTYPES, check, gather, matrix, poison, refuses, whole, world
from ranks import on_ranks, run_row
from weft.fused_ops.dispatch.launch_cache import key_of
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.ops import matmul_reduce_scatter
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.kernels.matmul_reduce_scatter import OP, on_cuda
from weft.kernels.matmul_reduce_scatter.configs import ScatterKernelCall, ScatterPushConfig
from weft.symm_mem.call_cache import CachedDict

_op = torch.ops.weft.fused_matmul_reduce_scatter
stage = fake_gpu.stage


def shapes(w: int) -> list[tuple[tuple[int, ...], list[int], int, int]]:
    """A but for its columns, those of each A, columns of the Bs, scatter_dim."""
    return [
        ((5 * w,), [7, 3], 11, 0),
        ((2, 3 * w), [6, 6, 1], 10, 1),
        ((6,), [3, 8], 4 * w, -1),
        ((2 * w, 4), [5, 2, 9, 4, 1], 6, 0),
        ((66 * w,), [256, 64, 72], 136, 0),
        ((4 * w,), [0, 3], 5, 0),
    ]


def factors_of(rows: tuple[int, ...], ks: list[int], n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """With gaps between the rows of every other A, and every other B the other way around."""
    found = []
    for i, k in enumerate(ks):
        wide = torch.randn(*rows, k + 3 * (i % 2)).to(dtype)
        b = torch.randn(k, n).to(dtype)
        found += [wide[..., :k], b.t().contiguous().t() if i % 2 else b]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks([1, 2, 3], device=DEVICES)
def test_a_sum_of_products(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for rows, ks, n, dim in shapes(world_size):
        for reduce_op, algorithm, wide in (
            ("sum", "fused", False),
            ("avg", "fused", True),
            ("avg", "unfused", False),
        ):
            poison(rank)
            factors = factors_of(rows, ks, n, dtype)
            scale = world_size if reduce_op == "avg" else 1
            given = [gather(x) for x in factors]
            products = [
                (a @ b / scale).chunk(world_size, dim)[rank]
                for As, Bs in zip(given[::2], given[1::2], strict=True)
                for a, b in zip(As, Bs, strict=True)
            ]
            residual = torch.randn(products[0].shape).to(dtype)
            with forced(algorithm):
                out = _op(
                    *(*factors[:2], reduce_op, dim, world().group_name),
                    out_dtype=torch.float32 if wide else None,
                    residual=residual,
                    more=factors[2:],
                )
            assert out.dtype == (torch.float32 if wide else dtype) and out.is_contiguous()
            parts = [*products, residual.double()]
            check(f"{rows} {ks} {dim} {reduce_op} {algorithm}", out, sum(parts), BOUND[dtype], parts)


def gradients(rank: int, world_size: int) -> None:
    """Of all that require one, for each way in which some do not."""
    for constants in ((), (0,), (1, 2), (0, 2), (1, 3)):
        factors = factors_of((4 * world_size,), [5, 3], 6, torch.float32)
        for i, x in enumerate(factors):
            factors[i] = x.detach().requires_grad_(i not in constants)
        out = _op(*factors[:2], "avg", 0, world().group_name, more=factors[2:])
        weight = torch.randn_like(out)
        (out.sin() * weight).sum().backward()
        wanted = [[t.requires_grad_() for t in gather(x)] for x in factors]
        total = sum(
            a @ b / world_size
            for As, Bs in zip(wanted[::2], wanted[1::2], strict=True)
            for a, b in zip(As, Bs, strict=True)
        )
        (total.sin() * torch.cat(gather(weight))).sum().backward()
        for i, (x, of_all) in enumerate(zip(factors, wanted, strict=True)):
            if i in constants:
                assert x.grad is None
            else:
                check(f"factor {i}, constant {constants}", x.grad, of_all[rank].grad, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients(world_size: int, device: str) -> None:
    run_row(gradients, world_size, device=device)


def sum_of(A: torch.Tensor, B: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = _op(A, B, "sum", 0, world().group_name, more=more)
    return out


@on_ranks(2, device=DEVICES)
def test_what_is_refused(rank: int, world_size: int) -> None:
    A, B = torch.randn(2 * world_size, 4), torch.randn(4, 5)
    for more, error, what in (
        ([A], ValueError, "more: has 1 tensors"),
        ([A[1:], B], ValueError, r"more\[0\]: has shape"),
        ([A[None], B], ValueError, r"more\[0\]: has shape"),
        ([A.half(), B], TypeError, r"more\[0\]: is torch.float16"),
        ([A, B, A, B[:3]], ValueError, r"more\[3\]: has 3 rows, must have 4, as many as more\[2\]"),
        ([A, B[:, :4]], ValueError, r"more\[1\]: has 4 columns, must have 5 like B"),
        ([A, B.bfloat16()], TypeError, r"more\[1\]: is torch.bfloat16"),
    ):
        refuses(sum_of, (A, B, more), error, what)


@on_ranks(2, device=DEVICES)
def test_opcheck(rank: int, world_size: int) -> None:
    A, B = torch.randn(4, 6).requires_grad_(), torch.randn(6, 5).requires_grad_()
    more = [torch.randn(4, 2), torch.randn(2, 5).requires_grad_()]
    torch.library.opcheck(_op, (A, B, "sum", 0, world().group_name), {"more": more})


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda")
def test_exact_on_gpus(rank: int, world_size: int) -> None:
    """In one launch, whatever lies how: 16 bits, tiles cut off, both orders of B, one more product than it takes."""
    for ks, transposed, dim in (
        ([136, 72], [False, False], 0),
        ([64, 200, 8, 72], [True] * 4, 0),
        ([72, 136], [False, True], 0),
        ([72] * 5, [True] * 5, 0),
        ([136, 72], [False, False], 1),
        ([136, 4], [True, True], 0),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            poison(rank)
            m, n = 67 * world_size, 72 * world_size
            As = [whole(m, k + 8, dtype=dtype)[:, 8:] for k in ks]
            Bs = [matrix(k, n, dtype, transposed=t) for k, t in zip(ks, transposed, strict=True)]
            (A, *_), (B, *_) = As, Bs
            more = [x for pair in zip(As[1:], Bs[1:], strict=True) for x in pair]
            total = sum(a.float() @ b.float() for a, b in zip(As, Bs, strict=True))
            want = sum(gather(total)).chunk(world_size, dim)[rank]
            for _ in range(3):  # the first, and those like it
                with forced("fused"):
                    out = _op(A, B, "sum", dim, world().group_name, more=more)
                assert torch.equal(out.double(), want), f"{ks} {dim} {dtype}"


class Kernel:
    """What on_cuda launches, instead of the driver."""

    def __init__(self, workspace: Any, call: ScatterKernelCall, config: Any) -> None:
        assert isinstance(config, ScatterPushConfig)
        self.sizes = [(x.shape, x.stride()) for x in call.factors]

    def launch(self, buffer: int, operands: list[int], results: list[int], *_: int) -> None:
        self.operands = operands


@pytest.fixture
def where(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A heap whose workspace is empty."""
    prepared = stage.workspace.prepared = CachedDict()  # type: ignore[assignment]
    stage.workspace.heap = SimpleNamespace(prepare=lambda op, same, step: step())
    monkeypatch.setattr(on_cuda, "SCATTER_STEPS", on_cuda.SCATTER_STEPS._replace(make=Kernel))
    return SimpleNamespace(**vars(stage.where), prepared=prepared)


M, N = 16384, 4096  # so much that the kernel which sends tiles is chosen


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("ks", "transposed", "as_they_are"),
    [
        ([72, 136, 8], [True] * 3, True),
        ([72, 136], [False] * 2, True),
        ([72, 136], [False, True], False),
        ([72] * 5, [True] * 5, False),
        ([72, 4, 4], [True] * 3, False),
    ],
    ids=["three", "two", "both orders of B", "five", "rows of 8 bytes"],
)
def test_factors_are_stacked_only_where_they_must_be(
    ks: list[int], transposed: list[bool], as_they_are: bool, dim: int, where: SimpleNamespace
) -> None:
    As = [torch.empty(M, k, dtype=torch.bfloat16) for k in ks]
    Bs = [
        torch.empty(N, k, dtype=torch.bfloat16).t() if t else torch.empty(k, N, dtype=torch.bfloat16)
        for k, t in zip(ks, transposed, strict=True)
    ]
    factors = [x for pair in zip(As, Bs, strict=True) for x in pair]
    bias = torch.empty(N // (2 if dim else 1), dtype=torch.bfloat16)
    call = MatmulReduceScatterCall(*factors[:2], "sum", dim, NAME, torch.bfloat16, bias, more=factors[2:])
    with forced("fused"):
        out = run_on_cuda(matmul_reduce_scatter, where, call)
    assert isinstance(out, torch.Tensor) and list(out.shape) == call.local_shape(2)
    (kernel,) = (x for x in where.prepared.values() if isinstance(x, Kernel))
    addresses = [x.data_ptr() for x in (*factors, bias)]
    assert (kernel.operands == addresses) is as_they_are
    depths = [shape[-1] for shape, _ in kernel.sizes[::2]]
    assert depths == (ks if as_they_are else [sum(ks)])
    assert kernel.operands[-1] == bias.data_ptr()
    # The next such call finds it, with its tensors in this order.
    key = key_of(OP, (dim, "sum", True, False, len(factors) - 2), [*factors, bias])
    assert (key in where.prepared) is as_they_are


def test_sums_of_the_same_size_have_kernels_of_their_own(where: SimpleNamespace) -> None:
    for ks in ([72, 136], [136, 72], [104, 104]):
        factors = [x for k in ks for x in (torch.empty(M, k), torch.empty(k, N))]
        factors = [x.bfloat16() for x in factors]
        call = MatmulReduceScatterCall(*factors[:2], "sum", 0, NAME, torch.bfloat16, more=factors[2:])
        with forced("fused"):
            run_on_cuda(matmul_reduce_scatter, where, call)
    kernels = [x for x in where.prepared.values() if isinstance(x, Kernel)]
    assert len(kernels) == 3
