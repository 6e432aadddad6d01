"""one_shot_gather on real processes, bit by bit, with even and uneven counts."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import DEVICES, check, graph_of, poison, refuses, world
from ranks import on_ranks, run_ranks, run_row
from test_all_gather import any_bits, bits
from test_uneven_collectives import COUNTS, part, spread
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_gather
from weft.fused_ops.dispatch.plan import forced

SHAPES = [((), ()), ((3,), ()), ((), (5,)), ((2,), (3, 7)), ((0,), (2,))]  # before and after the dimension
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


def same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any number, the same on every rank."""
    words = bits(any_bits(shape, dtype))
    if words.numel():
        dist.broadcast(words, 0)
    return words.view(dtype).view(shape)


def right(rank: int, world_size: int, counts: list[int] | None, dtype: torch.dtype, algorithm: str) -> None:
    sizes = counts or [4] * world_size
    for i, (before, after) in enumerate(SHAPES):
        dim, root = len(before), i % world_size
        whole = same_bits((*before, sum(sizes), *after), dtype)
        x = part(whole, sizes, dim).contiguous()
        for at in (dim, dim - len((*before, 0, *after))):
            poison(rank)
            for given in (x, x.movedim(dim, 0).contiguous().movedim(0, dim), spread(x)):
                with nullcontext() if algorithm == "host" else forced(algorithm):
                    y = one_shot_gather(given, at, root, counts=counts)
                if world_size > 1 and whole.numel():
                    assert last_plan().algorithm == algorithm
                assert y.is_contiguous() and y.dtype == dtype
                assert not y.numel() or y.data_ptr() != given.data_ptr()
                if rank == root:
                    assert y.shape == whole.shape and torch.equal(bits(y), bits(whole)), (before, after)
                else:
                    assert list(y.shape) == [*before, 0, *after]


