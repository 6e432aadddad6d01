"""The scaled ops beside others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from scaled_contenders import (
    Contenders,
    gather_contenders,
    random_operands,
    scatter_contenders,
    torch_multiplies,
)
from suite import Run, Suite, numbers, words
from timer import Schedule, Series, medians
from torch import Tensor
from weft import fused_ops
from weft.fused_ops.dispatch.plan import forced

LAYERS = {  # K and N of the whole product
    "gather": {"8b.qkv": (4096, 6144), "8b.upgate": (4096, 28672), "70b.upgate": (8192, 57344)},
    "scatter": {"8b.o": (4096, 4096), "8b.down": (14336, 4096), "70b.down": (28672, 8192)},
}
SMALL = {"gather": {"small": (256, 96)}, "scatter": {"small": (256, 96)}}
KERNELS = ("push", "one_shot", "copy_engine")
WAYS = ("mm", "collective", "torch", "weft", "exact", "bf16")


def _kernels(weft: Callable[[], Tensor]) -> Contenders:
    """What overlaps, and what sends around torch's product; who takes no such call runs another of them."""

    def call(algorithm: str) -> Tensor:
        with forced(algorithm):
            return weft()

    return {name: lambda name=name: call(name) for name in KERNELS}  # type: ignore[misc]


def _error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


class ScaledRow(NamedTuple):
    """One of the ops, a layer with K and N of the whole one, M, and how operands are scaled."""

    op: str
    layer: str
    size: tuple[int, int]
    m: int
    scaling: str


class Scaled(Suite):
    """The scaled ops, fp8 operands and bf16 results: all-gather + matmul and matmul + reduce-scatter.

    A row is one of the ops, a layer, M, and how operands are scaled: microseconds of the slowest rank, the median of
    the rounds. scaled_contenders.py says who is who. Beside them the error of weft's results against float64 as a
    multiple of that of the collective's, where that is of the same function. With --kernels weft's kernels.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--m-sizes", type=numbers, default=(512, 1024, 2048, 4096, 8192, 16384))
        parser.add_argument("--scalings", type=words, default=("tensor", "rows", "blocks"))
        parser.add_argument("--layers", type=words, default=("",), help="parts of their names")
        parser.add_argument("--mode", choices=("graph", "eager"), help="default: graph, of CPU ranks eager")
        parser.add_argument("--kernels", action="store_true", help="weft's, whichever is chosen")

    def rows(self, given: argparse.Namespace) -> list[ScaledRow]:
        return [
            ScaledRow(op, layer, size, m, scaling)
            for op, layers in (LAYERS if given.device == "cuda" else SMALL).items()
            for layer, size in layers.items()
            if any(part in layer for part in given.layers)
            for m in given.m_sizes
            for scaling in given.scalings
        ]

    def begin(self, run: Run) -> None:
        self._columns = KERNELS if run.given.kernels else WAYS
        run.say(f"| op | layer | M | scaling | {' | '.join(self._columns)} | algorithm | error |")
        run.say("|" + "---|" * (len(self._columns) + 6))

    def measure(self, row: ScaledRow, run: Run) -> None:
        name, (k, n), world, how = run.group.group_name, row.size, run.world, row.scaling
        if row.op == "gather":
            operands = random_operands(row.m // world, k, n // world, how, run.device)
            found, want = gather_contenders(operands, how, name)
        else:
            operands = random_operands(row.m, k // world, n, how, run.device)
            found, want = scatter_contenders(operands, how, name)
        if how == "blocks" or not run.on_gpus:
            del found["torch"]
        if how == "blocks":
            del found["exact"]  # as it is
        mine, theirs = (_error(found[who](), want) for who in ("weft", "collective"))
        algorithm = fused_ops.last_plan().algorithm
        if run.given.kernels:
            found = _kernels(found["weft"])
        plan = Schedule(10 if run.on_gpus else 2, cycles=2)
        mode = run.given.mode or run.mode
        series = {
            who: Series(lambda _, call=call: [call()], 1, plan, mode, run.device)  # type: ignore[misc]
            for who, call in found.items()
        }
        took = medians(series, plan.cycles, run.device)
        shown = [f"{took[who]:.1f}" if who in took else "" for who in self._columns]
        ratio = f"{mine / theirs:.2f}" if torch_multiplies(how, row.m, run.device) else ""
        labels = row.op, row.layer, str(row.m), how
        run.say(f"| {' | '.join([*labels, *shown, algorithm, ratio])} |")


SUITE = Scaled()
