"""A row: check every contender against float64, time those that are right in turns, and check them again."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import accuracy
import torch
import torch.distributed as dist
from parts import Bench
from timer import Schedule, Series, in_turns, meet
from weft.fused_ops import last_plan


@dataclass(frozen=True)
class Timed:
    """Of the contenders that are right: the slowest rank's microseconds of each round. And what is wrong with others.

    ``algorithm`` is weft's; ``host_us`` what a call took on this host, in eager mode.
    """

    rounds: dict[str, list[float]]
    host_us: dict[str, float]
    algorithm: str
    problems: list[str]

    @property
    def medians(self) -> dict[str, float]:
        return {name: median(us) for name, us in self.rounds.items()}

    def cells(self, names: list[str], width: int = 10) -> str:
        """A table's cells, "-" of a contender without a time."""
        found = self.medians
        return "".join(f"{f'{found[n]:.1f}' if n in found else '-':>{width}}" for n in names)


def _agree(problem: str) -> str:
    """The first rank's problem: all ranks drop a contender or none does."""
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    return next((f"rank {rank}: {p}" for rank, p in enumerate(said) if p), "")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _problem(series: Series, bench: Bench, name: str, device: torch.device) -> str:
    """Collective. Of a contender that is there for its time alone nothing."""
    meet(device)  # what peers write has come
    expected = bench.expected_of(name)
    dtype = series.last[0].dtype if series.last else torch.float32
    return accuracy.problem(series.last, expected, dtype) if expected else ""


def timed(bench: Bench, plan: Schedule, mode: str, device: torch.device) -> Timed:
    """The contenders of a row, in turns, eager or each captured into a CUDA graph. Collective."""
    ready: dict[str, Series] = {}
    algorithm, problems = "", []
    for name, call in bench.calls.items():
        problem, series = "", None
        try:
            series = Series(call, bench.sets, plan, mode, device)
        except Exception as e:
            problem = _said(e)
        problem = _agree(problem)
        if series is not None and not problem:
            series.poison()
            try:
                series.run()
                if name == "weft":
                    algorithm = last_plan().algorithm
            except Exception as e:
                problem = _said(e)
            problem = _agree(problem) or _agree(_problem(series, bench, name, device))
        if problem or series is None:
            problems.append(f"{name}: {problem}")
        else:
            ready[name] = series
    host_us = {name: round(series.host_us, 1) for name, series in ready.items() if series.host_us}
    rounds = in_turns(ready, plan.cycles, device)
    for name, series in ready.items():  # once more, as they were timed
        series.poison()
        series.time()
        if problem := _agree(_problem(series, bench, name, device)):
            problems.append(f"{name}: after the rounds: {problem}")
            del rounds[name]
    return Timed(rounds, host_us, algorithm, problems)
