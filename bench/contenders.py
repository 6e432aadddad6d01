"""Who is measured against whom: for each op a table name -> call, and the right results of set 0.

weft       the public ops
unfused    NCCL and cuBLAS; between CPU ranks gloo and torch.mm
torch...   torch.ops.symm_mem as it is, and with its other algorithms where they apply (CUDA only)
product    the same matrix product without communication: a term of the limit
producer   collectives alone and the norm: the kernel that writes the input before every call; its time is subtracted

All contenders of a row get the same random inputs: of products several sets, so that no cache holds them all; of an
all-reduce and the norm one, which the producer has just written, as in a model, so that a cache may hold it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from accuracy import of_products, of_sums
from parts import Bench, after_producer, divisible, has_torch_symm, random_tensor, sets_of, summed, symmetric
from reductions import all_reduce_norm_contenders, matmul_all_reduce_contenders
from registry import LAST_DIMENSION, SPLITS, Row
from scaled_contenders import all_gather_scaled_matmul_contenders, scaled_matmul_reduce_scatter_contenders
from stand_alone import all_gather_contenders, all_to_all_contenders, reduce_scatter_contenders
from timer import Call
from torch import Tensor
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, one_shot_all_reduce

# What a GPU sends, and so receives, at most: 362 by stores, 374 by a copy engine (results/h200-x4-links.txt).
LINK_BYTES_PER_US = 364e3
NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"


def _with_native(call: Call) -> Call:
    def native(i: int) -> Sequence[Tensor]:
        os.environ[NATIVE] = "1"
        try:
            return call(i)
        finally:
            del os.environ[NATIVE]

    return native


def all_gather_matmul_contenders(row: Row, group: str, device: torch.device) -> Bench:
    assert row.K is not None
    world = dist.get_world_size()
    last = row.name in LAST_DIMENSION
    m, k, n = row.M, row.K, divisible(row.N, world, "N", row)
    if last:
        k = divisible(k, world, "K", row)
    else:
        m = divisible(m, world, "M", row)
    size = row.dtype.itemsize
    sets = sets_of((m * k + row.K * n) * size, device)
    shards = [random_tensor((m, k), row.dtype, device) for _ in range(sets)]
    split = SPLITS.get(row.name, (1,))
    columns = [n * share // sum(split) for share in split]
    weights = [
        [random_tensor((row.K, c), row.dtype, device) / math.sqrt(row.K) for c in columns]
        for _ in range(sets)
    ]
    stacked = torch.empty(world * m, k, dtype=row.dtype, device=device)
    gathered = torch.empty(row.M, row.K, dtype=row.dtype, device=device) if last else stacked

    def gather(i: int) -> None:
        dist.all_gather_into_tensor(stacked, shards[i])
        if last:
            gathered.view(m, world, k).copy_(stacked.view(world, m, k).movedim(0, 1))

    gather(0)
    A = gathered.double()
    references = [A @ w.double() for w in weights[0]]
    del A

    def weft(i: int) -> Sequence[Tensor]:
        return fused_all_gather_matmul(shards[i], weights[i], int(last), group, return_A=False)[1]

    def unfused(i: int) -> Sequence[Tensor]:
        gather(i)
        return product(i)

    def product(i: int) -> Sequence[Tensor]:
        return [torch.mm(gathered, w) for w in weights[i]]

    def torch_(i: int) -> Sequence[Tensor]:
        dim = int(last)
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(
            shards[i], weights[i], dim, group, return_A=False
        )
        return products

    calls: dict[str, Call] = {"weft": weft, "unfused": unfused, "product": product}
    if has_torch_symm(group, device):
        calls["torch"] = torch_
        # The condition of torch's own check, and of the kernel that it guards.
        if (
            not last
            and 2048 < row.M <= 4096
            and m % world == 0
            and (m // world) % 128 == 0
            and row.dtype == torch.bfloat16
        ):
            calls["torch native"] = _with_native(torch_)
    expected = [of_products(reference, reference.abs(), 1, row.dtype) for reference in references]
    return Bench(calls, expected, sets, 2.0 * row.M * row.K * n, (world - 1) * m * k * size)


def matmul_reduce_scatter_contenders(row: Row, group: str, device: torch.device) -> Bench:
    assert row.K is not None
    world, rank = dist.get_world_size(), dist.get_rank()
    last = row.name in LAST_DIMENSION
    dim, k = int(last), divisible(row.K, world, "K", row)
    m = row.M if last else divisible(row.M, world, "M", row)
    n = divisible(row.N, world, "N", row) if last else row.N
    size = row.dtype.itemsize
    sets = sets_of((row.M * k + k * row.N) * size, device)
    lefts = [random_tensor((row.M, k), row.dtype, device) for _ in range(sets)]
    weights = [random_tensor((k, row.N), row.dtype, device) / math.sqrt(row.K) for _ in range(sets)]
    sums, terms = (
        whole.chunk(world, dim)[rank].clone() for whole in summed(lefts[0].double() @ weights[0].double())
    )

    def weft(i: int) -> Sequence[Tensor]:
        return (fused_matmul_reduce_scatter(lefts[i], weights[i], "sum", dim, group),)

    def unfused(i: int) -> Sequence[Tensor]:
        out = torch.empty(m, n, dtype=row.dtype, device=device)
        partial = torch.mm(lefts[i], weights[i])
        if last:
            partial = partial.unflatten(1, (world, n)).movedim(1, 0).flatten(0, 1)
        dist.reduce_scatter_tensor(out, partial)
        return (out,)

    def product(i: int) -> Sequence[Tensor]:
        return (torch.mm(lefts[i], weights[i]),)

    def torch_(i: int) -> Sequence[Tensor]:
        return (torch.ops.symm_mem.fused_matmul_reduce_scatter(lefts[i], weights[i], "sum", dim, group),)

    calls: dict[str, Call] = {"weft": weft, "unfused": unfused, "product": product}
    if has_torch_symm(group, device):
        calls["torch"] = torch_
    # A product's rounding, and one at each hop of a ring.
    expected = of_products(sums, terms, world, row.dtype)
    return Bench(calls, [expected], sets, 2.0 * row.M * k * row.N, (world - 1) * m * n * size)


def all_reduce_contenders(row: Row, group: str, device: torch.device) -> Bench:
    world = dist.get_world_size()
    source = random_tensor((row.N,), row.dtype, device)
    expected = of_sums(*summed(source), max(1, world - 1), row.dtype)
    plain = torch.empty_like(source)

    def unfused() -> Sequence[Tensor]:
        dist.all_reduce(plain)
        return (plain,)

    calls = {
        "weft": after_producer(plain, source, lambda: (one_shot_all_reduce(plain, "sum", group),)),
        "unfused": after_producer(plain, source, unfused),
        "producer": after_producer(plain, source, lambda: (plain,)),
    }
    if has_torch_symm(group, device):
        there = symmetric(source, group)
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
        calls["torch"] = after_producer(there, source, lambda: (one(there, "sum", group),))
        calls["torch two-shot"] = after_producer(there, source, lambda: (two(there, "sum", group),))
    # Every rank has to receive its part from all others, and the other parts' sums.
    return Bench(calls, [expected], 1, 0.0, 2 * (world - 1) / world * row.N * row.dtype.itemsize)


TABLE: dict[str, Callable[[Row, str, torch.device], Bench]] = {
    "all_gather_matmul": all_gather_matmul_contenders,
    "matmul_reduce_scatter": matmul_reduce_scatter_contenders,
    "all_gather": all_gather_contenders,
    "reduce_scatter": reduce_scatter_contenders,
    "all_to_all": all_to_all_contenders,
    "all_reduce": all_reduce_contenders,
    "all_reduce_rms_norm": all_reduce_norm_contenders,
    "all_reduce_layer_norm": all_reduce_norm_contenders,
    "matmul_all_reduce": matmul_all_reduce_contenders,
    "all_gather_scaled_matmul": all_gather_scaled_matmul_contenders,
    "scaled_matmul_reduce_scatter": scaled_matmul_reduce_scatter_contenders,
}
