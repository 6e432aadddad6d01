"""All-reduces on CUDA under stress: sizes, dtypes and forms at random, late ranks, eager calls between replays."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms import EVERY
from opcommon import assert_alike, check, gather, graph_of, spoil, world
from quantised import E4M3, E5M2, by_steps, same_bits
from ranks import on_ranks, run_ranks
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.all_reduce_rms_norm.reference import rms_norm
from weft.kernels.device.capability import why_no_kernel_on
from weft.kernels.device.comm import ll_exchange
from weft.kernels.matmul_all_reduce.configs import MOST_ROWS
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout

pytestmark = pytest.mark.gpu

CALLS = 10_000
MOST = 24 << 20  # elements


def late(delays: random.Random) -> None:
    """Hold this rank's stream up for up to a millisecond, now and then."""
    if delays.random() < 0.03:
        torch.cuda._sleep(delays.randrange(2_000_000))


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in float32 and in their order."""
    first, *others = (part.float() for part in gather(x))
    return sum(others, start=first)


class Pattern:
    """Inputs whose sums are small whole numbers, exact in every dtype, and other ones for every call and rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.numbers = (torch.arange(MOST + 64) % 13).to(torch.int8)

    def fill(self, x: torch.Tensor, call: int) -> None:
        x.copy_(self.numbers[call % 61 : call % 61 + x.numel()])
        x += self.rank + call % 3

    def wrong(self, out: torch.Tensor, call: int, reduce_op: str) -> torch.Tensor:
        """Elements that are wrong, still on the device."""
        own = self.numbers[call % 61 : call % 61 + out.numel()].to(out.dtype) + call % 3
        if reduce_op == "max":
            return (out != own + self.world_size - 1).sum()
        return (out != self.world_size * own + sum(range(self.world_size))).sum()


@on_ranks([2, 4], device="cuda", fresh=True)
def test_ten_thousand_calls(rank: int, world_size: int) -> None:
    order, delays = random.Random(0), random.Random(rank)
    pattern = Pattern(rank, world_size)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def size() -> int:
        # Mostly small, now and then so large that a launch uses its slots several times; whole vectors half the time.
        top = order.choices((1 << 12, 1 << 17, 1 << 21, MOST), (50, 35, 14, 1))[0]
        numel = order.randrange(MOST // 2 if top == MOST else 1, top)
        return numel if numel < 64 or order.random() < 0.5 else numel // 64 * 64

    def reduced(x: torch.Tensor, reduce_op: str) -> torch.Tensor:
        if order.random() < 0.5:
            return fused_ops.one_shot_all_reduce_(x, reduce_op, world())
        return fused_ops.one_shot_all_reduce(x, reduce_op, world())

    graphs = []
    for _ in range(12):
        inputs = [torch.empty(size(), dtype=order.choice(dtypes)) for _ in range(3)]
        ops = [order.choice(("sum", "max")) for _ in inputs]
        for x, reduce_op in zip(inputs, ops, strict=True):
            fused_ops.one_shot_all_reduce(x, reduce_op, world())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [reduced(x, reduce_op) for x, reduce_op in zip(inputs, ops, strict=True)]
        graphs.append((graph, inputs, outs, ops))

    wrong = torch.zeros((), dtype=torch.int64)
    call = 0
    while call < CALLS:
        late(delays)
        if order.random() < 0.4:
            graph, inputs, outs, ops = order.choice(graphs)
            for x in inputs:
                pattern.fill(x, call)
            late(delays)
            graph.replay()
            for out, reduce_op in zip(outs, ops, strict=True):
                wrong += pattern.wrong(out, call, reduce_op)
            call += len(outs)
        else:
            reduce_op, shift = order.choice(("sum", "max")), order.randrange(3)
            x = torch.empty(size() + shift, dtype=order.choice(dtypes))[shift:]
            pattern.fill(x, call)
            wrong += pattern.wrong(reduced(x, reduce_op), call, reduce_op)
            call += 1
        if order.random() < 0.005:
            assert wrong.item() == 0, f"{wrong.item()} wrong elements after {call} calls"
            symm_mem.check()
    assert wrong.item() == 0, f"{wrong.item()} wrong elements"
    symm_mem.check()


@on_ranks([2, 4], device="cuda")
def test_every_kernel_gives_the_same_bits(rank: int, world_size: int) -> None:
    """Every kernel gives the bits of a sum in float32, in rank order."""
    for numel in (100, 300_000, 3 << 20, 12 << 20, (12 << 20) + 3, 40 << 20, (40 << 20) + 1):
        x = torch.randn(numel).bfloat16()
        assert torch.equal(fused_ops.one_shot_all_reduce(x, "sum", world()), in_order(x).bfloat16())
        assert fused_ops.last_plan().algorithm == "push"


def fused(rank: int, world_size: int) -> None:
    order, delays = random.Random(1), random.Random(rank)
    graphs: list[tuple[torch.cuda.CUDAGraph, Callable[[], None]]] = []
    for step in range(120):
        late(delays)
        hidden = order.choice([64, 1000, 4096, 6144, 8192])
        rows = order.choice([1, 2, 5, 16, 37, 130, 400])
        x, residual = (torch.randn(rows, hidden).bfloat16() for _ in range(2))
        weight = torch.randn(hidden).to(order.choice([torch.bfloat16, torch.bfloat16, torch.float32]))
        offset, rounded = order.choice([0.0, 0.0, 1.0]), order.choice([True, True, False])
        added = None if order.random() < 0.2 else residual
        call = partial(fused_ops.fused_all_reduce_rms_norm, x, added, weight, 1e-6, world())
        call = partial(call, weight_offset=offset, round_sum=rounded)
        normed, sums = call()
        assert fused_ops.last_plan().algorithm == "push"
        total = in_order(x)
        assert torch.equal(sums, total.bfloat16() if added is None else total.bfloat16() + added)
        wide = sums.double() if rounded or added is None else total.bfloat16().double() + added.double()
        check("normed", normed, rms_norm(wide, weight.double(), 1e-6, offset), 4e-3)
        if step % 20 == 0:
            graph, again = graph_of(call, "thread_local")

            # A graph reads its inputs where they were captured: they are kept with it.
            def same(again=again, first=(normed, sums), inputs=call) -> None:
                assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))

            graphs.append((graph, same))
        for graph, same in graphs:
            graph.replay()
            same()


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce_rms_norm(world_size: int) -> None:
    run_ranks(fused, world_size, device="cuda")


