"""``weft.install()`` between CPU ranks, against float64 and against torch's functional collectives."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm
import weft
from opcommon import BOUND, DTYPES, check, gather, poison, world
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._inductor import config as inductor_config
from weft.fused_ops import last_plan
from weft.fused_ops.drop_in import installation

AG, RS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
all_gather_matmul = torch.ops.symm_mem.fused_all_gather_matmul
matmul_reduce_scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
SHAPES = [((6, 9), 0), ((6, 9), 1), ((4, 6, 5), 0), ((4, 6, 5), 1), ((4, 6, 5), 2)]


@contextmanager
def in_place() -> Iterator[str]:
    """weft is installed; gives the group's name."""
    weft.install()
    weft.drop_in.installed_calls(clear=True)
    try:
        yield world().group_name
    finally:
        weft.drop_in.uninstall()


def taken(op: str) -> dict[tuple[str, str], int]:
    return {(t.by, t.why): t.count for t in weft.drop_in.installed_calls() if t.op == op}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@on_ranks([2, 3])
def test_gathers(rank: int, size: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    k = shape[-1] * (size if dim == len(shape) - 1 else 1)
    x, Bs = torch.randn(shape).to(dtype), [torch.randn(k, n).to(dtype) for n in (7, 4)]
    with in_place() as group:
        for return_A in (True, False):
            poison(rank)
            A, outs = all_gather_matmul(x, Bs, dim, group, return_A=return_A)
            assert last_plan().algorithm == "host"
            want = torch.cat(gather(x), dim)
            assert (A is not None) is return_A
            with torch_symm._test_mode():  # torch's own, by functional collectives
                theirs_A, theirs = torch_symm._fused_all_gather_matmul_fallback(
                    x, Bs, dim, group, return_A=return_A
                )
            if A is not None and theirs_A is not None:
                check("A", A, want, 0)
                assert A.stride() == theirs_A.stride()
            for y, B, other in zip(outs, Bs, theirs, strict=True):
                check("y", y, want @ B.double(), BOUND[dtype])
                assert y.stride() == other.stride() and y.dtype == other.dtype
        assert taken(AG) == {("weft", ""): 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@on_ranks([2, 3])
def test_scatters(rank: int, size: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    shape = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :]) if dim < len(shape) - 1 else shape
    x, B = torch.randn(shape).to(dtype), torch.randn(shape[-1], 3 * size).to(dtype)
    with in_place() as group:
        for reduce_op in ("sum", "avg"):
            poison(rank)
            y = matmul_reduce_scatter(x, B, reduce_op, dim, group)
            assert last_plan().algorithm == "host"
            parts = [p.chunk(size, dim)[rank] for p in gather(x.double() @ B.double())]
            scale = size if reduce_op == "avg" else 1
            check("y", y, torch.stack(parts).sum(0) / scale, BOUND[dtype], [p / scale for p in parts])
            other = torch_symm._fused_matmul_reduce_scatter_fallback(x, B, reduce_op, dim, group)
            assert y.shape == other.shape and y.stride() == other.stride() and y.dtype == other.dtype
        assert taken(RS) == {("weft", ""): 2}


@on_ranks(2)
def test_what_torch_refuses(rank: int, size: int) -> None:
    """What torch's implementation refuses, in its words, though torch has none for CPU."""
    x, B = torch.randn(4, 6), torch.randn(6, 8)
    with in_place() as group:
        for call, message in (
            (lambda: all_gather_matmul(x[0], [B], 0, group), "A_shard must be a matrix"),
            (lambda: all_gather_matmul(x, [B[0]], 0, group), "B must be a matrix"),
            (lambda: all_gather_matmul(x, [B], -1, group), "Invalid gather_dim"),
            (lambda: all_gather_matmul(x, [B], 2, group), "Invalid gather_dim"),
            (lambda: matmul_reduce_scatter(x[0], B, "sum", 0, group), "A_shard must be a matrix"),
            (lambda: matmul_reduce_scatter(x, B, "sum", -1, group), "Invalid gather_dim"),
            (lambda: matmul_reduce_scatter(x, B, "max", 0, group), "reduce_op must be sum or avg"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(RuntimeError, match="process group"):
            all_gather_matmul(x, [B], 0, "no such group")
        by_torch = {**taken(AG), **taken(RS)}
        assert not any(by == "weft" for by, _ in by_torch)
        assert by_torch["torch", "torch refuses it"] >= 3


@on_ranks(2)
def test_what_weft_cannot_take(rank: int, size: int) -> None:
    """Other dtypes, and torch's test mode: the call is torch's, and right."""
    x, B = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    with in_place() as group:
        A, (y,) = all_gather_matmul(x, [B], 0, group)
        check("y", y, torch.cat(gather(x)) @ B, 1e-14)
        check("A", A, torch.cat(gather(x)), 0)
        z = matmul_reduce_scatter(x, B, "sum", 0, group)
        check("z", z, torch.stack(gather(x @ B)).sum(0).chunk(size)[rank], 1e-14)
        why = "A_shard: is torch.float64, must be float32, bfloat16 or float16"
        assert taken(AG) == {("torch", why): 1}
        assert taken(RS) == {("torch", why.replace("A_shard", "A")): 1}
        with torch_symm._test_mode():
            all_gather_matmul(x.float(), [B.float()], 0, group)
        assert taken(AG)["torch", "torch's test mode"] == 1
        assert "3 calls by torch" not in "\n".join(map(str, weft.drop_in.installed_calls()))


@on_ranks(2)
def test_install_and_uninstall(rank: int, size: int) -> None:
    x, B = torch.randn(4, 6), torch.randn(6, 8)
    group, tag = world().group_name, torch.compiler.config.cache_key_tag
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            all_gather_matmul(x, [B], 0, group)
        weft.install()
        weft.install()
        assert weft.drop_in.installed()
        assert torch.compiler.config.cache_key_tag != tag
        held = torch.ops.symm_mem.fused_all_gather_matmul.default
        assert held is all_gather_matmul.default
        check("y", held(x, [B], 0, group)[1][0], torch.cat(gather(x)) @ B.double(), BOUND[torch.float32])
        weft.drop_in.uninstall()
        weft.drop_in.uninstall()
        assert not weft.drop_in.installed()
        assert torch.compiler.config.cache_key_tag == tag


@on_ranks(1, fresh=True)
def test_programs_of_other_numbers_of_ranks_are_not_taken_from_the_cache(rank: int, size: int) -> None:
    tags = []
    for ranks in ("2", "4"):
        os.environ["WORLD_SIZE"] = ranks
        again = importlib.reload(installation)  # as another process finds it
        again.install()
        tags.append(torch.compiler.config.cache_key_tag)
        again.uninstall()
    assert tags[0] != tags[1] == tags[0].replace("of 2", "of 4"), tags


def layer(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    _, (h,) = all_gather_matmul(x, [up], 0, group, return_A=False)
    return matmul_reduce_scatter(h.relu(), down, "sum", 0, group)


def exact(rank: int, size: int, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = (torch.cat(gather(x)) @ up.double()).relu()
    parts = [p.chunk(size)[rank] for p in gather(h @ down.double())]
    return torch.stack(parts).sum(0), parts


@on_ranks(2)
def test_compiled(rank: int, size: int) -> None:
    """Dynamic sizes, and a call whose result nothing uses: it is made, in its place."""

    def program(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
        matmul_reduce_scatter(torch.cat([x] * size), up, "avg", 0, group)
        return layer(x, up, down, group)

    torch._dynamo.reset()
    with in_place() as group, inductor_config.patch(fx_graph_cache=False):
        run = torch.compile(program, dynamic=True, fullgraph=True)
        for rows in (3, 5):
            x, up, down = torch.randn(rows, 6), torch.randn(6, 8), torch.randn(8, 10)
            check("y", run(x, up, down, group), *_want(exact(rank, size, x, up, down)))
        assert taken(AG) == {("weft", ""): 2}
        assert taken(RS) == {("weft", ""): 4}
    torch._dynamo.reset()


def _want(result: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, float, list[Tensor]]:
    want, parts = result
    return want, 2 * BOUND[torch.float32], parts  # two products


def micro_pipelined(rank: int, size: int) -> int:
    """Inductor's own pass puts the ops in. It asks for NCCL, which this torch may not have."""
    import torch.distributed._functional_collectives as funcol

    def program(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = funcol.all_gather_tensor(x, 0, world()) @ up
        return funcol.reduce_scatter_tensor(h.relu() @ down, "sum", 0, world())

    torch._dynamo.reset()
    x, up, down = torch.randn(5, 6), torch.randn(6, 8), torch.randn(8, 10)
    with (
        in_place(),
        patch.object(dist, "is_nccl_available", return_value=True),
        inductor_config.patch(_micro_pipeline_tp=True, fx_graph_cache=False),
    ):
        run = torch.compile(program, fullgraph=True)
        with torch_symm._test_mode():  # while it is compiled: the group counts as one of symmetric memory
            run(x, up, down)
        by_torch = sum(taken(AG).values()) + sum(taken(RS).values())
        weft.drop_in.installed_calls(clear=True)
        check("y", run(x, up, down), *_want(exact(rank, size, x, up, down)))
        assert taken(AG) == taken(RS) == {("weft", ""): 1}
        from weft.fused_ops.library.inductor import _known as in_order

        assert {all_gather_matmul.default, matmul_reduce_scatter.default} <= in_order.keys()
    assert all_gather_matmul.default not in in_order  # torch's are lowered as before
    torch._dynamo.reset()
    return by_torch


def test_under_micro_pipeline_tp() -> None:
    assert run_ranks(micro_pipelined, 2) == [2, 2]


@on_ranks(2)
def test_in_autograd_functions(rank: int, size: int) -> None:
    """As torchtitan calls them: inside of an autograd.Function, whose backward calls the other one."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, w: Tensor, group: str) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w)
            ctx.group = group
            return all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]

        @staticmethod
        def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
            x, w = ctx.saved_tensors
            A, _ = all_gather_matmul(x, [torch.eye(x.shape[1])], 0, ctx.group)
            return matmul_reduce_scatter(grad, w.t(), "sum", 0, ctx.group), A.t() @ grad, None

    with in_place() as group:
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        y, grad = Gather.apply(x, w, group), torch.randn(4 * size, 8)
        y.backward(grad)
        parts = [p.chunk(size)[rank] for p in gather(grad @ w.detach().t())]
        check("gradient of x", x.grad, torch.stack(parts).sum(0), BOUND[torch.float32], parts)
        check("gradient of w", w.grad, torch.cat(gather(x)).t() @ grad.double(), BOUND[torch.float32])
        assert not any(t.by == "torch" for t in weft.drop_in.installed_calls())
