"""What the gathered A costs, and what a reduce-scatter's further terms do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accuracy import of_products
from measure import timed
from parts import Bench, summed
from registry import CPU_SCALE
from suite import Run, Suite, numbers
from timer import Call, Schedule
from torch import Tensor
from weft.fused_ops import fused_all_gather_matmul

# K, and the columns of the whole Bs.
GATHERS = {
    "qkv": (4096, (6144,)),
    "q, k, v": (4096, (4096, 1024, 1024)),
    "up, gate": (4096, (14336, 14336)),
    "of o": (4096, (4096,)),
    "of down": (4096, (14336,)),
}
# Of the whole layer, K of each product, and the columns.
SUMS = {"of q, k, v": ((4096, 1024, 1024), 4096), "of up, gate": ((14336, 14336), 4096)}
TERMS = {"o": (4096, 4096), "down": (14336, 4096)}  # K and columns of the whole product
SETS, BF16 = 2, torch.bfloat16


def _random(run: Run, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, device=run.device, dtype=BF16) for _ in range(SETS)]


def _gathers(m: int, k: int, ns: tuple[int, ...], run: Run) -> Bench:
    shards = _random(run, m // run.world, k)
    columns = [[b.t() / k**0.5 for b in _random(run, n // run.world, k)] for n in ns]
    weights = [list(bs) for bs in zip(*columns, strict=True)]
    whole = torch.empty(m, k, device=run.device, dtype=BF16)
    dist.all_gather_into_tensor(whole, shards[0])
    A, _ = fused_all_gather_matmul(shards[0], weights[0], 0, None)
    if A is None or not torch.equal(A, whole):
        raise RuntimeError("A is not what was gathered")
    wide = whole.double()
    products = [wide @ w.double() for w in weights[0]]

    def unfused(i: int) -> Sequence[Tensor]:
        dist.all_gather_into_tensor(whole, shards[i])
        return product(i)

    def product(i: int) -> Sequence[Tensor]:
        return [whole @ w for w in weights[i]]

    def fused(return_A: bool) -> Call:
        return lambda i: fused_all_gather_matmul(shards[i], weights[i], 0, None, return_A=return_A)[1]

    calls = {"without A": fused(False), "with A": fused(True), "unfused": unfused, "product": product}
    return Bench(calls, [of_products(p, p.abs(), 1, BF16) for p in products], SETS)


def _sums(m: int, ks: tuple[int, ...], n: int, run: Run) -> Bench:
    lefts = [_random(run, m, k // run.world) for k in ks]
    rights = [[b / sum(ks) ** 0.5 for b in _random(run, k // run.world, n)] for k in ks]
    op, group = torch.ops.weft.fused_matmul_reduce_scatter, run.group.group_name
    total = sum(a[0].double() @ b[0].double() for a, b in zip(lefts, rights, strict=True))
    sums, terms = (whole.chunk(run.world)[run.rank].clone() for whole in summed(total))

    def as_they_lie(i: int) -> Sequence[Tensor]:
        A, B, *more = (x[i] for pair in zip(lefts, rights, strict=True) for x in pair)
        return [op(A, B, "sum", 0, group, more=more)]

    def stacked(i: int) -> Sequence[Tensor]:
        A, B = torch.cat([a[i] for a in lefts], 1), torch.cat([b[i] for b in rights])
        return [op(A, B, "sum", 0, group)]

    calls: dict[str, Call] = {"as they lie": as_they_lie, "stacked": stacked}
    return Bench(calls, [of_products(sums, terms, run.world, BF16)], SETS)


def _terms(m: int, k: int, n: int, run: Run) -> Bench:
    As, Bs = _random(run, m, k // run.world), [b.t() / k**0.5 for b in _random(run, n, k // run.world)]
    biases, residuals = _random(run, n), _random(run, m // run.world, n)
    op, group = torch.ops.weft.fused_matmul_reduce_scatter, run.group.group_name
    sums, terms = (
        whole.chunk(run.world)[run.rank].clone() for whole in summed(As[0].double() @ Bs[0].double())
    )

    def scattered(i: int, **named: Tensor) -> Tensor:
        return op(As[i], Bs[i], "sum", 0, group, **named)  # type: ignore[no-any-return]

    added: dict[str, Any] = {"bare": 0.0, "bias": biases[0].double(), "residual": residuals[0].double()}
    added["added by torch"] = added["residual"]
    expected = {
        name: [of_products(sums + x, terms + abs(x), run.world + 1, BF16)] for name, x in added.items()
    }
    calls: dict[str, Call] = {
        "bare": lambda i: [scattered(i)],
        "bias": lambda i: [scattered(i, bias=biases[i])],
        "residual": lambda i: [scattered(i, residual=residuals[i])],
        "added by torch": lambda i: [scattered(i) + residuals[i]],
    }
    return Bench(calls, expected, SETS)


Made = Callable[[Run], Bench]


class GatheredA(Suite):
    """All-gather + matmul with the gathered A and without it, beside what is unfused and the matmul alone.

    Products of Llama 8B blocks, those of the forward and those of the backward. Microseconds of a call, medians of
    rounds in turn, the slowest rank's. A must be bit for bit what was gathered. After them sums of products +
    reduce-scatter, as in the backward: of factors where they lie, and of factors that are put side by side for it; and
    matmul + reduce-scatter with a bias and a residual, or with the residual added by torch.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        sizes = (1024, 2048, 4096, 8192)
        parser.add_argument("--m-sizes", type=numbers, default=sizes, help="rows of all ranks, by commas")
        parser.add_argument("--mode", choices=("graph", "eager"), help="default: graph, of CPU ranks eager")

    def rows(self, given: argparse.Namespace) -> list[tuple[str, int, str, Made]]:
        scale = CPU_SCALE if given.device == "cpu" else 1

        def smaller(size: Any) -> Any:
            return size // scale if isinstance(size, int) else tuple(n // scale for n in size)

        parts: list[tuple[str, Callable[..., Bench], dict[str, Any]]] = [
            ("products", _gathers, GATHERS),
            ("sum of", _sums, SUMS),
            ("scattered", _terms, TERMS),
        ]
        return [
            (kind, m, name, partial(made, m, *map(smaller, sizes)))
            for kind, made, layers in parts
            for m in given.m_sizes
            for name, sizes in layers.items()
        ]

    def begin(self, run: Run) -> None:
        self._head = ""

    def measure(self, row: tuple[str, int, str, Made], run: Run) -> None:
        kind, m, name, made = row
        bench = made(run)
        found = timed(bench, Schedule(10, cycles=2), run.given.mode or run.mode, run.device)
        run.wrong |= bool(found.problems)
        if kind != self._head:
            self._head = kind
            costs = "A costs" if kind == "products" else ""
            run.say(f"{'M':>6} {kind:12}" + "".join(f"{c:>16}" for c in bench.calls) + f"{costs:>9}")
        cost, us = "", found.medians
        if kind == "products" and {"with A", "without A"} <= set(us):
            cost = f"{us['with A'] / us['without A'] - 1:9.1%}"
        run.say(f"{m:6} {name:12}{found.cells(list(bench.calls), 16)}{cost}", *found.problems)


SUITE = GatheredA()
