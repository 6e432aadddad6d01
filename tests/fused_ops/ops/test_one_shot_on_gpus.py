"""Both products in one shot and by copy engines on GPUs, beside calls that push: random numbers at odd sizes, eager and
captured."""

from __future__ import annotations

import random
from functools import partial
from unittest import mock

import pytest
import torch
from algorithms import EVERY, OVERLAPS
from opcommon import BOUND, check, gather, graph_of, poison, world
from ranks import on_ranks
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, last_plan
from weft.fused_ops.dispatch.plan import forced

pytestmark = pytest.mark.gpu

SHAPES = [  # m, K, N of each B
    (1, 8, [8]),
    (37, 136, [264, 40]),
    (129, 1032, [520]),
    (300, 2048, [1544, 8, 72, 64, 128]),
    (1023, 504, [4096]),
]


class Problem:
    """Operands of both ops, and what must come out of them, in float64."""

    def __init__(self, m: int, k: int, ns: list[int], dtype: torch.dtype) -> None:
        size, rank = world().size(), world().rank()
        self.m, self.dtype, self.bound = m, dtype, BOUND[dtype]
        self.shard = torch.randn(m, k + 24).to(dtype)[:, 16 : k + 16]
        self.wide = torch.randn(size * m, k).to(dtype)
        self.Bs = [torch.randn(n, k).to(dtype).t() if m % 2 else torch.randn(k, n).to(dtype) for n in ns]
        self.bias, self.residual = torch.randn(ns[0]).to(dtype), torch.randn(m, ns[0]).to(dtype)
        self.rank, self.size = rank, size
        self.deep, self.long = (torch.randn(shape).to(dtype) for shape in ((size * k, 40), (k, size * 40)))

    def run(self, algorithm: str) -> list[torch.Tensor]:
        """The gathered A and the products; that of columns that are gathered; the sum, the average in float32 with bias
        and residual, and of columns that are scattered."""
        with forced(algorithm):
            A, outs = fused_all_gather_matmul(self.shard, self.Bs, 0, world())
            with_A = OVERLAPS if algorithm == "one_shot" else algorithm  # it must be bit for bit
            assert last_plan().algorithm == with_A and A is not None
            _, again = fused_all_gather_matmul(self.shard, self.Bs, 0, world(), return_A=False)
            assert last_plan().algorithm == algorithm
            _, (along,) = fused_all_gather_matmul(self.shard, [self.deep], 1, world(), return_A=False)
            assert last_plan().algorithm == algorithm
            total = fused_matmul_reduce_scatter(self.wide, self.Bs[0], "sum", 0, world())
            assert last_plan().algorithm == algorithm
            named = {"bias": self.bias, "residual": self.residual, "out_dtype": torch.float32}
            mean = fused_matmul_reduce_scatter(self.wide, self.Bs[0], "avg", 0, world(), **named)
            assert last_plan().algorithm == algorithm
            columns = fused_matmul_reduce_scatter(self.wide, self.long, "sum", 1, world())
            assert last_plan().algorithm == algorithm
        return [A, *outs, *again, along, total, mean, columns]

    def judge(self, what: str, results: list[torch.Tensor]) -> None:
        want_A = torch.cat(gather(self.shard))
        A, *products, along, total, mean, columns = results
        assert torch.equal(A.double(), want_A), f"gathered A, {what}"
        for out, B in zip(products, [*self.Bs, *self.Bs], strict=True):
            check(f"all-gather + matmul, {what}", out, want_A @ B.double(), self.bound)
        beside = torch.cat(gather(self.shard), 1)
        check(f"columns gathered, {what}", along, beside @ self.deep.double(), self.bound)
        parts = [
            (a @ b).chunk(self.size, 1)[self.rank]
            for a, b in zip(gather(self.wide), gather(self.long), strict=True)
        ]
        check(f"columns scattered, {what}", columns, sum(parts), self.bound, parts)
        parts = [
            (a @ b).chunk(self.size)[self.rank]
            for a, b in zip(gather(self.wide), gather(self.Bs[0]), strict=True)
        ]
        check(f"matmul + reduce-scatter, {what}", total, sum(parts), self.bound, parts)
        more = sum(parts) / self.size + self.bias.double() + self.residual.double()
        check(f"average with terms, {what}", mean, more, self.bound, parts)


