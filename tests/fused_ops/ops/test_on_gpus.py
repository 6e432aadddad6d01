"""What only CUDA has: graphs, streams, waits inside kernels. And that the fused algorithms are really taken."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
from algorithms import ALGORITHMS
from opcommon import BOUND, check, gather, world
from ranks import on_ranks, run_ranks
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
)
from weft.fused_ops.dispatch.plan import forced
from weft.symm_mem.heap.registry import get_heap

pytestmark = pytest.mark.gpu


def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, algorithm: str = "fused") -> torch.Tensor:
    """All three ops, one after the other."""
    with forced(algorithm):
        _, (h,) = fused_all_gather_matmul(x, [up], 0, world(), return_A=False)
        assert last_plan().algorithm in ALGORITHMS
        y = fused_matmul_reduce_scatter(torch.relu(h), down, "sum", 0, world())
        assert last_plan().algorithm in ALGORITHMS
        z = one_shot_all_reduce(y, "avg", world())
        assert last_plan().algorithm == "push"
    return z


def late(chance: float) -> None:
    """Hold this rank's stream up for some milliseconds, now and then."""
    if random.random() < chance:
        torch.cuda._sleep(random.randrange(3_000_000))


def weights(k: int = 512, n: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, k).bfloat16().t(), torch.randn(k, n).bfloat16().t()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks([2, 4], device="cuda")
def test_large_matmuls(rank: int, world_size: int, algorithm: str) -> None:
    """Large enough for many chunks and tiles; NaN in the workspace beforehand comes from the smaller op tests."""
    for m, k, n, dtype in [(1024, 4096, 1536, torch.bfloat16), (515, 1032, 520, torch.float16)]:
        bound = BOUND[dtype]
        shard, B = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t()
        A = torch.cat(gather(shard))
        with forced(algorithm):
            got_A, (out,) = fused_all_gather_matmul(shard, [B], 0, world())
            check("all-gather + matmul", out, A @ B.double(), bound)
            assert torch.equal(got_A.double(), A)
            _, (out,) = fused_all_gather_matmul(shard, [B], 0, world(), return_A=False)
            check("all-gather + matmul alone", out, A @ B.double(), bound)
            wide = torch.randn(world_size * m, k).to(dtype)
            parts = [
                p.chunk(world_size)[rank]
                for p in (a @ b for a, b in zip(gather(wide), gather(B), strict=True))
            ]
            first = fused_matmul_reduce_scatter(wide, B, "sum", 0, world())
            check("matmul + reduce-scatter", first, sum(parts), bound, parts)
            for _ in range(5):
                late(0.3)
                assert torch.equal(first, fused_matmul_reduce_scatter(wide, B, "sum", 0, world()))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks([2, 4], device="cuda")
def test_graph_replays_between_eager_calls(rank: int, world_size: int, algorithm: str) -> None:
    up, down = weights()
    graphs = []
    for rows in (256, 130, 512):
        x = torch.randn(rows, 512).bfloat16()
        layer(x, up, down, algorithm)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, up, down, algorithm)
            out = layer(x + out[:, :512], up, down, algorithm)
        graphs.append((graph, x, out))
    order = random.Random(0)
    for _ in range(60):
        graph, x, out = order.choice(graphs)
        x.normal_()
        out.fill_(float("nan"))
        late(0.2)
        graph.replay()
        late(0.2)
        eager = layer(x + layer(x, up, down, algorithm)[:, :512], up, down, algorithm)
        assert torch.equal(out, eager)