@pytest.mark.parametrize("algorithm", ["host", "unfused"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_shot_gather(world_size: int, algorithm: str) -> None:
    for i, counts in enumerate([None, *COUNTS]):
        given = None if counts is None else list(counts[:world_size])
        run_row(right, world_size, given, DTYPES[(world_size + i) % len(DTYPES)], algorithm)


@on_ranks(3)
def test_many_calls_with_roots_of_their_own(rank: int, world_size: int) -> None:
    """No rank but the root hears of the others, which may be several calls behind."""
    for step in range(200):
        root, n = step * 7 % 3, 1 + step * 5 % 11
        y = one_shot_gather(torch.full((n,), 10.0 * step + rank), 0, root)
        want = torch.arange(3.0).repeat_interleave(n) + 10.0 * step
        assert torch.equal(y, want if rank == root else y.new_empty(0))


@on_ranks(2)
def test_gradients_are_refused(rank: int, world_size: int) -> None:
    x = torch.randn(2, 3).requires_grad_()
    with pytest.raises(ValueError, match="x: requires a gradient, must not: the other ranks"):
        one_shot_gather(x, 0, 0)
    with torch.no_grad():
        assert len(one_shot_gather(x, 0, 0)) == (4, 0)[rank]


@on_ranks(2, device=DEVICES)
def test_under_torch_compile(rank: int, world_size: int) -> None:
    """Also where a rank uses nothing of its result."""

    def program(x: Tensor) -> Tensor:
        y = one_shot_gather(x * 2, 0, 1)
        return y.sin() + 1 if rank == 1 else x + 1

    for backend in ("aot_eager", "weft"):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for n in (7, 4, 12):
            x = torch.randn(n, 4)
            check(backend, compiled(x), program(x).double(), 1e-6)


@on_ranks(2)
def test_a_graph_is_of_its_rank(rank: int, world_size: int) -> None:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(n.kwargs["group_rank"] for n in graph.graph.nodes if "group_rank" in n.kwargs)
        return graph

    x, name = torch.randn(5, 3), world().group_name
    compiled = torch.compile(lambda z: one_shot_gather(z, 0, 1).sin(), backend=backend)
    assert len(compiled(x)) == (0, 10)[rank]
    with pytest.raises(ValueError, match=rf"group_rank: is {1 - rank}, must be {rank}"):
        torch.ops.weft.one_shot_gather(x, 0, 0, name, group_rank=1 - rank)


@on_ranks(2, device=DEVICES)
def test_opcheck(rank: int, world_size: int) -> None:
    op, name, counts = torch.ops.weft.one_shot_gather, world().group_name, [2, 5]
    torch.library.opcheck(op, (torch.randn(4, 6), 1, 0, name))
    torch.library.opcheck(op, (torch.randn(3, counts[rank]), -1, 1, name), {"counts": counts})
    torch.library.opcheck(op, (torch.arange(6).view(2, 3).t(), 0, 1, name))


@on_ranks(2)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, name, op = torch.randn(4, 3), world().group_name, torch.ops.weft.one_shot_gather
    before = last_plan()
    for args, kind, words in [
        ((x[0, 0], 0, 0, name), ValueError, "x: has no dimension, must have 1 or more"),
        ((x, 2, 0, name), ValueError, "gather_dim: is 2, must be from -2 to 1 for a 2-D x"),
        ((x, 0, 2, name), ValueError, "root: is 2, must be from 0 to 1, a rank of the group"),
        ((x, 0, -1, name), ValueError, "root: is -1, must be from 0 to 1"),
        ((x.to(torch.complex64), 0, 0, name), TypeError, "x: is torch.complex64, must be of real numbers"),
        ((x, 0, 0, "nobody"), ValueError, "group: no process group is named"),
    ]:
        refuses(op, args, kind, words)
    wrong = rf"counts\[{rank}\]: is 5, must be 4, the size of rank {rank}'s x in dimension 0"
    refuses(lambda x: op(x, 0, 0, name, counts=[5, 5]), (x,), ValueError, wrong)
    with pytest.raises(TypeError, match="root: is of type float, must be an integer"):
        one_shot_gather(x, 0, 1.0, world())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x: is of type list, must be a tensor"):
        one_shot_gather([1], 0, 0, world())  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"


def differ(rank: int, world_size: int) -> str:
    with pytest.raises(symm_mem.RankMismatch) as error:
        one_shot_gather(torch.ones(2, 3), 0, rank)
    return str(error.value)


def test_ranks_with_different_roots_are_named() -> None:
    text = run_ranks(differ, 2, fresh=True)[0]
    assert "root=0" in text and "root=1" in text


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda")
def test_every_bit_arrives_on_gpus(rank: int, world_size: int) -> None:
    """By every kernel, at any address; each call on the slow path and on the fast one, between all-gathers' words."""
    for shape in ((4,), (12, 5), (8, 129, 4), (64, 4096), (4, 33, 1004), (4, 1 << 20), (4, 3, 1000004)):
        for dim in range(len(shape)):
            root = dim % world_size
            for dtype in (torch.uint8, torch.bfloat16):
                x = any_bits((torch.Size(shape).numel() + 1,), dtype)[1:].view(shape)
                every = [torch.empty_like(bits(x)) for _ in range(world_size)]
                dist.all_gather(every, bits(x))
                for _ in range(3):
                    y = one_shot_gather(x, dim, root)
                    assert last_plan().algorithm == "push"
                    if rank == root:
                        want = torch.cat([part.view(dtype).view(shape) for part in every], dim)
                        assert torch.equal(bits(y), bits(want)), (shape, dim)
                    else:
                        assert y.shape[dim] == 0


@pytest.mark.gpu
@on_ranks([2, 4], device="cuda", fresh=True)
def test_replays_of_graphs_between_eager_calls_on_gpus(rank: int, world_size: int) -> None:
    """A root that is late, so that the others would run ahead of it if nothing told them to wait."""
    graphs, ranks = [], torch.arange(world_size, dtype=torch.int32)
    for n in (5, 1000, 1 << 18, 1 << 22):
        x = torch.zeros(n, dtype=torch.int32)
        one_shot_gather(x, 0, 0)
        graph, y = graph_of(partial(one_shot_gather, x, 0, 0), "thread_local")
        graphs.append((graph, x, y))
    wrong = torch.zeros((), dtype=torch.int64)
    for step in range(200):
        graph, x, y = graphs[step % len(graphs)]
        x.fill_(10 * step + rank)
        if rank == step // 8 % world_size:
            torch.cuda._sleep(1 << 18)
        graph.replay()
        if rank == 0:
            wrong += (y.view(world_size, -1) != (10 * step + ranks)[:, None]).sum()
        z = one_shot_gather(x[: 1 + 13 * step % len(x)], 0, step % world_size)
        if rank == step % world_size:
            wrong += (z.view(world_size, -1) != (10 * step + ranks)[:, None]).sum()
    assert wrong.item() == 0
    symm_mem.check()
