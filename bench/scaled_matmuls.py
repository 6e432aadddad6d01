"""The scaled ops, fp8 operands and bf16 results, beside others: all-gather + matmul and matmul + reduce-scatter.

torchrun --nproc-per-node 2 bench/scaled_matmuls.py
torchrun --nproc-per-node 2 bench/scaled_matmuls.py --m-sizes 1024,4096 --scalings rows,blocks --mode eager
torchrun --nproc-per-node 2 bench/scaled_matmuls.py --kernels  # weft's kernels alone, beside each other

A row is one of the ops, a layer, M, and how operands are scaled. Contenders, in microseconds of the slowest rank, the
median of the rounds:

- mm: ``torch._scaled_mm`` of all rows alone; of blocks torch's product with such scales, where it has one (Hopper, CUDA
  12.9), else ``torch._scaled_mm`` with tensor-wise ones: no sum of its kind.
- collective: the group's own in front of it or behind it; scales of rows and of blocks are gathered by one more.
- torch: ``torch.ops.symm_mem``'s op, on GPUs; it has no block-wise scales.
- weft, and exact: without fast accumulation; bf16: weft's op of bfloat16 operands of the same sizes.

With fast accumulation but for block-wise scales and where said. Beside it the error of weft's results against
float64 as a multiple of that of the collective's, where that is of the same function. Between CPU ranks, to try it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timer import Schedule, Series, order, over_ranks, same_head_start
from torch import Tensor
from weft import fused_ops
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.device.gemm.scaling import ScaleKind, Scales, block_product, has_block_product

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LAYERS = {  # K and N of the whole product
    "gather": {"8b.qkv": (4096, 6144), "8b.upgate": (4096, 28672), "70b.upgate": (8192, 57344)},
    "scatter": {"8b.o": (4096, 4096), "8b.down": (14336, 4096), "70b.down": (28672, 8192)},
}
SMALL = {"gather": {"small": (256, 96)}, "scatter": {"small": (256, 96)}}
ROUNDS = 10

Contenders = dict[str, Callable[[], Tensor]]


class Operands(NamedTuple):
    """Of a rank: A and B with their scales, and what they stand for."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    meant_a: Tensor
    meant_b: Tensor


def _operands(m: int, k: int, n: int, scaling: str, device: torch.device) -> Operands:
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


def _has_product(scaling: str, rows: int, device: torch.device) -> bool:
    """Whether torch has a product with such scales."""
    return scaling != "blocks" or has_block_product(rows, (E4M3, E4M3), device)


def _product(x: Operands, a: Tensor, of_a: Tensor, scaling: str) -> Tensor:
    """torch's own, of the function that weft computes, if it has one."""
    if scaling != "blocks":
        return _scaled_mm(a, x.b, of_a, x.b_scale)
    if not _has_product(scaling, a.shape[0], a.device):
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

    a16, b16 = x.a.to(BF16), x.b.to(BF16)
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
    args = x.a, x.b, x.a_scale, x.b_scale, "sum", 0, 0, group

    def collective() -> Tensor:
        partial = _product(x, x.a, x.a_scale, scaling)
        out = partial.new_empty(shape[0] // size, shape[1])
        dist.reduce_scatter_tensor(out, partial)
        return out

    def weft(fast: bool) -> Callable[[], Tensor]:
        return lambda: fused_ops.fused_scaled_matmul_reduce_scatter(*args, None, None, None, BF16, fast)

    def by_torch() -> Tensor:
        op = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        return op(*args, [*shape], None, None, BF16, True)  # type: ignore[no-any-return]

    a16, b16 = x.a.to(BF16), x.b.to(BF16)
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


def _kernels(weft: Callable[[], Tensor]) -> Contenders:
    """What overlaps, and what exchanges in one shot around torch's product."""

    def call(algorithm: str) -> Tensor:
        with forced(algorithm):
            return weft()

    return {"push": lambda: call("push"), "one_shot": lambda: call("one_shot")}


def _error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def measure_scaled(
    op: str, sizes: tuple[int, int, int], scaling: str, mode: str, device: torch.device, *, kernels: bool
) -> str:
    """A line of the table."""
    (m, k, n), size = sizes, dist.get_world_size()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    if op == "gather":
        found, want = gather_contenders(_operands(m // size, k, n // size, scaling, device), scaling, name)
    else:
        found, want = scatter_contenders(_operands(m, k // size, n, scaling, device), scaling, name)
    if scaling == "blocks" or device.type == "cpu":
        del found["torch"]
    if scaling == "blocks":
        del found["exact"]  # as it is
    mine, theirs = (_error(found[who](), want) for who in ("weft", "collective"))
    algorithm = fused_ops.last_plan().algorithm
    if kernels:
        found = _kernels(found["weft"])
    plan = Schedule(10 if device.type == "cuda" else 2)

    def result_of(call: Callable[[], Tensor]) -> Callable[[int], Sequence[Tensor]]:
        return lambda _: [call()]

    series = [Series(result_of(call), 1, plan, mode, device) for call in found.values()]
    same_head_start(series, device)
    rounds: list[list[float]] = [[] for _ in series]
    for number in range(ROUNDS):
        for i in order(len(series), number):
            rounds[i].append(series[i].time())
    took = {who: median(over_ranks(of, device)) for who, of in zip(found, rounds, strict=True)}
    shown = [f"{took[who]:.1f}" if who in took else "" for who in _columns(kernels)]
    same = _has_product(scaling, m, device)
    ratio = f"{mine / theirs:.2f}" if same else ""
    return f"| {' | '.join([*shown, algorithm, ratio])} |"


def _columns(kernels: bool) -> tuple[str, ...]:
    return ("push", "one_shot") if kernels else ("mm", "collective", "torch", "weft", "exact", "bf16")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m-sizes", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--scalings", default="tensor,rows,blocks")
    parser.add_argument("--layers", default="", help="parts of their names")
    parser.add_argument("--mode", default="graph", choices=["graph", "eager"])
    parser.add_argument("--kernels", action="store_true", help="weft's, whichever is chosen")
    given: Any = parser.parse_args(args)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    columns = _columns(given.kernels)
    say(f"| op | layer | M | scaling | {' | '.join(columns)} | algorithm | error |")
    say("|" + "---|" * (len(columns) + 6))
    for op, layers in (LAYERS if cuda else SMALL).items():
        for layer, (k, n) in layers.items():
            if given.layers and not any(part in layer for part in given.layers.split(",")):
                continue
            for m in map(int, given.m_sizes.split(",")):
                for scaling in given.scalings.split(","):
                    line = measure_scaled(op, (m, k, n), scaling, given.mode, device, kernels=given.kernels)
                    say(f"| {op} | {layer} | {m} | {scaling} {line}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
