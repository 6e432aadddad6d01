"""Who is measured against whom of the scaled ops, fp8 operands and bf16 results.

- mm: ``torch._scaled_mm`` of all rows alone; of blocks torch's product with such scales, where it has one (Hopper, CUDA
  12.9), else ``torch._scaled_mm`` with tensor-wise ones: no sum of its kind.
- collective: the group's own before it or after it; scales of rows and of blocks are gathered by one more.
- torch: ``torch.ops.symm_mem``'s op, on GPUs; it has no block-wise scales.
- weft, and exact: without fast accumulation; bf16: weft's op of what the operands stand for, in bfloat16.

With fast accumulation but for block-wise scales and where said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accuracy import of_products
from parts import Bench, divisible, sets_of
from registry import Row
from timer import Call
from torch import Tensor
from weft import fused_ops
from weft.kernels.device.gemm.scaling import ScaleKind, Scales, block_product, has_block_product

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

Contenders = dict[str, Callable[[], Tensor]]


class Operands(NamedTuple):
    """Of a rank: A and B with their scales, and what they stand for."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    meant_a: Tensor
    meant_b: Tensor


def random_operands(m: int, k: int, n: int, scaling: str, device: torch.device) -> Operands:
    a = torch.randn(m, k, device=device).to(E4M3)
    b = torch.randn(n, k, device=device).to(E4M3).t()
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    if scaling == "tensor":
        of_a, of_b = torch.full((), 0.5, device=device), torch.full((), 0.25, device=device)
        return Operands(a, b, of_a, of_b, a.double() * of_a, b.double() * of_b)
    if scaling == "rows":
        of_a, of_b = torch.rand(m, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5
        return Operands(a, b, of_a, of_b, a.double() * of_a, b.double() * of_b)
    of_a = (torch.rand(blocks_k, m, device=device) + 0.5).t()
    of_b = torch.rand(blocks_k, blocks_n, device=device) + 0.5
    every_b = of_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return Operands(
        a, b, of_a, of_b, a.double() * of_a.repeat_interleave(128, 1)[:, :k], b.double() * every_b
    )


def _all_gather(out: Tensor, x: Tensor) -> None:
    dist.all_gather_into_tensor(out.view(torch.uint8).flatten(), x.contiguous().view(torch.uint8).flatten())


def _scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=BF16, use_fast_accum=True)


def torch_multiplies(scaling: str, rows: int, device: torch.device) -> bool:
    """Whether torch has a product with such scales."""
    return scaling != "blocks" or has_block_product(rows, (E4M3, E4M3), device)


def _product(x: Operands, a: Tensor, of_a: Tensor, scaling: str) -> Tensor:
    """torch's own, of the function that weft computes, if it has one."""
    if scaling != "blocks":
        return _scaled_mm(a, x.b, of_a, x.b_scale)
    if not torch_multiplies(scaling, a.shape[0], a.device):
        one = of_a.new_ones(())
        return _scaled_mm(a, x.b, one, one)
    out = a.new_empty(a.shape[0], x.b.shape[1], dtype=BF16)
    return block_product(a, x.b, Scales(ScaleKind.BLOCKS, of_a, x.b_scale), None, out)


def gather_contenders(x: Operands, scaling: str, group: str) -> tuple[Contenders, Tensor]:
    """And what all of them shall give, in float64."""
    size = dist.get_world_size()
    (m, k), n = x.a.shape, x.b.shape[1]
    whole = x.a.new_empty(size * m, k)
    # Rows are contiguous, as in the shard's.
    of_ranks = x.a_scale.new_ones(size, x.a_scale.shape[-1], m) if scaling != "tensor" else x.a_scale

    def scales() -> Tensor:
        if scaling == "tensor":
            return x.a_scale
        if scaling == "rows":
            return of_ranks.view(-1, 1)
        return of_ranks.movedim(0, 1).reshape(-1, size * m).t()

    def collective() -> Tensor:
        _all_gather(whole, x.a)
        if scaling != "tensor":
            _all_gather(of_ranks, x.a_scale.t())
        return _product(x, whole, scales(), scaling)

    ready = scales()

    def weft(fast: bool) -> Callable[[], Tensor]:
        def call() -> Tensor:
            _, (y,) = fused_ops.fused_all_gather_scaled_matmul(
                *(x.a, [x.b], x.a_scale, [x.b_scale], 0, group), use_fast_accum=[fast], return_A=False
            )
            return y

        return call

    def by_torch() -> Tensor:
        op = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        more = [None], [None], [BF16], [True]
        return op(x.a, [x.b], x.a_scale, [x.b_scale], 0, group, *more)[1][0]  # type: ignore[no-any-return]

    a16, b16 = x.meant_a.to(BF16), x.meant_b.to(BF16)
    found: Contenders = {
        "mm": lambda: _product(x, whole, ready, scaling),
        "collective": collective,
        "torch": by_torch,
        "weft": weft(True),
        "exact": weft(False),
        "bf16": lambda: fused_ops.fused_all_gather_matmul(a16, [b16], 0, group, return_A=False)[1][0],
    }
    gathered = x.meant_a.new_empty(size * m, k)
    dist.all_gather_into_tensor(gathered, x.meant_a)
    return found, (gathered @ x.meant_b).view(size * m, n)


