"""Programs of other libraries, unchanged, with and without weft: transformers, DDP and FSDP2."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from framework_programs import KINDS, SIZES, FrameworkCase, FrameworkProgram, make_programs
from llama_profile import kernels_of, slowest
from suite import Run, Suite
from timer import meet, order, over_ranks
from torch import Tensor
from torch._inductor import config as inductor_config

#: Of bfloat16 and float32, relative to the norm.
WRONG = {"cuda": 0.05, "cpu": 1e-4}


def turn(program: FrameworkProgram, steps: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step on this rank: (wall, host)."""
    program.step()
    meet(device)
    begin = time.perf_counter()
    program.step()
    host = time.perf_counter() - begin
    meet(device)
    begin = time.perf_counter()
    for _ in range(steps):
        program.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3, host * 1e3


def error(got: Sequence[Tensor], want: Sequence[Tensor], device: torch.device) -> float:
    """The largest difference of two contenders' results, on any rank."""
    worst = 0.0 if len(got) == len(want) else float("inf")
    for a, b in zip(got, want, strict=False):
        norm = b.double().norm().clamp_min(1e-30)
        found = ((a.double() - b.double()).norm() / norm).item()
        worst = max(worst, float("inf") if math.isnan(found) else found)
    return slowest(worst, device)


def busy_ms(program: FrameworkProgram) -> float:
    """Milliseconds of a step in which some kernel runs."""
    total, until = 0.0, float("-inf")
    for kernel in kernels_of(program.step):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total / 1e3


def _framework(case: FrameworkCase) -> str:
    import transformers

    of_torch = case.kind in ("ddp", "fsdp2")
    return f"torch {torch.__version__}" if of_torch else f"transformers {transformers.__version__}"


def rows_of_case(case: FrameworkCase, run: Run) -> list[dict[str, Any]]:
    given, device = run.given, run.device
    names = [name for name in KINDS[case.kind] if name in (given.contenders or KINDS[case.kind])]
    makers = make_programs(case, names, given.layers, device)
    programs: dict[str, FrameworkProgram] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    wanted: list[Tensor] = []
    errors: dict[str, float] = {}
    for name in names:
        begin = time.perf_counter()
        # One program of the backend's own group, alone and in turns.
        alone = programs.get("plain alone") if name == "plain" else None
        programs[name] = program = alone or makers[name]()
        for _ in range(given.warmup):
            program.step()
        found = [result.clone() for result in program.results()]
        wanted = wanted or found
        errors[name] = error(found, wanted, device)
        run.say(f"    {case}, {name}: ready in {time.perf_counter() - begin:.0f} s")
        if name == "plain alone":
            times[name] = [turn(program, given.steps, device) for _ in range(given.rounds)]
    turns = [name for name in names if name != "plain alone"]
    for number in range(given.rounds):
        for i in order(len(turns), number):
            times[turns[i]].append(turn(programs[turns[i]], given.steps, device))
    rows = []
    for name, program in programs.items():
        ms, host_ms = (median(over_ranks(list(column), device)) for column in zip(*times[name], strict=True))
        errors[name] = max(errors[name], error(program.results(), wanted, device))
        peak = gpu_ms = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            gpu_ms = round(slowest(busy_ms(program), device), 3)
            peak = int(slowest(float(torch.cuda.max_memory_allocated()), device))
        fused, left = program.counts()
        rows.append(
            {
                "framework": _framework(case),
                "program": str(case),
                "contender": name,
                "ms": round(ms, 3),
                "gpu_ms": gpu_ms,
                "host_ms": round(host_ms, 3),
                "peak_bytes": peak,
                "fused": fused,
                "left": left,
                "error": errors[name],
            }
        )
    return rows


def framework_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """``x`` is how many times as fast as plain."""
    plain = next((row["ms"] for row in rows if row["contender"] == "plain"), None)
    lines = []
    for row in rows:
        cells = [row["ms"], plain and plain / row["ms"], row["gpu_ms"], row["host_ms"]]
        numbers = "".join(f"{'-' if n is None else format(n, '.3f'):>11}" for n in cells)
        memory = (row["peak_bytes"] or 0) / 2**30
        counts = f"{row['fused']:>7}{row['left']:>6}"
        lines.append(
            f"{row['program']:<22}{row['contender']:<15}{numbers}{memory:10.2f}{counts}  {row['error']:.1e}"
        )
    return lines


class Frameworks(Suite):
    """Programs of other libraries, unchanged, with and without weft: transformers, DDP and FSDP2.

    A case is a model of transformers, what is done with it, and tokens: --cases "Qwen3 train 1024" "Llama ddp 512".

    | is done | by | contenders |
    |---|---|---|
    | prefill, train, generate | torch.compile under ``tp_plan="auto"`` | plain, weft, agree=False |
    | eager | that training step, not compiled; transformers 5.17 | process groups: plain alone, plain, process group |
    | ddp, fsdp2 | a whole model of 1.2 billion parameters on each rank | the same groups |
    | experts | a prefill with experts placed by rank, compiled | their all-to-all, and weft's in one graph |

    Between CPU ranks models are tiny. A training step is a forward and a backward; there is no optimizer. Each
    contender's results (logits, or loss and gradients) are compared with the first one's before and after. Contenders
    are timed in turns; the first step of a turn is not timed. Rows: {"framework", "program", "contender", "ms",
    "gpu_ms", "host_ms", "peak_bytes", "fused", "left", "error"}: medians of the rounds, of the slowest rank. ``ms`` is
    the wall's, ``host_ms`` that of a step's Python on an idle GPU, ``gpu_ms`` how long some kernel runs in a profiled
    step. ``fused`` and ``left`` are collectives in compiled graphs, or a process group's calls. ``error`` is relative
    to the norm.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--cases", nargs="+", help='such as "Qwen3 train 1024"')
        parser.add_argument("--contenders", nargs="+", help="some of the case's")
        parser.add_argument("--layers", type=int, default=8, help="of the sharded models")
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--steps", type=int, default=3, help="in a turn")
        parser.add_argument("--warmup", type=int, default=8, help="steps before the first turn")

    def rows(self, given: argparse.Namespace) -> list[FrameworkCase]:
        if given.cases:
            return [FrameworkCase.of(text) for text in given.cases]
        return [
            FrameworkCase(model, kind, 9 if given.device == "cpu" else 1024)
            for model in SIZES
            for kind in KINDS
            if (model == "Llama" or kind not in ("ddp", "fsdp2"))
            and kind != "eager"
            and (model == "Qwen3Moe") == (kind == "experts")
        ]

    def begin(self, run: Run) -> None:
        torch._dynamo.config.recompile_limit = 256  # each contender compiles the code of every hooked module
        inductor_config.fx_graph_cache = False  # a graph from there has no entries in the report
        columns = ("ms", "x", "gpu ms", "host ms")
        head = "".join(f"{name:>11}" for name in columns)
        run.say(f"{'':<22}{'':<15}{head}{'GiB':>10}{'fused':>7}{'left':>6}")

    def measure(self, row: FrameworkCase, run: Run) -> None:
        torch.compiler.reset()
        found = rows_of_case(row, run)
        run.rows += found
        run.say(*framework_table(found))
        for each in found:
            if not each["error"] < WRONG[run.device.type]:
                run.wrong = True
                run.say(f"WRONG: {row}, {each['contender']}: {each['error']}")


SUITE = Frameworks()
