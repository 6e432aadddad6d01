"""An op on one rank alone, on a GPU that stands for one of several: where there are too few of them.

torchrun --nproc-per-node 4 bench/alone.py --layers llama70b.qkv,llama8b.qkv --m-sizes 1024,2048
torchrun --nproc-per-node 4 bench/alone.py --ops matmul_reduce_scatter --layers llama8b.o --m-sizes 1024,2048

The ranks share one GPU, and rank 0 alone launches, with peers that do as it does: of all-gather + matmul a second
kernel sets their flags (alone_gather.py, announce.cu), of matmul + reduce-scatter what rank 0 sends comes to lie where
theirs would (alone_scatter.py). It goes to the same GPU's memory, at the rate that it keeps on links. So what tiles,
waves of them, their order and the way of a chunk cost shows. What does not: fences that wait for links, links that
several ranks share, and ranks that begin late.

Each line has the likeliest candidates that send by themselves (not one shot, which the op may take instead), of an
all-gather's tiles one with which all blocks send and one with which some do: microseconds, and in brackets what
configs.py estimates. Results are compared with float64 once; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
from alone_gather import GatherProblem
from alone_rank import RankProblem, Trial
from alone_scatter import ScatterProblem
from contenders import LINK_BYTES_PER_US
from registry import LAST_DIMENSION, select_rows
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.workspace import Workspace

PROBLEMS: dict[str, type[RankProblem[Any]]] = {
    "all_gather_matmul": GatherProblem,
    "matmul_reduce_scatter": ScatterProblem,
}
CALLS, ROUNDS = 6, 9  # the first call of a round does not count
AHEAD = 1_500_000  # cycles, for which the device sleeps while the host launches a round


def timed(
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


def times(trial: Trial) -> list[float]:
    """Microseconds of the product, and of each candidate: medians of rounds in turn."""
    calls = [(lambda: None, trial.product, lambda: None)]
    calls += [(one.prepare, one.call, one.finish) for one in trial.candidates]
    series: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS):
        for i in ((turn + number) % len(calls) for turn in range(len(calls))):
            series[i].append(timed(*calls[i], trial.sets))
    for one in trial.candidates:
        one.check()
    return [median(of_one) for of_one in series]


def measure_alone(problem: RankProblem[Any], count: int) -> str | None:
    """A line of the table; None on the ranks that only lend their memory."""
    row, found = problem.row, problem.ranked()[:count]
    heap = get_heap(None, problem.device)
    rooms = [Workspace(heap, problem.layout(c), f"{row.id} {i}") for i, (_, c) in enumerate(found)]
    dist.barrier()
    line = None
    if dist.get_rank() == 0:
        trial = problem.trial(rooms, [c for _, c in found])
        compare(trial, [f"{row.id} {c}" for _, c in found])
        product, *us = times(trial)
        taken = [f"{problem.text(c)}: {t:.1f} ({e:.0f})" for t, (e, c) in zip(us, found, strict=True)]
        links = problem.received / LINK_BYTES_PER_US
        line = f"{row.name} M={row.M}: cuBLAS {product:.1f}, links {links:.1f} | {' | '.join(taken)}"
    dist.barrier()
    return line


def compare(trial: Trial, names: list[str]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(PROBLEMS)
    parser.add_argument("--ops", default="all_gather_matmul", help=f"of {known}, separated by commas")
    parser.add_argument("--layers", default="", help="parts of layers' names, separated by commas")
    parser.add_argument("--m-sizes", default="", help="rows of the whole left matrix, separated by commas")
    parser.add_argument("--candidates", type=int, default=6, help="of each row")
    given = parser.parse_args()
    ops = tuple(filter(None, given.ops.split(",")))
    if unknown := [op for op in ops if op not in PROBLEMS]:
        parser.error(f"--ops: {', '.join(unknown)} is not among {known}")
    layers = tuple(filter(None, given.layers.split(",")))
    sizes = tuple(int(size) for size in filter(None, given.m_sizes.split(",")))
    os.environ["WEFT_SHARE_GPUS"] = "1"  # before the heap is made
    dist.init_process_group("gloo")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if dist.get_rank() == 0:
        print(shlex.join(["bench/alone.py", *sys.argv[1:]]), machine.described("cuda", dist.get_world_size()))
    for row in select_rows("cuda", ops, layers, sizes, modes=("graph",)):
        if row.name in LAST_DIMENSION:
            continue
        line = measure_alone(PROBLEMS[row.op](row, dist.get_world_size(), device), given.candidates)
        if line is not None:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
