"""The rows of the suite llama: one case, every contender, in turns.

A row: {"mode", "compile", "seq", "batch", "graphs", "weights", "contender", "ms", "forward_ms", "backward_ms",
"tokens_per_s", "mfu", "exposed_comm_ms", "peak_bytes", "votes"}. Times are medians over steps that follow each other
without a pause, of the slowest rank, from CUDA events: a host that is slower than the GPU counts. ``ms`` has the
optimizer. ``votes`` are those of this rank's graphs.

``exposed_comm_ms`` is what a step takes beyond its computation: ``ms`` less the time in which a step of plain
torch.compile has a kernel on the GPU that is none of NCCL's, from the profile of the rank where these take longest. So
it has waits, gaps and everything by which a fused kernel is slower than the product alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from llama_profile import Interval, busy, forward_layer, intervals, kernels_of, slowest
from llama_steps import BOUND, CPU_SIZES, GPU_SIZES, Case, Step, make_step
from torch._inductor import config as inductor_config
from weft.fused_ops.passes.records.report import VoteCounts

CONTENDERS = (
    "plain",
    "torch",
    "weft",
    "weft agree=False",
    "weft regather=True",
    BOUND,
)
PEAK_FLOPS = 989e12  # of an H100 or H200, dense bfloat16


def flops(case: Case) -> float:
    """Of the matrix products of a step, on all ranks together; attention's of a causal mask."""
    s = GPU_SIZES
    kv = s.kv_heads * s.dim // s.heads
    weights = s.layers * (2 * s.dim * s.dim + 2 * s.dim * kv + 3 * s.dim * s.hidden) + s.dim * s.vocabulary
    each = case.seq if case.mode == "decode" else case.seq / 2
    forward = case.tokens * (2 * weights + 4 * s.layers * each * s.dim)
    return forward * (3 if case.mode == "train" else 1)


class Measured(NamedTuple):
    """The rows of a case; of each contender the kernels of a layer's forward in training."""

    rows: list[dict[str, Any]]
    layers: dict[str, list[Interval]]


def measure_case(
    case: Case, contenders: Sequence[str], device: torch.device, steps: int, say: Callable[..., None]
) -> Measured:
    """``say`` is told how far it is."""
    made: dict[str, Step] = {}
    for name in contenders:
        torch.compiler.reset()
        begin = time.perf_counter()
        if (step := _made(case, name, device)) is not None:
            made[name] = step
            say(f"    {case}, {name}: compiled in {time.perf_counter() - begin:.0f} s")
    times: dict[str, list[list[float]]] = {name: [] for name in made}
    votes: dict[str, list[tuple[VoteCounts, VoteCounts]]] = {name: [] for name in made}
    for name in list(made) * 3:  # alternately
        begun = made[name].voted()
        times[name] += _series(made[name], steps, device)
        votes[name].append((begun, made[name].voted()))
    kernels = {f"{case} {name}": kernels_of(step.run) for name, step in made.items()} if _on(device) else {}
    lanes = {name: intervals(found) for name, found in kernels.items()}
    layers = {name: forward_layer(found) for name, found in kernels.items()} if case.mode == "train" else {}
    computing = slowest(busy(lanes[f"{case} plain"]), device) if f"{case} plain" in lanes else None
    rows = []
    for name in made:
        total, forward, backward = (statistics.median(column) for column in zip(*times[name], strict=True))
        row = {
            "mode": case.mode,
            "compile": case.compile,
            "seq": case.seq,
            "batch": case.batch,
            "graphs": case.graphs,
            "weights": case.weights,
            "contender": name,
            "ms": round(total, 4),
            "forward_ms": round(forward, 4) if case.mode == "train" else None,
            "backward_ms": round(backward, 4) if case.mode == "train" else None,
            "tokens_per_s": round(case.tokens / total * 1e3),
            "mfu": round(flops(case) / (total / 1e3) / PEAK_FLOPS / dist.get_world_size(), 4)
            if _on(device)
            else None,
            "exposed_comm_ms": None if computing is None else round(total - computing, 4),
            "peak_bytes": made[name].peak_bytes(),
            "votes": _votes(votes[name]),
        }
        rows.append(row)
    return Measured(rows, layers)


def _votes(series: Sequence[tuple[VoteCounts, VoteCounts]]) -> dict[str, float] | None:
    """Of the timed steps: graphs that voted, those of them that did not wait, and microseconds of the host for each.

    Args:
        series: what had been counted before a contender's series of steps and after it; counts are of a process.
    """
    if not (count := sum(ended.count - begun.count for begun, ended in series)):
        return None
    us = sum(ended.seconds - begun.seconds for begun, ended in series) / count * 1e6
    return {
        "count": count,
        "ahead": sum(ended.known - begun.known for begun, ended in series),
        "us": round(us, 1),
    }


def _on(device: torch.device) -> bool:
    return device.type == "cuda"


def _made(case: Case, name: str, device: torch.device) -> Step | None:
    if name == "torch" and (not _on(device) or case.mode == "decode"):
        return None  # its ops need CUDA, and it has none for all-reduces
    inductor_config.fx_graph_cache = False
    step = make_step(case, name, device)
    for _ in range(60 if case.mode == "decode" else 5):  # compiles, captures, learns
        step.run()
    return step


def _series(step: Step, steps: int, device: torch.device) -> list[list[float]]:
    """[whole, forward, backward] of each step, of the slowest rank."""
    step.run()
    dist.barrier()
    if _on(device):
        torch.cuda.synchronize()
    marks = [step.run() for _ in range(steps)]
    if _on(device):
        torch.cuda.synchronize()
    found = torch.tensor([m.milliseconds() for m in marks], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()  # type: ignore[no-any-return]


def losses(contenders: Sequence[str], device: torch.device, updates: int) -> dict[str, list[float]]:
    """Each contender's losses over so many updates, from equal weights on equal tokens."""
    seq = 2048 if _on(device) else CPU_SIZES.seq
    curves = {}
    for name in contenders:
        torch.compiler.reset()
        if name == BOUND or (name == "torch" and not _on(device)):
            continue
        step = make_step(Case("train", "whole", seq, 1), name, device)
        curves[name] = [step.run().loss() for _ in range(updates)]
    return curves


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is printed of a case; ``x`` is how many times as fast as plain."""
    lines = []
    plain = next((r["ms"] for r in rows if r["contender"] == "plain"), None)
    number: Callable[[float | None], str] = lambda v: f"{'-' if v is None else format(v, '.3f'):>10}"  # noqa: E731
    for row in rows:
        name = f"{row['mode']} {row['compile']} seq {row['seq']} batch {row['batch']}"
        name += " local" * (row["weights"] == "local")
        cells = (row[c] for c in ("ms", "forward_ms", "backward_ms", "exposed_comm_ms"))
        faster = f"{plain / row['ms']:8.3f} x" if plain else ""
        memory = f"{(row['peak_bytes'] or 0) / 2**30:8.2f} GiB"
        voted = f"  {row['votes']}" if row["votes"] else ""
        lines.append(f"{name:<40}{row['contender']:<28}{''.join(map(number, cells))}{faster}{memory}{voted}")
    return lines