@on_ranks([2, 4], device="cuda")
def test_all_reduce_rms_norm_quant(rank: int, world_size: int) -> None:
    """Beside the norms whose steps these are; unfused where no kernel of this kind runs."""
    reason = why_no_kernel_on("all_reduce_rms_norm_quant", torch.device("cuda", torch.cuda.current_device()))
    order, delays = random.Random(3), random.Random(rank)
    for step in range(40):  # nearly each compiles a kernel
        late(delays)
        hidden, rows = order.choice([64, 1000, 4096, 6144, 8192]), order.choice([1, 2, 5, 16, 37, 130, 400])
        dtype = order.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        x, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
        weight = torch.randn(hidden).to(order.choice([dtype, torch.float32]))
        x[0] = residual[0] = 0
        given = x, None if order.random() < 0.2 else residual, weight, 1e-6, world()
        norm: dict[str, Any] = {
            "weight_offset": order.choice([0.0, 1.0]),
            "round_sum": order.choice([True, False]),
        }
        scale_op, out_dtype = order.choice(["reciprocal", "divide", "multiply"]), order.choice([E4M3, E5M2])
        smallest = 1e-3
        scale = torch.rand(1) / 50 + 0.001 if order.random() < 0.5 else None
        quant = {"scale_op": scale_op, "out_dtype": out_dtype, "scale": scale}
        call = partial(fused_ops.fused_all_reduce_rms_norm_quant, *given, **norm, **quant)
        call = partial(call, smallest=None if scale is not None else smallest)
        numbers, scales, sums = call()
        assert fused_ops.last_plan().algorithm == ("push" if reason is None else "unfused")
        with nullcontext() if reason is None else forced("unfused"):
            normed, wanted = fused_ops.fused_all_reduce_rms_norm(*given, **norm)
        assert torch.equal(sums, wanted)
        steps = by_steps(normed, scale, out_dtype, scale_op, smallest)
        assert same_bits(numbers, steps[0]) and same_bits(scales, steps[1]), (dtype, quant)
        if step % 20 == 0:
            graph, again = graph_of(call, "thread_local")
            graph.replay()
            assert all(map(same_bits, again, (numbers, scales, sums)))


@on_ranks([2, 4], device="cuda")
def test_all_reduce_layer_norm(rank: int, world_size: int) -> None:
    """Beside RMSNorms, which have the same workspace."""
    order, delays = random.Random(2), random.Random(rank)
    for step in range(100):
        late(delays)
        hidden = order.choice([64, 1000, 4096, 6144, 8192])
        rows = order.choice([1, 2, 5, 16, 37, 130, 400, 1500])
        dtype = order.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        # The rows lie away from zero.
        x, residual = (torch.randn(rows, hidden).add(order.choice([0, 3])).to(dtype) for _ in range(2))
        columns = order.choice([dtype, torch.float32])
        weight, bias = (torch.randn(hidden).to(columns) if order.random() < 0.8 else None for _ in range(2))
        added = None if order.random() < 0.2 else residual
        call = partial(fused_ops.fused_all_reduce_layer_norm, x, added, weight, bias, 1e-5, world())
        normed, sums = call()
        assert fused_ops.last_plan().algorithm == "push"
        total = in_order(x)
        assert torch.equal(sums, total.to(dtype) if added is None else total.to(dtype) + added)
        check("normed", normed, rms_norm(sums.double(), weight, 1e-5, 0.0, bias, subtract_mean=True), 4e-3)
        assert all(map(torch.equal, call(), (normed, sums))), "other bits in another run"
        if step % 20 == 0:
            fused_ops.fused_all_reduce_rms_norm(x, added, residual[0], 1e-6, world())
            graph, again = graph_of(call, "thread_local")
            for _ in range(3):
                graph.replay()
                assert all(map(torch.equal, again, (normed, sums)))


