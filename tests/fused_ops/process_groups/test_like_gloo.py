"""Every public function of torch.distributed over "weft" gives what it gives over gloo, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import weft
from ranks import on_ranks
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.parallel import DistributedDataParallel

Call = Callable[[Any, int, Tensor], Any]


def _pair(x: Tensor) -> list[Tensor]:
    return [torch.full_like(x, 5.0), torch.full_like(x, 7.0)]


def _asynchronous(call: Callable[..., Any]) -> Call:
    def run(group: Any, rank: int, x: Tensor) -> Any:
        work = call(x, group=group, async_op=True)
        work.wait()
        return x

    return run


def broadcast(group: Any, rank: int, x: Tensor) -> Any:
    dist.broadcast(x, 1, group=group)
    return x


def reduce(group: Any, rank: int, x: Tensor) -> Any:
    dist.reduce(x, 0, group=group)
    return x if rank == 0 else None


def all_reduce(group: Any, rank: int, x: Tensor) -> Any:
    dist.all_reduce(x, group=group)
    return x


def all_reduce_of_integers(group: Any, rank: int, x: Tensor) -> Any:
    y = x.to(torch.int64)
    dist.all_reduce(y, dist.ReduceOp.PRODUCT, group)
    return y


def all_reduce_coalesced(group: Any, rank: int, x: Tensor) -> Any:
    dist.all_reduce_coalesced([x], group=group)
    return x


def all_gather(group: Any, rank: int, x: Tensor) -> Any:
    xs = _pair(x)
    dist.all_gather(xs, x, group=group)
    return xs


def all_gather_into_tensor(group: Any, rank: int, x: Tensor) -> Any:
    out = x.new_empty(8)
    dist.all_gather_into_tensor(out, x, group)
    return out


def gather(group: Any, rank: int, x: Tensor) -> Any:
    xs = _pair(x) if rank == 0 else None
    dist.gather(x, xs, 0, group=group)
    return xs


def scatter(group: Any, rank: int, x: Tensor) -> Any:
    dist.scatter(x, _pair(x) if rank == 0 else None, 0, group=group)
    return x


def reduce_scatter(group: Any, rank: int, x: Tensor) -> Any:
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x, x * 2], group=group)
    return out


def reduce_scatter_tensor(group: Any, rank: int, x: Tensor) -> Any:
    out = x.new_empty(2)
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def all_to_all(group: Any, rank: int, x: Tensor) -> Any:
    xs = _pair(x)
    dist.all_to_all(xs, [x, x + 1], group=group)
    return xs


def all_to_all_single(group: Any, rank: int, x: Tensor) -> Any:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def send_and_recv(group: Any, rank: int, x: Tensor) -> Any:
    if rank == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
    return x


def isend_and_irecv(group: Any, rank: int, x: Tensor) -> Any:
    out = torch.empty_like(x)
    works = [dist.isend(x, 1 - rank, group=group), dist.irecv(out, 1 - rank, group=group)]
    for work in works:
        work.wait()
    return out


def batch_isend_irecv(group: Any, rank: int, x: Tensor) -> Any:
    out = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, out, 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def barrier(group: Any, rank: int, x: Tensor) -> Any:
    dist.barrier(group=group)
    return x


def monitored_barrier(group: Any, rank: int, x: Tensor) -> Any:
    # dist.monitored_barrier refuses any group whose backend is not named "gloo", and then calls this.
    group.monitored_barrier(timedelta(seconds=30))
    return x


def objects(group: Any, rank: int, x: Tensor) -> Any:
    each: list[Any] = [None, None]
    dist.all_gather_object(each, {"rank": rank}, group=group)
    told = [each[1]] if rank == 1 else [None]
    dist.broadcast_object_list(told, 1, group=group)
    return each, told


def sizes(group: Any, rank: int, x: Tensor) -> Any:
    return x * dist.get_world_size(group), dist.get_rank(group)


def future(group: Any, rank: int, x: Tensor) -> Any:
    return dist.all_reduce(x, group=group, async_op=True).get_future().wait()


def unlike(group: Any, rank: int, x: Tensor) -> Any:
    dist.all_gather_into_tensor(x.new_empty(5), x, group)


def functionals(group: Any, rank: int, x: Tensor) -> Any:
    y = functional.all_reduce(x, "sum", group)
    z = functional.reduce_scatter_tensor(x, "sum", 0, group)
    return y, z, functional.all_gather_tensor(x, 0, group), functional.broadcast(x, 1, group)


CALLS: list[Call] = [
    *(broadcast, reduce, all_reduce, all_reduce_of_integers, all_reduce_coalesced, all_gather),
    *(all_gather_into_tensor, gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all),
    *(all_to_all_single, send_and_recv, isend_and_irecv, batch_isend_irecv, barrier, monitored_barrier),
    *(objects, sizes, future, unlike, functionals),
    _asynchronous(dist.all_reduce),
    _asynchronous(lambda x, group, async_op: dist.broadcast(x, 0, group, async_op)),
    _asynchronous(lambda x, group, async_op: dist.all_gather_into_tensor(x.new_empty(8), x, group, async_op)),
]
BY = ("weft", "gloo")
_REFUSED = (unlike, all_to_all)  # of gloo, the second one before torch 2.13
WAYS = {
    "eager": {},
    "fullgraph": {"backend": "aot_eager", "fullgraph": True},
    "inductor": {"backend": "inductor"},
}


def _plain(result: Any) -> Any:
    if isinstance(result, Tensor):
        return (result + 0).tolist()
    return [_plain(r) for r in result] if isinstance(result, (list, tuple)) else result


def outcome(call: Call, way: str, group: Any, rank: int) -> Any:
    torch._dynamo.reset()

    def run(x: Tensor) -> Any:
        return call(group, rank, x)

    try:
        made = torch.compile(run, **WAYS[way]) if WAYS[way] else run  # type: ignore[call-overload]
        return [_plain(made(torch.arange(4.0) + 10 * (rank + 1))) for _ in range(2)]
    except Exception as e:
        return type(e).__name__


@pytest.mark.parametrize("way", ["eager", "fullgraph", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_every_function(rank: int, world_size: int, way: str) -> None:
    gloo, group = dist.new_group(backend="gloo"), dist.new_group(backend="weft")
    with dynamo_config.patch(recompile_limit=64):
        for call in CALLS:
            theirs, mine = (outcome(call, way, g, rank) for g in (gloo, group))
            assert mine == theirs, (call.__name__, way, mine, theirs)
            assert way != "eager" or call in _REFUSED or isinstance(mine, list), (call.__name__, mine)
    taken = {by: {call.op for call in weft.process_group(group).calls() if call.by == by} for by in BY}
    # The functional one of compiled code is given split sizes.
    exchanged = {"all_to_all_single"} if way == "eager" else set()
    assert taken["weft"] == {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} | exchanged
    if way == "eager":  # all others
        others = "broadcast reduce all_gather gather scatter reduce_scatter send recv barrier"
        assert taken["gloo"] >= {*others.split()}, taken["gloo"]


def _trained(group: Any, rank: int) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    ddp = DistributedDataParallel(model, process_group=group)
    compiled = torch.compile(ddp, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * i + rank))
        (compiled(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [t.double().sum().item() for t in (*model.parameters(), *model.buffers())]


@on_ranks(2)
def test_models_and_questions(rank: int, world_size: int) -> None:
    gloo, group = dist.new_group(backend="gloo"), dist.new_group(backend="weft")
    mine, theirs = _trained(group, rank), _trained(gloo, rank)
    assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    counted = weft.process_group(group).calls(clear=True)
    assert not any(taken.op == "all_reduce" for taken in counted)

    @torch.compile(backend="aot_eager")
    def asks(x: Tensor) -> tuple[Tensor, Any]:
        dist.all_reduce(x, group=group)
        calls = weft.process_group(group).calls(clear=True)
        return x * 2, (calls, weft.fused_ops.is_weft_group(group))

    y, (calls, is_weft) = asks(torch.ones(3))
    assert y.tolist() == [4.0] * 3 and is_weft
    assert [str(call) for call in calls] == ["all_reduce: 1 call by weft"]
    # DDP's join of ranks with other numbers of batches.
    ddp = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    with ddp.join():
        for _ in range(1 + rank):
            ddp(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_options(rank: int, world_size: int) -> None:
    for wrong in (object(), {"timeout": 3}):
        with pytest.raises(
            TypeError, match=r"pg_options: is (object|dict), must be ProcessGroupGloo\._Options"
        ):
            dist.new_group(backend="weft", pg_options=wrong)
    options = dist.ProcessGroupGloo._Options()
    options._threads = 3
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    group = dist.new_group(backend="weft", pg_options=options, timeout=timedelta(seconds=66))
    backend = group._get_backend(torch.device("cpu"))
    assert (backend.options._threads, backend.options._timeout) == (3, timedelta(seconds=66))
    x = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2] * 3
    assert weft.fused_ops.is_weft_group(group) and not weft.fused_ops.is_weft_group(
        dist.new_group(backend="gloo")
    )
