"""one_shot_all_gather and one_shot_reduce_scatter with a size of its own on each rank, on real CPU processes, against
float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import BOUND, check, gather, poison, refuses, world
from ranks import on_ranks, run_ranks, run_row
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import _functional_collectives as funcol
from weft import symm_mem
from weft.fused_ops import last_plan, one_shot_all_gather, one_shot_all_reduce, one_shot_reduce_scatter
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.passes import FusionPass

#: Of four ranks; fewer take the first ones. Odd, with none on one rank, with rows on one rank alone, equal, and none.
COUNTS = [(3, 5, 1, 7), (4, 0, 9, 2), (0, 3, 0, 0), (0, 0, 0, 5), (2, 2, 2, 2), (0, 0, 0, 0)]
SHAPES = [((), ()), ((3,), ()), ((), (5,)), ((2,), (3, 7))]  # before and after the dimension


def part(whole: Tensor, counts: list[int], dim: int) -> Tensor:
    return whole.split(counts, dim)[world().rank()]


def of_all(x: Tensor, counts: list[int], dim: int) -> Tensor:
    """The gather, in float64, by a sum of what each rank has in its place."""
    shape = list(x.shape)
    shape[dim] = sum(counts)
    whole = torch.zeros(shape, dtype=torch.float64)
    part(whole, counts, dim).copy_(x.detach())
    dist.all_reduce(whole)
    return whole


def spread(x: Tensor) -> Tensor:
    """The same numbers, every other one of memory."""
    return x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)


def right(rank: int, world_size: int, counts: list[int], dtype: torch.dtype, algorithm: str) -> None:
    sends = sum(counts) > 0 and world_size > 1
    for i, (before, after) in enumerate(SHAPES):
        dim = len(before)
        at = dim - (i + sum(counts)) % 2 * len((*before, 0, *after))  # from either end, by turns
        poison(rank)
        x = torch.randn(*before, counts[rank], *after).to(dtype)
        want, rows = of_all(x, counts, dim), x.movedim(dim, 0).contiguous().movedim(0, dim)
        for given in (x, rows, spread(x)):
            with nullcontext() if algorithm == "host" else forced(algorithm):
                y = one_shot_all_gather(given, at, counts=counts)
            assert not sends or last_plan().algorithm == algorithm
            assert y.is_contiguous() and y.dtype == dtype and y.shape == want.shape
            assert torch.equal(y.double(), want), (before, after, counts)
        for out in (torch.full_like(y, torch.nan), spread(torch.full_like(y, torch.nan))):
            assert one_shot_all_gather(x, at, out=out, counts=counts) is out
            assert torch.equal(out, y)
        for reduce_op in ("sum", "avg", "max", "min"):
            z = torch.randn(want.shape).to(dtype)
            parts = [each / (world_size if reduce_op == "avg" else 1) for each in gather(z)]
            total = torch.stack(parts)
            total = total.sum(0) if reduce_op in ("sum", "avg") else getattr(total, f"a{reduce_op}")(0)
            own = [part(each, counts, dim) for each in (total, *parts)]
            for given in (z, spread(z)):
                with nullcontext() if algorithm == "host" else forced(algorithm):
                    s = one_shot_reduce_scatter(given, reduce_op, at, counts=counts)
                assert not sends or last_plan().algorithm == algorithm
                assert s.is_contiguous() and s.dtype == dtype
                # gloo rounds each of its sums, and the average once more.
                bound = BOUND[dtype] * (1 if algorithm == "host" else world_size)
                check(f"{before} {after} {counts} {reduce_op}", s, own[0], bound, own[1:])
            if sends and algorithm == "host":
                same = part(one_shot_all_reduce(z, reduce_op), counts, dim)
                assert torch.equal(s, same), "other bits than those of the all-reduce"
            out = spread(torch.full_like(s, torch.nan))
            assert one_shot_reduce_scatter(z, reduce_op, at, out=out, counts=counts) is out
            check("out", out, own[0], BOUND[dtype], own[1:])


@pytest.mark.parametrize("algorithm", ["host", "unfused"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_uneven(world_size: int, algorithm: str) -> None:
    for i, counts in enumerate(COUNTS):
        dtype = list(BOUND)[(world_size + i) % 3]
        run_row(right, world_size, list(counts[:world_size]), dtype, algorithm)


@on_ranks(2)
def test_any_dtype_is_gathered(rank: int, world_size: int) -> None:
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64):
        x = torch.arange(3 * (rank + 1)).view(-1, 3).to(dtype)
        for dim, rows in ((0, x), (1, x.t())):
            y = one_shot_all_gather(rows, dim, counts=[1, 2])
            want = torch.cat([torch.arange(3), torch.arange(6)]).to(dtype).float().view(3, 3)
            assert torch.equal(y.float(), want.t() if dim else want), dtype


@on_ranks(3)
def test_calls_alike_and_not_alike(rank: int, world_size: int) -> None:
    """What a rank has may be the same where the others' counts differ."""
    for step in range(40):
        counts = [[2, 3, 4], [2, 4, 3], [3, 3, 3], [9, 0, 0]][step // 2 % 4]
        x = torch.full((counts[rank], 2), 10.0 * step + rank)
        want = torch.arange(3).repeat_interleave(torch.tensor(counts)) + 10.0 * step
        assert torch.equal(one_shot_all_gather(x, 0, counts=counts), want[:, None].expand(-1, 2))
        z = torch.arange(18.0).view(9, 2) + step
        assert torch.equal(one_shot_reduce_scatter(z, "sum", 0, counts=counts), 3 * part(z, counts, 0))
    x = torch.full((3, 2), float(rank))
    assert torch.equal(one_shot_all_gather(x, 0, counts=[3, 3, 3]), one_shot_all_gather(x, 0))


@on_ranks([2, 3])
def test_gradients(rank: int, world_size: int) -> None:
    counts = [4, 0, 3][:world_size]
    for dtype in (torch.float32, torch.float64):
        for dim in (0, 1):
            shape = [3, 3]
            shape[dim] = counts[rank]
            x = torch.randn(shape, dtype=dtype).requires_grad_()
            y = one_shot_all_gather(x, dim, counts=counts)
            weight = torch.randn_like(y)
            (y * weight).sum().backward()
            assert x.grad is not None
            check("gather", x.grad, part(sum(gather(weight)), counts, dim), 1e-6)
    for reduce_op in ("sum", "avg"):
        z = torch.randn(3, sum(counts)).requires_grad_()
        s = one_shot_reduce_scatter(z, reduce_op, 1, counts=counts)
        weight = torch.randn_like(s)
        (s * weight).sum().backward()
        assert z.grad is not None
        check("scatter", z.grad, of_all(weight, counts, 1) / (world_size if reduce_op == "avg" else 1), 1e-6)
    with pytest.raises(ValueError, match="reduce_op: is 'max', must be 'sum' or 'avg'"):
        one_shot_reduce_scatter(z, "max", 1, counts=counts)


@on_ranks(2)
def test_second_gradients(rank: int, world_size: int) -> None:
    counts = [1, 4]
    x = torch.randn(counts[rank], 2).requires_grad_()
    (grad,) = torch.autograd.grad(one_shot_all_gather(x, 0, counts=counts).pow(3).sum(), x, create_graph=True)
    check("first", grad.detach(), 2 * 3 * x.detach().double().square(), 1e-6)  # each rank's loss is the same
    (second,) = torch.autograd.grad(grad.sum(), x)
    check("second", second, 2 * 6 * x.detach().double(), 1e-6)
    z = torch.randn(5, 2).requires_grad_()
    total = sum(gather(z))
    s = one_shot_reduce_scatter(z, "sum", 0, counts=counts)
    (grad,) = torch.autograd.grad(s.pow(3).sum(), z, create_graph=True)
    check("first", grad.detach(), 3 * total.square(), 1e-6)
    (second,) = torch.autograd.grad(grad.sum(), z)
    check("second", second, 2 * 6 * total, 1e-6)


@on_ranks(2)
def test_opcheck(rank: int, world_size: int) -> None:
    ops, name, counts = torch.ops.weft, world().group_name, [2, 5]
    x, z = torch.randn(3, counts[rank]), torch.randn(7, 3)
    for given in (x.clone().requires_grad_(), x):
        torch.library.opcheck(ops.one_shot_all_gather, (given, -1, name), {"counts": counts})
    torch.library.opcheck(ops.one_shot_all_gather_out, (torch.zeros(3, 7), x, 1, name), {"counts": counts})
    for given in (z.clone().requires_grad_(), z):
        torch.library.opcheck(ops.one_shot_reduce_scatter, (given, "sum", 0, name), {"counts": counts})
    out = torch.zeros(counts[rank], 3)
    torch.library.opcheck(ops.one_shot_reduce_scatter_out, (out, z, "sum", 0, name), {"counts": counts})


@on_ranks(2)
def test_under_torch_compile(rank: int, world_size: int) -> None:
    def program(x: Tensor, counts: list[int]) -> Tensor:
        y = one_shot_all_gather(x * 2, 0, counts=counts)
        return one_shot_reduce_scatter(y.sin(), "sum", 0, counts=counts) + 1

    for backend in ("aot_eager", "weft"):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for counts in ([3, 5], [6, 2], [4, 9]):
            x = torch.randn(counts[rank], 3)
            given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
            got, want = compiled(given, counts), program(same, counts)
            check("compiled", got.detach(), want.detach().double(), 1e-6)
            got.sum().backward()
            want.sum().backward()
            assert given.grad is not None and same.grad is not None
            check("compiled grad", given.grad, same.grad.double(), 1e-6)


@on_ranks(2)
def test_a_graph_is_of_its_rank(rank: int, world_size: int) -> None:
    """Ranks share torch's caches of graphs on disk: what is made of one rank's sizes is no other's."""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(n.kwargs["group_rank"] for n in graph.graph.nodes if "group_rank" in n.kwargs)
        return graph

    x, grads = torch.randn(5, 3), aot_autograd(fw_compiler=backend, bw_compiler=backend)
    scattered = torch.compile(
        lambda z: one_shot_reduce_scatter(z, "sum", 0, counts=[1, 4]).sin(), backend=grads
    )
    assert len(scattered(x)) == (1, 4)[rank]
    gathered = torch.compile(lambda z: one_shot_all_gather(z, 0, counts=[5, 5]).sin(), backend=grads)
    gathered(x.requires_grad_()).sum().backward()
    assert seen == [rank] * 3  # the last one of the backward
    ops = torch.ops.weft
    with pytest.raises(ValueError, match=rf"group_rank: is {1 - rank}, must be {rank}"):
        ops.one_shot_all_gather(x[:4], 0, world().group_name, counts=[4, 4], group_rank=1 - rank)
    # One cache folder, two runs: the second one finds the first one's.
    for _ in range(2):
        torch._dynamo.reset()
        program = torch.compile(lambda z: one_shot_reduce_scatter(z, "sum", 0, counts=[1, 4]).sin() + 1)
        got = program(x.detach())
        check(
            "compiled",
            got,
            one_shot_reduce_scatter(x.detach(), "sum", 0, counts=[1, 4]).sin().double() + 1,
            1e-6,
        )


@on_ranks(2)
def test_ranks_agree_on_a_graph_with_sizes_of_their_own(rank: int, world_size: int) -> None:
    def program(x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
        product = funcol.all_gather_tensor(x, 0, world()) @ w
        return one_shot_all_gather(rows, 0, counts=[1, 3]) + product

    x, w, rows = torch.randn(2, 3), torch.randn(3, 2), torch.randn(1 + 2 * rank, 2)
    fusion = FusionPass(fuse="always")
    got = torch.compile(program, options=fusion.options, dynamic=False)(x, w, rows)
    check("compiled", got, program(x, w, rows).double(), 1e-6)
    report = fusion.report()
    assert report.fused == 1 and not report.disagreements, report


@on_ranks(2)
def test_bad_counts_are_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    ops, name = torch.ops.weft, world().group_name
    x = torch.randn(4, 3)
    before = last_plan()

    def gather_of(x: Tensor, counts: Any) -> Tensor:
        return ops.one_shot_all_gather(x, 0, name, counts=counts)

    def scatter_of(x: Tensor, counts: Any) -> Tensor:
        return ops.one_shot_reduce_scatter(x, "sum", 0, name, counts=counts)

    for op in (gather_of, scatter_of):
        refuses(op, (x, [1, 2, 1]), ValueError, "counts: has 3 sizes, must have 2, one for each rank")
        refuses(op, (x, [5, -1]), ValueError, r"counts\[1\]: is -1, must be at least 0")
    wrong = rf"counts\[{rank}\]: is 5, must be 4, the size of rank {rank}'s x in dimension 0"
    refuses(gather_of, (x, [5, 5]), ValueError, wrong)
    refuses(
        scatter_of, (x, [3, 2]), ValueError, "counts: add up to 5, must add up to 4, the size of x in dim"
    )
    out = torch.zeros(9, 3)
    with pytest.raises(ValueError, match=r"out: has shape \(9, 3\), must have \(8, 3\)"):
        one_shot_all_gather(x, 0, out=out, counts=[4, 4])
    with pytest.raises(ValueError, match=r"out: has shape \(9, 3\), must have \(2, 3\)"):
        one_shot_reduce_scatter(x, "sum", 0, out=out, counts=[2, 2])
    for given, words in (
        (7, "counts: is of type int"),
        ([4, 4.0], r"counts\[1\]: is of type float"),
        ("44", "str"),
    ):
        with pytest.raises(TypeError, match=words):
            one_shot_all_gather(x, 0, counts=given)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=words):
            one_shot_reduce_scatter(x, "sum", 0, counts=given)  # type: ignore[arg-type]
    assert last_plan() is before, "refused after it was launched"


def differ(rank: int, world_size: int) -> list[str]:
    texts = []
    for call in (
        lambda: one_shot_all_gather(torch.ones(2 + rank, 3), 0, counts=[2, 3] if rank else [2, 5]),
        lambda: one_shot_reduce_scatter(torch.ones(6, 3), "sum", 0, counts=[2 + rank, 4 - rank]),
    ):
        symm_mem.reset()
        with pytest.raises(symm_mem.RankMismatch) as error:
            call()
        texts.append(str(error.value))
        assert (one_shot_all_reduce(torch.ones(3), "sum") == world_size).all()
    # Ranks of different sizes are no such thing.
    symm_mem.reset()
    symm_mem.set_checked(True)
    y = one_shot_all_gather(torch.ones(1 + rank, 3), 0, counts=[1, 2])
    out = torch.zeros(1 + rank, 3)
    one_shot_reduce_scatter(y, "sum", 0, out=out, counts=[1, 2])
    assert out.eq(2).all()
    return texts


def test_ranks_with_different_counts_are_named() -> None:
    gathered, scattered = run_ranks(differ, 2, fresh=True)[0]
    assert "counts=[2, 5]" in gathered and "counts=[2, 3]" in gathered and "x=float32[*, 3]" in gathered
    assert "counts=[2, 4]" in scattered and "counts=[3, 3]" in scattered