def chain(x: torch.Tensor, steps: list[str], rank: int, world_size: int) -> torch.Tensor:
    """From ones on each step multiplies by a power of two, exact in any dtype: whoever looks too early sees another."""
    x, weight, zeros = torch.ones_like(x), x.new_ones(x.shape[1]), torch.zeros_like(x)
    for step in steps:
        if step == "sum":
            fused_ops.one_shot_all_reduce_(x, "sum", world())
        elif step == "norm":
            normed, x = fused_ops.fused_all_reduce_rms_norm(x, zeros, weight, 0.0, world())
            x = x * fused_ops.one_shot_all_reduce_(normed, "max", world())  # ones
        else:
            x.mul_(1.0 if rank == 0 else 0.5)
            fused_ops.one_shot_all_reduce_(x, "max", world())
    return x


@on_ranks([2, pytest.param(4, marks=pytest.mark.gpu(4))], device="cuda", env={"WEFT_PDL": "1"}, fresh=True)
def test_launched_while_the_kernel_before_still_runs(rank: int, world_size: int) -> None:
    assert ll_exchange.dependent()
    order, delays = random.Random(3), random.Random(rank)
    for rows, hidden in ((1, 4096), (7, 6144), (64, 8192), (300, 4096)):
        x = torch.empty(rows, hidden).bfloat16()
        # So few that the squares of what four ranks make are float32 numbers.
        steps = [order.choice(("sum", "sum", "norm", "plain")) for _ in range(80 // world_size)]
        want = float(world_size) ** sum(step != "plain" for step in steps)
        for _ in range(20):
            late(delays)
            assert (chain(x, steps, rank, world_size) == want).all()
        graph, out = graph_of(partial(chain, x, steps, rank, world_size), "thread_local")
        for _ in range(20):
            late(delays)
            out.fill_(float("nan"))
            graph.replay()
            assert (out == want).all()
    symm_mem.check()


@on_ranks([2, 4], device="cuda")
def test_matmul_all_reduce(rank: int, world_size: int) -> None:
    chosen = [(1, 512, 4096), (17, 512, 4096), (300, 1024, 4096), (4096, 2048, 4096), (5000, 1024, 8192)]
    in_one_kernel = [
        (1, 64, 8),
        (3, 200, 72),
        (8, 2048, 4096),
        (11, 1000, 4104),
        (16, 1032, 8192),
        (9, 8, 40),
    ]
    in_one_kernel += [(131, 264, 1000), (777, 4104, 2056), (4096, 2048, 4096)]
    for way, sizes in ((nullcontext(), chosen), (forced("fused"), in_one_kernel)):
        with way:
            for size in sizes:
                for dtype, reduce_op in ((torch.bfloat16, "sum"), (torch.float16, "avg")):
                    multiplied(*size, dtype, reduce_op, one_kernel=sizes is in_one_kernel)


def multiplied(m: int, k: int, n: int, dtype: torch.dtype, reduce_op: str, *, one_kernel: bool) -> None:
    A, B = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype).t()
    if n % 64:
        B = B.contiguous()
    workspaces = [w for w in get_heap(world(), A.device).workspaces.values() if isinstance(w.layout, Layout)]
    torch.cuda.synchronize()
    dist.barrier()
    for workspace in workspaces:
        for buffer in (0, 1):
            spoil(workspace, buffer)
    torch.cuda.synchronize()
    dist.barrier()
    out = fused_ops.fused_matmul_all_reduce(A, B, reduce_op, world())
    if one_kernel:
        large = "push" if "push" in EVERY else "two_kernels"
        assert fused_ops.last_plan().algorithm == ("one_shot" if m <= MOST_ROWS else large), (m, k, n)
    parts = [(a @ b) for a, b in zip(gather(A), gather(B), strict=True)]
    scale = len(parts) if reduce_op == "avg" else 1
    check(f"{m} {k} {n} {dtype}", out, sum(parts) / scale, 4e-3, parts)
    assert_alike(out)
    graph, again = graph_of(
        partial(fused_ops.fused_matmul_all_reduce, A, B, reduce_op, world()), "thread_local"
    )
    for _ in range(3):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, out)
        assert torch.equal(fused_ops.fused_matmul_all_reduce(A, B, reduce_op, world()), out)
