"""An op of one rank on a GPU that stands for several."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from alone_gather import GatherProblem
from alone_rank import RankProblem, Trial
from alone_scatter import ScatterProblem
from contenders import LINK_BYTES_PER_US
from registry import LAST_DIMENSION, Row, select_rows
from suite import Run, Suite, numbers, words
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.workspace import Workspace

PROBLEMS: dict[str, type[RankProblem[Any]]] = {
    "all_gather_matmul": GatherProblem,
    "matmul_reduce_scatter": ScatterProblem,
}
CALLS, ROUNDS = 6, 9  # the first call of a round does not count
AHEAD = 1_500_000  # cycles, for which the device sleeps while the host launches a round


def _timed(
    prepare: Callable[[], None], call: Callable[[int], None], finish: Callable[[], None], sets: int
) -> float:
    """Microseconds of a call: the median of a round."""
    marks = []
    torch.cuda._sleep(AHEAD)
    for i in range(CALLS):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(i % sets)
        end.record()
        finish()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) * 1e3 for begin, end in marks[1:])


def _times(trial: Trial) -> list[float]:
    """Microseconds of the product, and of each candidate: medians of rounds in turn."""
    calls = [(lambda: None, trial.product, lambda: None)]
    calls += [(one.prepare, one.call, one.finish) for one in trial.candidates]
    series: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS):
        for i in ((turn + number) % len(calls) for turn in range(len(calls))):
            series[i].append(_timed(*calls[i], trial.sets))
    for one in trial.candidates:
        one.check()
    return [median(of_one) for of_one in series]


def _compare(trial: Trial, names: list[str]) -> None:
    expected = trial.expected()
    for one, what in zip(trial.candidates, names, strict=True):
        for out in trial.outs:
            out.fill_(float("nan"))
        one.prepare()
        one.call(0)
        one.finish()
        torch.cuda.synchronize()
        one.check()
        for out, want in zip(trial.outs, expected, strict=True):
            error = float((out.double() - want).norm() / want.norm())
            if not error < 0.004:  # of rounding to bfloat16: 0.002
                raise RuntimeError(f"{what}: relative error {error}")


class OneRank(Suite):
    """An op on one rank alone, on a GPU that stands for one of several: where there are too few of them.

    The ranks (--ranks 4) share one GPU, and rank 0 alone launches, with peers that do as it does: of all-gather +
    matmul a second kernel sets their flags (alone_gather.py, announce.cu), of matmul + reduce-scatter what rank 0 sends
    comes to lie where theirs would (alone_scatter.py). It goes to the same GPU's memory, at the rate that it keeps on
    links. So what tiles, waves of them, their order and the way of a chunk cost shows. What does not: fences that wait
    for links, links that several ranks share, and ranks that begin late.

    Each line has the likeliest candidates that send by themselves (not one shot, which the op may take instead), of an
    all-gather's tiles one with which all blocks send and one with which some do: microseconds, and in brackets what
    configs.py estimates. Results are compared with float64 once; a wrong one ends the run.
    """

    ranks, device = 2, "cuda"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--ops", type=words, default=("all_gather_matmul",), help=", ".join(PROBLEMS))
        parser.add_argument("--layers", type=words, default=(), help="parts of layers' names")
        parser.add_argument("--m-sizes", type=numbers, default=(), help="rows of the whole left matrix")
        parser.add_argument("--candidates", type=int, default=6, help="of each row")

    def rows(self, given: argparse.Namespace) -> Sequence[Row]:
        if unknown := [op for op in given.ops if op not in PROBLEMS]:
            raise ValueError(f"--ops: {', '.join(unknown)} is not among {', '.join(PROBLEMS)}")
        every = select_rows("cuda", given.ops, given.layers, given.m_sizes, modes=("graph",))
        return [row for row in every if row.name not in LAST_DIMENSION]

    def join(self, given: argparse.Namespace) -> torch.device:
        os.environ["WEFT_SHARE_GPUS"] = "1"  # before the heap is made
        dist.init_process_group("gloo")
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        return device

    def measure(self, row: Row, run: Run) -> None:
        problem = PROBLEMS[row.op](row, run.world, run.device)
        found = problem.ranked()[: run.given.candidates]
        heap = get_heap(None, run.device)
        rooms = [Workspace(heap, problem.layout(c), f"{row.id} {i}") for i, (_, c) in enumerate(found)]
        dist.barrier()
        if run.rank == 0:  # the others only lend their memory
            trial = problem.trial(rooms, [c for _, c in found])
            _compare(trial, [f"{row.id} {c}" for _, c in found])
            product, *us = _times(trial)
            taken = [f"{problem.text(c)}: {t:.1f} ({e:.0f})" for t, (e, c) in zip(us, found, strict=True)]
            links = problem.received / LINK_BYTES_PER_US
            line = f"{row.name} M={row.M}: cuBLAS {product:.1f}, links {links:.1f}"
            run.say(f"{line} | {' | '.join(taken)}")
        dist.barrier()


SUITE = OneRank()
