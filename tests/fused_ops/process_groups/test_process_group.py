"""Collectives of the process group "weft" between CPU ranks, against float64 references of the test's own."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import weft
from opcommon import BOUND, DTYPES, gather
from opcommon import check as close
from ranks import on_ranks, run_ranks, run_row
from weft import symm_mem
from weft.fused_ops.process_groups import calls as group_calls
from weft.fused_ops.process_groups.batches import operations_of_batch, send_as_one

OPS = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
LAYOUTS = ("contiguous", "strided", "transposed", "unaligned", "of a gradient")


def weft_group() -> Any:
    return dist.new_group(backend="weft")


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers, otherwise in memory."""
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "unaligned":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    if layout == "transposed":
        return x.t().contiguous().t()
    return x.clone().requires_grad_() if layout == "of a gradient" else x.clone()


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    return OPS[op](torch.stack(parts), dim=0)


def taken(group: Any) -> dict[tuple[str, str], int]:
    return {(call.op, call.by): call.count for call in weft.process_group(group).calls(clear=True)}


def reduces(rank: int, world_size: int, op: str, dtype: torch.dtype, layout: str) -> None:
    group, kind = weft_group(), getattr(dist.ReduceOp, op)
    for asynchronous in (False, True):
        x = torch.randn(13, 7).to(dtype)
        want, y = reduced(gather(x), op), laid_out(x, layout)
        version = y._version
        work = dist.all_reduce(y, kind, group, async_op=asynchronous)
        if work is not None:
            assert work.wait() and work.is_completed() and work.is_success()
            assert work.result()[0].data_ptr() == y.data_ptr()
        assert y._version == version  # as with gloo
        close("all_reduce", y, want, BOUND[dtype], gather(x))
        x = torch.randn(world_size * 3, 5).to(dtype)
        parts, part = gather(x), laid_out(torch.full((3, 5), torch.nan, dtype=dtype), layout)
        want = reduced(parts, op).chunk(world_size)[rank]
        work = dist.reduce_scatter_tensor(part, laid_out(x, layout), kind, group, async_op=asynchronous)
        if work is not None:
            work.wait()
        close("reduce_scatter", part, want, BOUND[dtype], [p.chunk(world_size)[rank] for p in parts])
        whole = laid_out(torch.full((world_size * 3, 5), torch.nan, dtype=dtype), layout)
        x = torch.randn(3, 5).to(dtype)
        work = dist.all_gather_into_tensor(whole, laid_out(x, layout), group, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert torch.equal(whole.double(), torch.cat(gather(x)))
    assert set(taken(group)) == {
        (name, "weft") for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions(world_size: int, op: str, dtype: torch.dtype, layout: str) -> None:
    if world_size == 3 and layout != "contiguous":
        pytest.skip("once is enough")
    if layout == "transposed" and op != "SUM":
        pytest.skip("once is enough")
    run_row(reduces, world_size, op, dtype, layout)


@on_ranks(2)
def test_all_gathers_of_any_dtype(rank: int, world_size: int) -> None:
    group = weft_group()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        x = torch.randint(0, 2, (5,)).to(dtype)
        whole = torch.empty(world_size * 5, dtype=dtype)
        dist.all_gather_into_tensor(whole, x, group)
        assert torch.equal(whole.double(), torch.cat(gather(x)))
        one = torch.stack([x, x], 1)[:1, 0]  # contiguous, of a stride of its own
        dist.all_gather_into_tensor(whole[:world_size], one, group)
        assert torch.equal(whole[:world_size].double(), torch.cat(gather(one)))
    inside = torch.empty(world_size, 4)
    inside[rank] = rank  # its own part of the result, as FSDP has it
    dist.all_gather_into_tensor(inside.view(-1), inside[rank], group)
    assert torch.equal(inside[:, 0], torch.arange(float(world_size)))
    assert set(taken(group)) == {("all_gather_into_tensor", "weft")}


@on_ranks(2)
def test_what_it_leaves(rank: int, world_size: int) -> None:
    """What weft has no kernel for is gloo's, with its results and errors."""
    group, records = weft_group(), []
    log = logging.getLogger("weft.process_group")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    many = group_calls.MOST_BYTES // 4 + 1
    for _ in range(2):
        for x, op in (
            (torch.full((3,), rank + 1), dist.ReduceOp.SUM),
            (torch.full((3,), rank + 1.0), dist.ReduceOp.PRODUCT),
            (torch.full((many,), rank + 1.0), dist.ReduceOp.SUM),
        ):
            dist.all_reduce(x, op, group)
            assert x.unique().item() == (2 if op == dist.ReduceOp.PRODUCT else 3)
        dist.all_reduce(torch.empty(0), group=group)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, group=group)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    log.removeHandler(handler)
    why = {call.why: call.count for call in weft.process_group(group).calls()}
    assert why == {
        "int64": 2,
        "a reduction that weft does not have": 2,
        f"more than {group_calls.MOST_BYTES >> 20} MiB": 2,
        "nothing to send": 2,
        "a sparse tensor": 1,
    }
    assert len(records) == len(why) and f"of group '{group.group_name}' is left to gloo: int64" in records[0]
    for wrong in (torch.empty(5), torch.empty(6, dtype=torch.float64)):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            dist.all_gather_into_tensor(wrong, torch.empty(3))
        with pytest.raises(type(theirs.value)) as mine:
            dist.all_gather_into_tensor(wrong, torch.empty(3), group)
        assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@on_ranks(2)
def test_what_would_be_written_twice_is_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
    group, x, one = weft_group(), torch.randn(world_size), torch.randn(1)
    expanded, want = one.expand(world_size), reduced(gather(x), "SUM")
    calls = [
        ("tensor", lambda: dist.all_reduce(expanded, group=group)),
        ("tensor", lambda: dist.all_reduce_coalesced([x.clone(), expanded], group=group)),
        ("output", lambda: dist.all_gather_into_tensor(expanded, one, group)),
        ("output", lambda: dist.reduce_scatter_tensor(expanded, torch.cat([x] * world_size), group=group)),
        ("output", lambda: dist.all_to_all_single(expanded, x, group=group)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name}: is expanded, must have memory of its own"):
            call()
        y = x.clone()
        dist.all_reduce(y, group=group)  # the group is as it was
        close("all_reduce", y, want, BOUND[torch.float32], gather(x))
    negated = torch._neg_view(-x)  # over gloo it stays as it was
    dist.all_reduce(negated, group=group)
    close("all_reduce", negated, want, BOUND[torch.float32], gather(x))


@on_ranks(2)
def test_coalescing(rank: int, world_size: int) -> None:
    group = weft_group()
    tensors = [torch.randn(n) for n in (3, 17, 1)]
    wants = [reduced(gather(t), "SUM") for t in tensors]
    for asynchronous in (False, True):
        mine = [t.clone() for t in tensors]
        with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
            for t in mine:
                dist.all_reduce(t, group=group)
        if asynchronous:
            manager.wait()
        for t, want in zip(mine, wants, strict=True):
            close("coalesced", t, want, 1e-6)
    parts, wholes = [torch.randn(n) for n in (2, 5)], [torch.empty(n * world_size) for n in (2, 5)]
    with dist._coalescing_manager(group):
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather_into_tensor(whole, part, group)
    for part, whole in zip(parts, wholes, strict=True):
        assert torch.equal(whole.double(), torch.cat(gather(part)))
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    dist.all_reduce_coalesced(mixed[:1], group=group)
    assert mixed[0].tolist() == [world_size] * 2
    assert taken(group) == {("all_reduce", "weft"): 3, ("all_gather_into_tensor", "weft"): 1}


@on_ranks(2)
def test_functional_collectives(rank: int, world_size: int) -> None:
    group, x = weft_group(), torch.randn(world_size * 2, 3)
    parts = gather(x)
    y = functional.all_reduce(x, "avg", group)
    dist.all_reduce(y, group=group)  # not waited for by the program
    close("a result that is not waited for", y + 0, world_size * reduced(parts, "AVG"), 1e-6)
    close("all_gather", functional.all_gather_tensor(x, 1, group) + 0, torch.cat(parts, 1), 0)
    want = reduced(parts, "SUM").chunk(world_size)[rank]
    close("reduce_scatter", functional.reduce_scatter_tensor(x, "sum", 0, group) + 0, want, 1e-6)
    both = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    close("coalesced", both[1] + 0, reduced(parts, "SUM") + world_size, 1e-6)
    out = torch.full((world_size * world_size * 2, 3), torch.nan)
    gather_out = torch.ops._c10d_functional.all_gather_into_tensor_out
    torch.ops._c10d_functional.wait_tensor(gather_out(x, world_size, group.group_name, out=out))
    close("out", out, torch.cat(parts), 0)
    assert {by for _, by in taken(group)} == {"weft"}


def exchanges(rank: int, world_size: int) -> None:
    group = weft_group()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for shape in ((2 * world_size, 3), (world_size,), (3 * world_size, 2, 5)):
            x = (
                torch.randint(0, 2, shape).to(dtype)
                if dtype == torch.bool
                else torch.randn(shape).mul(99).to(dtype)
            )
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, x)
            want = torch.cat([part.chunk(world_size)[rank] for part in every])
            out = torch.zeros_like(x)
            dist.all_to_all_single(out, x, group=group)
            assert torch.equal(out, want)
            given, work = x.clone(), None
            work = dist.all_to_all_single(given, given, group=group, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(given, want), "in place"
            strided = torch.zeros(*shape, 2, dtype=dtype)[..., 0]
            dist.all_to_all_single(strided, x, group=group)
            assert torch.equal(strided, want)
    assert set(taken(group)) == {("all_to_all_single", "weft")}
    x = torch.arange(3.0) + 10 * rank
    out = torch.zeros(2 + 2 * rank)
    dist.all_to_all_single(out, x, [1 + rank] * 2, [1, 2], group=group)
    assert out.tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
    large = torch.full((group_calls.MOST_BYTES // 4 + 2,), float(rank))
    dist.all_to_all_single(torch.empty_like(large), large, group=group)
    with pytest.raises(RuntimeError):
        dist.all_to_all_single(torch.empty(4), torch.ones(2), group=group)
    whys = {call.why for call in weft.process_group(group).calls() if call.by == "gloo"}
    assert whys == {"split sizes are given", "more than 64 MiB", "arguments that do not fit each other"}


def test_all_to_alls_of_even_parts() -> None:
    run_ranks(exchanges, 2)


def in_batches(rank: int, world_size: int) -> None:
    """A send sees the batch that it is of: NCCL must get a batch as one."""
    group, seen, other = weft_group(), [], 1 - rank
    x, y = torch.full((3,), float(rank)), torch.empty(3)

    def leave(*_: object) -> None:  # called by the method that send and recv call
        seen.append(operations_of_batch(sys._getframe(2)))

    batch = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, y, other, group)]
    with mock.patch.object(group.record, "count_left", leave):
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        single = [dist.isend(x, other, group=group), dist.irecv(y, other, group=group)]
        for work in single:
            assert work is not None
            work.wait()
    assert [of is batch for of in seen] == [True, True, False, False] and seen[2:] == [None, None]
    assert y.tolist() == [float(other)] * 3


def test_batches_of_sends() -> None:
    run_ranks(in_batches, 2)


class Inside:
    """A group that takes a batch as one, and notes what it is asked for."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: list[Any] = []
        self.fails = fails

    def _start_coalescing(self, device: torch.device) -> None:
        self.seen.append(device)

    def _end_coalescing(self, device: torch.device) -> str:
        self.seen.append("end")
        return "work"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        if self.fails:
            raise RuntimeError("refused")
        self.seen.append(("send", tensors[0].shape, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.seen.append(("recv", tensors[0].shape, peer, tag))


@on_ranks(2)
def test_a_batch_is_sent_at_its_first_operation(rank: int, world_size: int) -> None:
    x, y, elsewhere = torch.ones(3, dtype=torch.complex64), torch.ones(4), torch.ones(2, device="meta")
    batch = [dist.P2POp(dist.isend, x, 1, tag=7), dist.P2POp(dist.irecv, y, 0)]
    others = [dist.P2POp(dist.isend, elsewhere, 1)]
    inside: Any = Inside()
    assert send_as_one(inside, batch + others, x.device) == ["work"] * 2
    assert inside.seen == [x.device, ("send", (3, 2), 1, 7), ("recv", (4,), 0, 0), "end"]
    # None is left out for another GPU: NCCL refuses it, and else its sender would be told that it is sent.
    on_gpus = [
        SimpleNamespace(device=torch.device("cuda", i), shape=(i,), is_complex=lambda: False) for i in (0, 1)
    ]
    apart: Any = [SimpleNamespace(op=dist.isend, tensor=x, group_peer=1, tag=0) for x in on_gpus]
    inside = Inside()
    assert send_as_one(inside, apart, on_gpus[0].device) == ["work"] * 2
    assert inside.seen[1:] == [("send", (0,), 1, 0), ("send", (1,), 1, 0), "end"]
    inside = Inside(fails=True)
    with pytest.raises(RuntimeError, match="refused"):
        send_as_one(inside, batch, x.device)
    assert inside.seen == [x.device, "end"], "nothing that follows is taken for a part of it"


@on_ranks(2)
def test_weft_ops_in_it(rank: int, world_size: int) -> None:
    """weft's own ops and memory in such a group, beside its collectives."""
    group = weft_group()
    x = symm_mem.empty(4, group=group)
    peers = symm_mem.rendezvous(x)
    peers.tensors[1 - rank].fill_(rank)
    peers.barrier()
    assert x.tolist() == [1 - rank] * 4
    work = dist.all_reduce(x, group=group, async_op=True)  # on another thread
    a, b = torch.randn(4, 6), torch.randn(6, 2)
    _, (y,) = weft.fused_all_gather_matmul(a, [b], 0, group)
    close("fused", y, torch.cat(gather(a)) @ b.double(), 1e-6)
    work.wait()
    assert x.tolist() == [1] * 4
    assert weft.last_plan().algorithm == "host"
    assert symm_mem.stats(group).by_purpose


@on_ranks(2)
def test_a_profiler_sees_its_calls(rank: int, world_size: int) -> None:
    group, x = weft_group(), torch.ones(3)
    with torch.profiler.profile() as profile:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.broadcast(x, 0, group=group)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["weft:all_reduce"] == 2 and counts["gloo:broadcast"] == 1, counts


def by_name(rank: int, size: int) -> list[list[float]]:
    group = dist.new_group(backend="weft")
    x, both, part = torch.full((1,), float(rank)), torch.empty(size), torch.empty(1)
    group._allgather_base(output=both, input=x).wait()
    group._reduce_scatter_base(part, inputTensor=both).wait()
    with pytest.raises(TypeError, match="takes output, input and opts, not input, opt"):
        group._allgather_base(both, input=x, opt=None)
    return [both.tolist(), part.tolist()]


def test_tensors_by_the_names_that_torch_has() -> None:
    assert run_ranks(by_name, 2) == [[[0.0, 1.0], [0.0]], [[0.0, 1.0], [2.0]]]
