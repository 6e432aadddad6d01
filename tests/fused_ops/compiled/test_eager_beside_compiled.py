"""A rank that runs a program op by op beside one that runs it compiled: they meet in the same calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

WORLD = 2
WAIT = 200.0  # seconds: the other rank compiles


def group_name() -> str:
    from weft import symm_mem

    name = dist.distributed_c10d._get_default_group().group_name
    symm_mem.set_timeout(WAIT, name)
    return name


def one_compiled(fn: Callable[..., Any], rank: int, **named: Any) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, **named) if rank == 1 else fn


def numbers(tensors: Any) -> list[float]:
    """Of tensors whose elements are all alike."""
    assert all(t.unique().numel() == 1 for t in tensors)
    return [t.flatten()[0].item() for t in tensors]


def logged(rank: int, world: int) -> list[list[float]]:
    """One rank looks at a result that the other one has no use for."""
    ops, name = torch.ops.weft, group_name()

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        norm = ops.one_shot_all_reduce(x, "sum", name)
        b = ops.one_shot_all_reduce(y, "sum", name)
        return (b, norm) if rank == 0 else (b,)

    torch._dynamo.reset()
    x, y = torch.full((4, 16), 1.0 + rank), torch.full((4, 16), 100.0 * (1 + rank))
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(fn)
        return [numbers(compiled(x, y)) for _ in range(2)]


def moved(rank: int, world: int) -> list[float]:
    """Large work after a call, whose operand Inductor would rather have later."""
    ops, name = torch.ops.weft, group_name()

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        b = ops.one_shot_all_reduce(y, "sum", name)
        big = b.repeat(4096, 1) @ w
        t = x.repeat(4096, 1) @ w
        a = ops.one_shot_all_reduce(t.mean(0, keepdim=True).expand(4, 16), "sum", name)
        return a, b, big

    torch._dynamo.reset()
    x, y = torch.full((4, 16), 1.0 + rank), torch.full((4, 16), 100.0 * (1 + rank))
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        return numbers(one_compiled(fn, rank)(x, y, torch.eye(16)))


def test_a_result_that_one_rank_has_no_use_for() -> None:
    assert run_ranks(logged, WORLD) == [[[300.0, 3.0]] * 2, [[300.0]] * 2]


def test_work_between_calls() -> None:
    assert run_ranks(moved, WORLD) == [[3.0, 300.0, 300.0]] * 2


def all_ops(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, ...]:
    """Every op, some with results that nothing uses, and equal calls."""
    ops = torch.ops.weft
    ops.one_shot_all_reduce(x.detach() * 3, "sum", name)
    h, (a, b) = ops.fused_all_gather_matmul(x, [w, w.t()], 0, name)
    ops.fused_all_gather_matmul(h, [w], 0, name, return_A=False)
    y = ops.fused_matmul_reduce_scatter((a * b).tanh(), w, "sum", 0, name)
    same = ops.one_shot_all_reduce(y, "sum", name) - ops.one_shot_all_reduce(y, "avg", name).cos()
    same = same + ops.one_shot_all_reduce(y, "sum", name).sin()
    t = y.detach().clone()
    ops.one_shot_all_reduce_(t, "sum", name)
    u = y.detach().clone() + 1
    ops.one_shot_all_reduce_(u, "sum", name)  # of no use
    normed, total = ops.fused_all_reduce_rms_norm(same, y, w[0], 1e-5, name)
    z = ops.fused_matmul_all_reduce(normed + t, w, "avg", name)
    return z, total + h[: len(y)], t


def reference(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, ...]:
    """The same in float64, of torch's collectives."""
    import torch.distributed.nn.functional as nnf

    def reduced(t: Tensor) -> Tensor:
        return nnf.all_reduce(t)

    h = torch.cat(nnf.all_gather(x))
    whole = reduced((h @ w * (h @ w.t())).tanh() @ w)
    y = whole.tensor_split(WORLD)[dist.get_rank()]
    total = reduced(y)
    same = total - (total / WORLD).cos() + total.sin()
    sums = y + reduced(same)
    normed = sums * (sums.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[0]
    t = reduced(y.detach())
    return reduced((normed + t) @ w) / WORLD, sums + h[: len(y)], t


def every_op(rank: int, world: int, dynamic: bool) -> list[float]:
    """Relative errors of results and gradients."""
    name = group_name()
    torch._dynamo.reset()
    x = torch.randn(6, 16, dtype=torch.float64) / 4
    w = torch.randn(16, 16, dtype=torch.float64) / 4
    dist.broadcast(w, 0)
    ours = [t.float().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    grads = [torch.randn(6, 16, dtype=torch.float64) for _ in range(2)]
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        got = one_compiled(all_ops, rank, dynamic=dynamic)(*ours, name)
        torch.autograd.backward(got[:2], [g.float() for g in grads])
    want = reference(*exact, name)
    torch.autograd.backward(want[:2], grads)
    pairs = [*zip(got, want, strict=True), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_every_op_forwards_and_backwards(dynamic: bool) -> None:
    for errors in run_ranks(every_op, WORLD, dynamic):
        assert max(errors) < 1e-4, errors


def layers(rank: int, world: int) -> list[float]:
    """Relative differences of a pair of layers' outcome and gradients from the same op by op on both ranks."""
    from weft.fused_ops import ColumnParallelLinear, RowParallelLinear

    name = group_name()
    torch._dynamo.reset()
    torch.manual_seed(0)
    up = ColumnParallelLinear(16, 32, group=name, sequence_parallel=True)
    down = RowParallelLinear(32, 16, group=name, sequence_parallel=True)
    model = torch.nn.Sequential(up, torch.nn.GELU(), down)
    x = torch.randn(4, 16) * (1 + rank)
    outcomes = []
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        for fn in (model, one_compiled(model, rank)):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = fn(given)
            y.square().sum().backward()
            outcomes.append(
                [t.detach().clone() for t in (y, given.grad, *(p.grad for p in model.parameters()))]
            )
    return [((a - b).norm() / a.norm()).item() for a, b in zip(*outcomes, strict=True)]


def test_layers() -> None:
    for errors in run_ranks(layers, WORLD):
        assert max(errors) < 1e-5, errors


def from_cache(rank: int, world: int, folder: str, tags: list[str | None]) -> list[int]:
    """How many graphs the rank that compiles has taken from the caches on disk, for each tag."""
    import weft.fused_ops  # noqa: F401  (the ops)
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    name, own = group_name(), torch.compiler.config.cache_key_tag
    x = torch.full((5, 7), 1.0)

    def fn(x: Tensor) -> Tensor:
        torch.ops.weft.one_shot_all_reduce(x + 1, "sum", name)
        return torch.ops.weft.one_shot_all_reduce(x.sin(), "sum", name)

    hits = []
    for tag in tags:
        torch._dynamo.reset()
        counters.clear()
        config = {"cache_key_tag": own if tag is None else tag, "force_disable_caches": False}
        with torch.no_grad(), torch.compiler.config.patch(config):
            y = one_compiled(fn, rank)(x)
        assert torch.allclose(y, 2 * x.sin())
        hits.append(
            counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
        )
    return hits


def test_graphs_from_the_caches_make_the_calls_and_are_those_of_this_version(tmp_path: Path) -> None:
    def run(*tags: str | None) -> list[int]:
        return run_ranks(from_cache, WORLD, str(tmp_path), [*tags], fresh=True)[1]

    assert run(None, "of an older weft") == [0, 0]
    assert all(run(None, "of an older weft"))
    assert run("of another weft") == [0]