@on_ranks(2, device="cuda")
def test_concurrent_streams_have_their_own_workspaces(rank: int, world_size: int) -> None:
    up, down = weights()
    xs = [torch.randn(rows, 512).bfloat16() for rows in (256, 130)]
    want = [layer(x, up, down) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(30):
        outs = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                late(0.2)
                with forced("fused"):
                    outs.append(one_shot_all_reduce(x, "sum", world()))
        torch.cuda.synchronize()
        for out, x in zip(outs, xs, strict=True):
            check("on a stream", out, sum(gather(x)), 8e-3)
    for x, stream, expected in zip(xs, streams, want, strict=True):
        with torch.cuda.stream(stream):
            assert torch.equal(layer(x, up, down), expected)
    torch.cuda.synchronize()


@on_ranks([2, 4], device="cuda")
def test_many_calls_of_random_shapes_with_late_ranks(rank: int, world_size: int) -> None:
    order = random.Random(1)
    ops: dict[str, Callable[[int], None]] = {}

    def gathered(m: int) -> None:
        shard, B = torch.randn(m, 256).bfloat16(), torch.randn(264, 256).bfloat16().t()
        _, (out,) = fused_all_gather_matmul(shard, [B], 0, world(), return_A=order.random() < 0.5)
        check("all-gather + matmul", out, torch.cat(gather(shard)) @ B.double(), 4e-3)

    def scattered(m: int) -> None:
        A, B = torch.randn(world_size * m, 128).bfloat16(), torch.randn(136, 128).bfloat16().t()
        products = [a @ b for a, b in zip(gather(A), gather(B), strict=True)]
        parts = [p.chunk(world_size)[rank] for p in products]
        check(
            "matmul + reduce-scatter",
            fused_matmul_reduce_scatter(A, B, "sum", 0, world()),
            sum(parts),
            4e-3,
            parts,
        )

    def reduced(m: int) -> None:
        x = torch.randn(m * order.randrange(1, 3000)).half()
        parts = gather(x)
        check("all-reduce", one_shot_all_reduce(x, "sum", world()), sum(parts), 1e-3, parts)

    ops = {"gathered": gathered, "scattered": scattered, "reduced": reduced}
    with forced("fused"):
        for _ in range(300):
            late(0.1)
            ops[order.choice(sorted(ops))](order.choice([64, 100, 256, 300]))


def missing(rank: int, world_size: int, op: str, algorithm: str) -> str | None:
    up, _ = weights()
    x = torch.randn(256, 512).bfloat16()

    def call() -> None:
        with forced(algorithm):
            if op == "fused_all_gather_matmul":
                fused_all_gather_matmul(x, [up], 0, world(), return_A=False)
            elif op == "fused_matmul_reduce_scatter":
                fused_matmul_reduce_scatter(x, up, "sum", 0, world())
            else:
                one_shot_all_reduce(x, "sum", world())

    call()
    call()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(4)
        return None
    symm_mem.set_timeout(0.5)
    call()
    start = time.monotonic()
    torch.cuda.synchronize()  # the kernel gives up by itself
    assert time.monotonic() - start < 3
    with pytest.raises(symm_mem.PeerTimeout, match=op):
        symm_mem.check()
    with pytest.raises(symm_mem.PeerTimeout) as error:
        call()
    assert (torch.ones(3) + 1).tolist() == [2, 2, 2]  # the context lives
    return str(error.value)


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        *product(("fused_all_gather_matmul", "fused_matmul_reduce_scatter"), ALGORITHMS),
        ("one_shot_all_reduce", "push"),
    ],
)
def test_a_missing_rank_is_named_and_the_context_lives(op: str, algorithm: str) -> None:
    text = run_ranks(missing, 2, op, algorithm, device="cuda", fresh=True)[0]
    assert text.startswith(f"{op}: rank 0 of group") and "waited 0.5 s for rank 1" in text


@on_ranks(2, device="cuda")
def test_memory_does_not_grow_with_calls(rank: int, world_size: int) -> None:
    up, down = weights()
    x = torch.randn(256, 512).bfloat16()
    for _ in range(5):
        layer(x, up, down)
    torch.cuda.synchronize()
    heap = get_heap(world(), "cuda")
    before = heap.capacity, torch.cuda.memory_allocated()
    for _ in range(5000):  # three calls each
        layer(x, up, down)
    torch.cuda.synchronize()
    assert (heap.capacity, torch.cuda.memory_allocated()) == before
