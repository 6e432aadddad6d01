"""The contenders of the collectives without a product; contenders.py says who is who.

"torch" is torch's reduce-scatter of symmetric memory, "torch copies" the one of both ops that pulls with copy engines,
eager alone. A row's M x N is the whole tensor, of which each rank has a part; of M = 1 the first dimension is cut, else
the last one. Of all-to-alls it is x; parts of the last dimension are joined along the first one, as heads are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from accuracy import Expected, of_sums
from parts import Bench, after_producer, divisible, has_torch_symm, random_tensor, summed, symmetric
from registry import Row
from timer import Call
from torch import Tensor
from weft.fused_ops import one_shot_all_gather, one_shot_all_to_all, one_shot_reduce_scatter


def _waited(call: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
    return lambda: (torch.ops._c10d_functional.wait_tensor(call()),)


def all_gather_contenders(row: Row, group: str, device: torch.device) -> Bench:
    world = dist.get_world_size()
    last, n = row.M > 1, divisible(row.N, world, "N", row)
    source = random_tensor((row.M, n) if last else (n,), row.dtype, device)
    plain, parts = torch.empty_like(source), source.new_empty(world, *source.shape)
    dist.all_gather_into_tensor(parts.view(-1), source.view(-1))
    gathered = parts.movedim(0, -2).reshape(*source.shape[:-1], row.N).double()
    expected = Expected(gathered, torch.zeros_like(gathered))

    def unfused() -> Sequence[Tensor]:
        stacked = plain.new_empty(world, *plain.shape)
        dist.all_gather_into_tensor(stacked.view(-1), plain.view(-1))
        return (stacked.movedim(0, -2).reshape(*plain.shape[:-1], row.N),)

    calls: dict[str, Call] = {
        "weft": after_producer(plain, source, lambda: (one_shot_all_gather(plain, -1, group),)),
        "unfused": after_producer(plain, source, unfused),
        "producer": after_producer(plain, source, lambda: (plain,)),
    }
    if has_torch_symm(group, device) and row.mode == "eager" and not last:
        there, pull = symmetric(source, group), torch.ops.symm_mem._low_contention_all_gather
        calls["torch copies"] = after_producer(there, source, _waited(lambda: pull(there, group)))
    return Bench(calls, [expected], 1, 0.0, (world - 1) * source.nbytes)


def reduce_scatter_contenders(row: Row, group: str, device: torch.device) -> Bench:
    world, rank = dist.get_world_size(), dist.get_rank()
    last, n = row.M > 1, divisible(row.N, world, "N", row)
    source = random_tensor((row.M, row.N) if last else (row.N,), row.dtype, device)
    sums, terms = (whole.chunk(world, -1)[rank].clone() for whole in summed(source))
    expected = of_sums(sums, terms, max(1, world - 1), row.dtype)
    plain = torch.empty_like(source)

    def unfused() -> Sequence[Tensor]:
        out = plain.new_empty(*plain.shape[:-1], n)
        parts = plain.unflatten(-1, (world, n)).movedim(-2, 0).contiguous()
        dist.reduce_scatter_tensor(out.view(-1), parts.view(-1))
        return (out,)

    calls: dict[str, Call] = {
        "weft": after_producer(plain, source, lambda: (one_shot_reduce_scatter(plain, "sum", -1, group),)),
        "unfused": after_producer(plain, source, unfused),
        "producer": after_producer(plain, source, lambda: (plain,)),
    }
    if has_torch_symm(group, device):
        there, ops = symmetric(source, group), torch.ops.symm_mem

        def kernel() -> Sequence[Tensor]:
            out = there.new_empty(*there.shape[:-1], n)
            ops.reduce_scatter_out(there, group, last, out)
            return (out,)

        calls["torch"] = after_producer(there, source, kernel)
        if row.mode == "eager" and not last:
            pull = ops._low_contention_reduce_scatter
            calls["torch copies"] = after_producer(there, source, _waited(lambda: pull(there, "sum", group)))
    return Bench(calls, [expected], 1, 0.0, (world - 1) / world * source.nbytes)


def all_to_all_contenders(row: Row, group: str, device: torch.device) -> Bench:
    world, rank = dist.get_world_size(), dist.get_rank()
    last, n = row.M > 1, divisible(row.N, world, "N", row)
    source = random_tensor((row.M, row.N) if last else (row.N,), row.dtype, device)
    plain, every = torch.empty_like(source), source.new_empty(world, *source.shape)
    dist.all_gather_into_tensor(every.view(-1), source.view(-1))
    exchanged = torch.cat([x.chunk(world, -1)[rank] for x in every]).double()

    def unfused() -> Sequence[Tensor]:
        parts = plain.unflatten(-1, (world, n)).movedim(-2, 0).contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts)
        return (out.flatten(0, 1),)

    calls: dict[str, Call] = {
        "weft": after_producer(plain, source, lambda: (one_shot_all_to_all(plain, -1, 0, group),)),
        "unfused": after_producer(plain, source, unfused),
        "producer": after_producer(plain, source, lambda: (plain,)),
    }
    expected = Expected(exchanged, torch.zeros_like(exchanged))
    return Bench(calls, [expected], 1, 0.0, (world - 1) / world * source.nbytes)
