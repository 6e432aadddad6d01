"""The process group "weft" on GPUs: streams, work without a wait, CUDA graphs, NCCL beside it, host time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from opcommon import BOUND, gather
from opcommon import check as close
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weft.fused_ops.process_groups.calls import MOST_BYTES

pytestmark = pytest.mark.gpu


def weft_group() -> Any:
    return dist.new_group(backend="weft")


def taken(group: Any) -> dict[str, int]:
    return {call.op: call.count for call in weft.process_group(group).calls(clear=True) if call.by == "weft"}


def reduces(rank: int, world_size: int) -> None:
    group = weft_group()
    assert weft.process_group(group).taken_on == ("cpu", "cuda")
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 17, 4096, 300_001):
            for asynchronous in (False, True, False):
                x = torch.randn(world_size * n).to(dtype)
                parts = gather(x)
                total, part, whole = (
                    x.clone(),
                    torch.full_like(x[:n], torch.nan),
                    x.new_full((world_size * n,), torch.nan),
                )
                works = [
                    dist.all_reduce(total, group=group, async_op=asynchronous),
                    dist.reduce_scatter_tensor(part, x, dist.ReduceOp.AVG, group, async_op=asynchronous),
                    dist.all_gather_into_tensor(whole, x[:n], group, async_op=asynchronous),
                ]
                for work in works:
                    if work is not None:
                        work.wait()
                close("all_reduce", total, sum(parts), BOUND[dtype], parts)
                mine = [p.view(world_size, n)[rank] / world_size for p in parts]
                close("reduce_scatter", part, sum(mine), BOUND[dtype], mine)
                gathered = torch.cat([p[:n] for p in parts])
                assert torch.equal(whole.double(), gathered)
    assert set(taken(group)) == {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}


def exchanges(rank: int, world_size: int) -> None:
    group = weft_group()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for part in ((1,), (17,), (3, 5), (4096, 2)):
            for asynchronous in (False, True, False):  # the last two are like one before
                x = torch.randint(100, (world_size * part[0], *part[1:])).to(dtype)
                found = torch.full_like(x, 101)
                work = dist.all_to_all_single(found, x, group=group, async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert torch.equal(found.double(), torch.cat([p.chunk(world_size)[rank] for p in gather(x)]))
    assert taken(group) == {"all_to_all_single": 4 * 4 * 3}


def on_streams(rank: int, world_size: int) -> None:
    """Ranks call on streams of their own, and what follows a wait on another stream sees the result."""
    group, streams = weft_group(), [torch.cuda.Stream() for _ in range(2)]
    results, wants = [], []
    for i in range(40):
        x = torch.full((65_536,), float(i + rank))
        stream = streams[(i * (rank + 1)) % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000 * (i % 3 + rank))
            work = dist.all_reduce(x, group=group, async_op=i % 4 != 0)
        if work is None:
            torch.cuda.current_stream().wait_stream(stream)
        else:
            work.wait()
        results.append(x + 1)
        wants.append(2.0 * i + 2)
    assert [r.unique().item() for r in results] == wants
    assert taken(group) == {"all_reduce": 40}


def beside_nccl(rank: int, world_size: int) -> None:
    """Calls of NCCL's and of weft's on one tensor, none of them waited for but the last one."""
    group, large = weft_group(), MOST_BYTES // 4 + 4
    x = torch.ones(large)
    for _ in range(3):
        kept = [dist.all_reduce(x, group=group, async_op=True)]  # NCCL's
        kept.append(dist.all_reduce(x[:1024], group=group, async_op=True))
        kept.append(dist.broadcast(x, 0, group=group, async_op=True))
        kept.append(dist.all_reduce(x[:1024], group=group, async_op=True))
        kept[-1].wait()
    assert x[:1024].unique().item() == 8.0**3
    kept[-2].wait()
    assert x[1024:].unique().item() == 2.0**3
    y, received = torch.full((100_000,), float(rank)), torch.empty(100_000)
    other = 1 - rank
    for _ in range(2):  # both send before they receive
        batch = [dist.P2POp(dist.isend, y, other, group), dist.P2POp(dist.irecv, received, other, group)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert received.unique().item() == other


def in_a_graph(rank: int, world_size: int) -> None:
    group, x = weft_group(), torch.ones(5000, dtype=torch.bfloat16)
    whole = torch.empty(10_000, dtype=torch.bfloat16)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(whole, x, group)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
        work = dist.all_gather_into_tensor(whole, x, group, async_op=True)
        work.wait()
    for i in range(5):
        x.fill_(i + rank)
        whole.fill_(-1)
        graph.replay()
        assert whole.unique().tolist() == [2 * i + 1]
    dist.all_reduce(x.fill_(rank), group=group)  # eager again
    assert x.unique().tolist() == [1]


def trains(rank: int, world_size: int) -> None:
    def train(group: Any) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
        optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.1), []
        for i in range(4):
            x = torch.randn(32, 64, generator=torch.Generator("cuda").manual_seed(10 * i + rank))
            loss = (ddp(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()]

    group = weft_group()
    mine, theirs = train(group), train(None)
    torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(theirs[0]), rtol=1e-5, atol=1e-6)
    for a, b in zip(mine[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not taken(group)


@pytest.mark.parametrize(
    "check",
    [
        reduces,
        exchanges,
        on_streams,
        pytest.param(beside_nccl, marks=pytest.mark.gpu(own=True)),
        in_a_graph,
        trains,
    ],
    ids=lambda check: check.__name__,
)
def test_on_gpus(check: Callable[[int, int], None]) -> None:
    run_ranks(check, 2, device="cuda")


def host_times(rank: int, world_size: int) -> tuple[float, float]:
    """Microseconds of an eager all-reduce, without what the device takes: NCCL's, weft's."""
    times = []
    for group in (dist.group.WORLD, weft_group()):
        x, best = torch.ones(1024, dtype=torch.bfloat16), float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                dist.all_reduce(x, group=group)
            best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
        times.append(best)
    return times[0], times[1]


@pytest.mark.alone
@pytest.mark.gpu(2, own=True)
def test_it_costs_the_host_no_more_than_nccl_and_3_us() -> None:
    for nccl, mine in run_ranks(host_times, 2, device="cuda"):
        assert mine < nccl + 3, f"NCCL {nccl:.1f} us, weft {mine:.1f} us"