def scatter_contenders(x: Operands, scaling: str, group: str) -> tuple[Contenders, Tensor]:
    """And what all of them shall give, in float64."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = [x.a.shape[0], x.b.shape[1]]
    args = x.a, x.b, x.a_scale, x.b_scale, "sum", 0

    def collective() -> Tensor:
        partial = _product(x, x.a, x.a_scale, scaling)
        out = partial.new_empty(shape[0] // size, shape[1])
        dist.reduce_scatter_tensor(out, partial)
        return out

    def weft(fast: bool) -> Callable[[], Tensor]:
        named: Any = {"out_dtype": BF16, "use_fast_accum": fast}
        return lambda: fused_ops.fused_scaled_matmul_reduce_scatter(*args, group, **named)

    def by_torch() -> Tensor:
        op = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        return op(*args, 0, group, [*shape], None, None, BF16, True)  # type: ignore[no-any-return]

    a16, b16 = x.meant_a.to(BF16), x.meant_b.to(BF16)
    found: Contenders = {
        "mm": lambda: _product(x, x.a, x.a_scale, scaling),
        "collective": collective,
        "torch": by_torch,
        "weft": weft(True),
        "exact": weft(False),
        "bf16": lambda: fused_ops.fused_matmul_reduce_scatter(a16, b16, "sum", 0, group),
    }
    total = x.meant_a @ x.meant_b
    dist.all_reduce(total)
    return found, total.chunk(size)[rank]


# How contenders are called in the tables of bench/run.py.
_NAMES = {"weft": "weft", "collective": "unfused", "torch": "torch", "bf16": "bf16", "mm": "product"}


def all_gather_scaled_matmul_contenders(row: Row, group: str, device: torch.device) -> Bench:
    assert row.K is not None
    world = dist.get_world_size()
    sizes = divisible(row.M, world, "M", row), row.K, divisible(row.N, world, "N", row)
    return _bench(row, sizes, device, lambda x, how: gather_contenders(x, how, group))


def scaled_matmul_reduce_scatter_contenders(row: Row, group: str, device: torch.device) -> Bench:
    assert row.K is not None
    world = dist.get_world_size()
    divisible(row.M, world, "M", row)
    sizes = row.M, divisible(row.K, world, "K", row), row.N
    return _bench(row, sizes, device, lambda x, how: scatter_contenders(x, how, group))


def _bench(
    row: Row,
    sizes: tuple[int, int, int],
    device: torch.device,
    contenders: Callable[[Operands, str], tuple[Contenders, Tensor]],
) -> Bench:
    (m, k, n), scaling, world = sizes, row.name.rpartition(".")[2], dist.get_world_size()
    sets = sets_of(m * k + k * n, device)
    made = [contenders(random_operands(m, k, n, scaling, device), scaling) for _ in range(sets)]
    _, want = made[0]
    there = dict(_NAMES)
    if device.type != "cuda" or scaling == "blocks":
        del there["torch"]
    if not torch_multiplies(scaling, row.M, device):
        del there["collective"]
    calls: dict[str, Call] = {
        called: lambda i, name=name: (made[i][0][name](),)  # type: ignore[misc]
        for name, called in there.items()
    }
    gathers = row.op == "all_gather_scaled_matmul"
    received = (world - 1) * m * k if gathers else (world - 1) * m // world * n * 2
    # Products' roundings, as of two partial ones; half of the time of 16 bits.
    expected = of_products(want, want.abs(), 1 if gathers else world, row.dtype)
    return Bench(calls, [expected], sets, float(row.M) * k * n, received)