@on_ranks([2, 4], device="cuda")
def test_odd_sizes(rank: int, world_size: int) -> None:
    order = random.Random(3)
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            problem = Problem(*shape, dtype)
            for algorithm in order.sample((*EVERY, *EVERY), 4):
                poison(rank)
                problem.judge(f"{algorithm} {shape} {dtype}", problem.run(algorithm))


@on_ranks([2, 4], device="cuda")
def test_graph_replays_between_eager_calls(rank: int, world_size: int) -> None:
    """Graphs of every algorithm, on one stream, with eager calls of all between their replays."""
    order, mine, graphs = random.Random(4), random.Random(rank), []
    for shape in SHAPES[1:4]:
        problem = Problem(*shape, torch.bfloat16)
        for algorithm in EVERY:
            problem.run(algorithm)
            graph, results = graph_of(partial(problem.run, algorithm))
            graphs.append((problem, algorithm, graph, results))
    for _ in range(30):
        problem, algorithm, graph, results = order.choice(graphs)
        for given in (problem.shard, problem.wide, problem.bias):
            given.normal_()
        for result in results:
            result.fill_(float("nan"))
        if mine.random() < 0.2:
            torch.cuda._sleep(mine.randrange(2_000_000))
        graph.replay()
        problem.judge(f"replayed {algorithm}", results)
        other = order.choice(EVERY)
        problem.judge(f"eager {other}", problem.run(other))


@pytest.mark.parametrize("op", ["gather", "scatter"])
@on_ranks(2, device="cuda")
def test_a_matmul_that_fails(rank: int, world_size: int, op: str) -> None:
    """A product that fails on one rank: after a gather its peers have all that they wait for, before a scatter nothing
    has begun. The group goes on."""
    problem = Problem(64, 136, [72], torch.bfloat16)
    problem.judge("before", problem.run("one_shot"))
    torch.cuda.synchronize()
    refused = mock.patch.object(torch, "mm", side_effect=torch.OutOfMemoryError("no memory"))
    with forced("one_shot"):
        for called in range(2):  # the fast path, and below torch's dispatcher
            call = (fused_all_gather_matmul, torch.ops.weft.fused_all_gather_matmul)[called]
            if op == "gather":
                given = problem.shard, problem.Bs, 0, world() if not called else world().group_name
                if rank == 0:
                    with refused, pytest.raises(torch.OutOfMemoryError):
                        call(*given, return_A=False)
                else:
                    call(*given, return_A=False)
            elif rank == 0:
                with refused, pytest.raises(torch.OutOfMemoryError):
                    fused_matmul_reduce_scatter(problem.wide, problem.Bs[0], "sum", 0, world())
    problem.judge("after", problem.run("one_shot"))


@on_ranks([2, 4], device="cuda")
def test_special_numbers(rank: int, world_size: int) -> None:
    """Infinities and NaNs come through as what they are, also those whose bits are all set."""
    shard, B = torch.randn(64, 128).bfloat16(), torch.eye(128).bfloat16()
    shard.view(torch.int16)[rank, :4] = torch.tensor([-1, -1, 0x7F80, 0x7FC0], dtype=torch.int16)
    with forced("one_shot"):
        _, (out,) = fused_all_gather_matmul(shard, [B], 0, world(), return_A=False)
        assert last_plan().algorithm == "one_shot"
        A, _ = fused_all_gather_matmul(shard, [B], 0, world())
        assert last_plan().algorithm == OVERLAPS and A is not None
    mine = A.chunk(world_size)[rank]
    assert torch.equal(mine.view(torch.int16), shard.view(torch.int16)), "bit for bit"
    for part, first in zip(out.chunk(world_size), A.chunk(world_size), strict=True):
        assert torch.equal(part.isnan(), (first.float() @ B.float()).isnan())
