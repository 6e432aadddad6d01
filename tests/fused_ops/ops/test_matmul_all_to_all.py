"""fused_matmul_all_to_all and fused_all_to_all_matmul on real processes, against float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from opcommon import BOUND, check, gather, graph_of, poison, refuses, same_on_all, world
from ranks import on_ranks, run_ranks, run_row
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import fused_all_to_all_matmul, fused_matmul_all_to_all, last_plan
from weft.fused_ops.dispatch.choice import choice_of_call
from weft.fused_ops.dispatch.plan import forced

#: Of a rank's A, K of the product, and columns of a rank.
SHAPES = [((5,), 7, 3), ((4, 3), 17, 1), ((2, 1, 6), 8, 16), ((1,), 1, 5), ((0, 2), 3, 2), ((3,), 0, 4)]


def spread_out(x: Tensor) -> Tensor:
    """The same numbers, every other one of memory."""
    return x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)


def exchanged(x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
    """In float64."""
    every, rank = gather(x), world().rank()
    return torch.cat([each.chunk(len(every), scatter_dim)[rank] for each in every], gather_dim)


def right(rank: int, world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    for lead, k, n in SHAPES:
        for dim in range(len(lead)):
            poison(rank)
            A, B = torch.randn(*lead, k).to(dtype), same_on_all(k, n * world_size).to(dtype)
            want = exchanged(A.double() @ B.double(), -1, dim)
            shape = list(lead)
            shape[dim] *= world_size
            heads, back = torch.randn(*shape, k).to(dtype), torch.randn(world_size * k, n).to(dtype)
            multiplied = exchanged(heads, dim, -1) @ back.double()
            for given, at in ((lambda x: x, dim), (spread_out, dim - len(lead) - 1)):
                for call, found, operands in (
                    (fused_matmul_all_to_all, want, (A, B)),
                    (fused_all_to_all_matmul, multiplied, (heads, back)),
                ):
                    with nullcontext() if algorithm == "host" else forced(algorithm):
                        y = call(given(operands[0]), given(operands[1]), at)
                    assert y.dtype == dtype and y.movedim(dim, 0).is_contiguous()
                    check(f"{call.__name__} {lead} {dim}", y, found, BOUND[dtype])
                    if world_size > 1 and y.numel() and operands[0].numel():
                        assert last_plan().algorithm == algorithm


@pytest.mark.parametrize("algorithm", ["host", "unfused"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_products_around_all_to_alls(world_size: int, algorithm: str) -> None:
    for dtype in BOUND:
        run_row(right, world_size, dtype, algorithm)


@on_ranks(2)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    A, B, name, ops = torch.randn(4, 3), torch.randn(3, 6), world().group_name, torch.ops.weft
    before = last_plan()
    to, back = ops.fused_matmul_all_to_all, ops.fused_all_to_all_matmul
    for op, args, kind, words in [
        (to, (A[0], B, 0, name), ValueError, "A: has 1 dimensions, must have 2 or more"),
        (to, (A, B, 1, name), ValueError, "gather_dim: is 1, the last dimension of A, must be one of its"),
        (to, (A, B, 2, name), ValueError, "gather_dim: is 2, must be from -2 to 1 for a 2-D A"),
        (to, (A, B[:, :5], 0, name), ValueError, "B: has 5 columns, must have a multiple of 2 ranks"),
        (to, (A, B[:2], 0, name), ValueError, "B: has 2 rows, must have 3"),
        (to, (A.long(), B, 0, name), TypeError, "A: is torch.int64"),
        (to, (A, B.double(), 0, name), TypeError, "B: is torch.float64"),
        (back, (A, B, 0, name), ValueError, "B: has 3 rows, must have 6, as many as all ranks' A"),
        (back, (A[:3], B, 0, name), ValueError, "scatter_dim: A has size 3 there, must be a multiple of 2"),
        (back, (A, B, -1, name), ValueError, "scatter_dim: is -1, the last dimension of A"),
        (back, (A, B, 0, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    for call in (fused_matmul_all_to_all, fused_all_to_all_matmul):
        with pytest.raises(TypeError, match="B: is of type list, must be a tensor"):
            call(A, [B], 0, world())  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"


#: Rows, K, columns of a rank, and other dimensions of A; whether B lies in columns.
ON_GPUS = [
    (129, 72, 136, (), False),
    (1, 64, 8, (), True),
    (65, 264, 520, (2,), True),
    (640, 2048, 1024, (), False),
]


def on_gpus(rank: int, world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    W, every = world_size, []
    for rows, k, n, lead, columns in ON_GPUS:
        A, B = torch.randn(rows, *lead, k).to(dtype), same_on_all(k, n * W).to(dtype)
        heads, C = torch.randn(W * rows, *lead, k).to(dtype), torch.randn(W * k, n).to(dtype)
        B, C = (x.t().contiguous().t() if columns else x for x in (B, C))
        every.append((fused_matmul_all_to_all, A, B, exchanged(A.double() @ B.double(), -1, 0)))
        every.append((fused_all_to_all_matmul, heads, C, exchanged(heads, 0, -1) @ C.double()))
    with forced(algorithm):
        programs = [p for call, a, b, _ in every for p in choice_of_call(call, (a, b, 0), {})[1].programs()]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda program: program.cubin(), programs))
        for call, a, b, want in every:
            for _ in range(3):
                y = call(a, b, 0)
                assert last_plan().algorithm == algorithm
                check(f"{call.__name__} {tuple(a.shape)}", y, want, BOUND[dtype])
    symm_mem.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "algorithm"),
    [
        (torch.bfloat16, "push"),
        (torch.float16, "push"),
        (torch.bfloat16, "one_shot"),
        (torch.float32, "one_shot"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_kernels(world_size: int, dtype: torch.dtype, algorithm: str) -> None:
    run_ranks(on_gpus, world_size, dtype, algorithm, device="cuda")


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda", fresh=True)
def test_gradients_by_the_kernels(rank: int, world_size: int) -> None:
    W = world_size
    A = torch.randn(256, 512).bfloat16().requires_grad_()
    B = same_on_all(512, 256 * W).bfloat16().requires_grad_()
    with forced("push"):
        heads = fused_matmul_all_to_all(A, B, 0)
        weight = torch.randn_like(heads)
        (heads * weight).sum().backward()
    back = exchanged(weight, 0, -1)
    assert A.grad is not None and B.grad is not None
    check("A.grad", A.grad, back @ B.detach().double().t(), BOUND[torch.bfloat16])
    check("B.grad", B.grad, A.detach().double().t() @ back, BOUND[torch.bfloat16])


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda", fresh=True)
def test_replays_of_graphs_between_eager_calls(rank: int, world_size: int) -> None:
    """Small integers, so that every product is exact."""
    W, k, n = world_size, 256, 128
    A, B = torch.zeros(384, k).bfloat16(), torch.randint(-1, 2, (k, n * W)).bfloat16()
    C = torch.randint(-1, 2, (n * W, 64)).bfloat16()
    dist.broadcast(B, 0)

    def both() -> Tensor:
        with forced("push"):
            return fused_all_to_all_matmul(fused_matmul_all_to_all(A, B, 0), C, 0)

    both()
    graph, y = graph_of(both, "thread_local")
    wrong = torch.zeros((), dtype=torch.int64)
    for step in range(60):
        A.copy_(torch.randint(-1, 2, (384, k)) * (torch.rand(384, k) < 0.02))
        if rank == step % W:
            torch.cuda._sleep(1 << 18)
        graph.replay()
        want = ((A.float() @ B.float()).bfloat16().float() @ C.float()).bfloat16()
        wrong += (y != want).sum()
        wrong += (both() != want).sum()
    assert wrong.item() == 0
    symm_mem.check()
