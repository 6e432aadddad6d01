"""A tensor-parallel decoder with the pass's sequence parallelism and without, inference in bfloat16.

    torchrun --nproc-per-node 2 bench/sequence_layers.py

Two layers as a serving engine writes them (a norm, one product for queries, keys and values, attention, a product, an
all-reduce, a residual; likewise feed-forward), by torch.compile alone and with the pass. Median of CUDA graphs of one
run (between CPU ranks of eager ones), the slowest rank's. Prints a markdown table of microseconds, and under it what
became of the collectives. Results are compared with those without the pass.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from timer import over_ranks
from torch import Tensor
from weft.fused_ops import FusionPass

LAYERS, ROUNDS = 2, 20
# Hidden, heads' whole width, the inner width, and a head's.
SIZES = {"cuda": (4096, 4096, 14336, 128), "cpu": (64, 64, 96, 16)}


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * weight, residual


def decoder(x: Tensor, residual: Tensor, weights: list[Tensor], head: int) -> Tensor:
    group = dist.distributed_c10d._get_default_group()
    for i in range(0, len(weights), 6):
        before, qkv, out, between, up, down = weights[i : i + 6]
        y, residual = residual_norm(x, residual, before)
        q, k, v = ((y @ qkv).unflatten(-1, (3, -1, head)).movedim(-3, 0).movedim(-2, -3)).unbind(0)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = funcol.all_reduce(y.movedim(0, 1).flatten(1) @ out, "sum", group)
        y, residual = residual_norm(x, residual, between)
        gate, other = (y @ up).chunk(2, -1)
        x = funcol.all_reduce((F.silu(gate) * other) @ down, "sum", group)
    return residual_norm(x, residual, weights[0])[0] @ weights[1]


def operands(rows: int, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor], int]:
    hidden, width, inner, head = SIZES[device.type]
    world = dist.get_world_size()
    width, inner = width // world, inner // world
    # What ranks have alike, and their own parts.
    shared = torch.Generator(device).manual_seed(1)
    own = torch.Generator(device).manual_seed(2 + dist.get_rank())

    def drawn(*shape: int, by: torch.Generator) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=by) / shape[0] ** 0.5

    weights = []
    for _ in range(LAYERS):
        weights += [drawn(hidden, by=shared), drawn(hidden, 3 * width, by=own), drawn(width, hidden, by=own)]
        weights += [drawn(hidden, by=shared), drawn(hidden, 2 * inner, by=own), drawn(inner, hidden, by=own)]
    return drawn(rows, hidden, by=shared), drawn(rows, hidden, by=shared), weights, head


def in_a_graph(run: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """A function that runs it once and gives microseconds."""
    if device.type == "cpu":
        import time

        def once() -> float:
            dist.barrier()
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e6

        return once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        dist.barrier()
        torch.cuda._sleep(1_000_000)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    return replay


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--settings", nargs="+", default=["none", "False", "True", "auto"])
    given = parser.parse_args()
    device = machine.join_ranks()
    on_gpus = device.type == "cuda"
    torch._dynamo.config.recompile_limit = 64
    known: dict[str, Any] = {"none": None, "False": False, "True": True, "auto": "auto"}
    settings = {name: known[name] for name in given.settings}
    names = [f"sequence_parallel={name}" if name != "none" else "no pass" for name in settings]
    lines = [f"| rows | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    became: dict[str, Counter[str]] = {}
    for rows in given.rows or ([16, 256, 1024, 4096, 8192] if on_gpus else [16]):
        args = operands(rows, device)
        calls, results = [], []
        for name, setting in settings.items():
            torch._dynamo.reset()
            fusion = None if name == "none" else FusionPass(agree="capture", sequence_parallel=setting)
            options = {} if fusion is None else fusion.options
            compiled = torch.compile(decoder, options=options, dynamic=False)
            with torch.no_grad():
                for _ in range(3):
                    result = compiled(*args)
                results.append(result.double())
                calls.append(in_a_graph(partial(compiled, *args), device))
            if fusion is not None:
                ops = (str(e.fused_into or "left").partition("::")[2] for e in fusion.report().entries)
                became[f"{rows} rows, {name}"] = Counter(ops)
        far = [((r - results[0]).norm() / results[0].norm()).item() for r in results]
        assert max(far) < 5e-2, far
        times: list[list[float]] = [[] for _ in calls]
        for number in range(ROUNDS):
            for i in range(len(calls)):
                at = (i + number) % len(calls)
                times[at].append(calls[at]())
        cells = [f"{median(over_ranks(each, device)):.1f}" for each in times]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if on_gpus else "CPU"
        print(
            f"{dist.get_world_size()} ranks, {name}, torch {torch.__version__}, bfloat16, us",
            *lines,
            sep="\n",
        )
        for where, counts in became.items():
            print(f"{where}: {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
