"""The scaled ops, fp8 operands and bf16 results, beside others: all-gather + matmul and matmul + reduce-scatter.

torchrun --nproc-per-node 2 bench/scaled_matmuls.py
torchrun --nproc-per-node 2 bench/scaled_matmuls.py --m-sizes 1024,4096 --scalings rows,blocks --mode eager
torchrun --nproc-per-node 2 bench/scaled_matmuls.py --kernels  # weft's kernels alone, beside each other

A row is one of the ops, a layer, M, and how operands are scaled: microseconds of the slowest rank, the median of the
rounds. scaled_contenders.py says who is who. Beside them the error of weft's results against float64 as a multiple of
that of the collective's, where that is of the same function. Between CPU ranks, to try it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from scaled_contenders import (
    Contenders,
    gather_contenders,
    random_operands,
    scatter_contenders,
    torch_multiplies,
)
from timer import Schedule, Series, order, over_ranks, same_head_start
from torch import Tensor
from weft import fused_ops
from weft.fused_ops.dispatch.plan import forced

LAYERS = {  # K and N of the whole product
    "gather": {"8b.qkv": (4096, 6144), "8b.upgate": (4096, 28672), "70b.upgate": (8192, 57344)},
    "scatter": {"8b.o": (4096, 4096), "8b.down": (14336, 4096), "70b.down": (28672, 8192)},
}
SMALL = {"gather": {"small": (256, 96)}, "scatter": {"small": (256, 96)}}
ROUNDS = 10
KERNELS = ("push", "one_shot", "copy_engine")


def _kernels(weft: Callable[[], Tensor]) -> Contenders:
    """What overlaps, and what sends around torch's product; who takes no such call runs another of them."""

    def call(algorithm: str) -> Tensor:
        with forced(algorithm):
            return weft()

    return {name: lambda name=name: call(name) for name in KERNELS}  # type: ignore[misc]


def _error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def measure_scaled(
    op: str, sizes: tuple[int, int, int], scaling: str, mode: str, device: torch.device, *, kernels: bool
) -> str:
    """A line of the table."""
    (m, k, n), size = sizes, dist.get_world_size()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    if op == "gather":
        found, want = gather_contenders(
            random_operands(m // size, k, n // size, scaling, device), scaling, name
        )
    else:
        found, want = scatter_contenders(random_operands(m, k // size, n, scaling, device), scaling, name)
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
    same = torch_multiplies(scaling, m, device)
    ratio = f"{mine / theirs:.2f}" if same else ""
    return f"| {' | '.join([*shown, algorithm, ratio])} |"


def _columns(kernels: bool) -> tuple[str, ...]:
    return KERNELS if kernels else ("mm", "collective", "torch", "weft", "exact", "bf16")


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
