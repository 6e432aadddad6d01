"""One run of compare.py on one rank: microseconds of each row, as JSON. Uses no more of weft than its public ops.

A row is an op, a layer of Llama 8B and M; the time is the median of 15 series of 8 calls in a CUDA graph (between CPU
ranks 3 of 2 eager calls of a small layer) with operands alternately, of the slowest rank. With ``--host`` it is the
host's, of 15 series of 50 eager calls whose device is asleep meanwhile. None: this weft cannot.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
from parts import random_tensor
from registry import CPU_SCALE, LAYERS
from timer import CYCLES_PER_US, Schedule, Series, over_ranks
from torch import Tensor

GATHERS = "all_gather_matmul", "all_gather_matmul_A"  # the second one returns the gathered A
SCATTERS = "matmul_reduce_scatter", "matmul_reduce_scatter_residual"
COLLECTIVES = "all_reduce", "all_gather", "reduce_scatter"
NORMS = "all_reduce_rms_norm", "all_reduce_layer_norm"
FLOAT8 = "float8_all_gather_matmul", "float8_matmul_reduce_scatter"
OPS = (*GATHERS, *SCATTERS, "matmul_all_reduce", *COLLECTIVES, *NORMS, *FLOAT8)
SETS = 3  # of operands
GATHERED = ("llama8b.qkv", "llama8b.upgate")  # layers
REDUCED = ("llama8b.o", "llama8b.down")
HIDDEN = 4096

Run = Callable[[int], Tensor]


def runs_of(op: str, m: int, layer: tuple[int, int], device: torch.device) -> Run:
    """Call i of an op, on set i of operands. ``layer``: K and N of the whole one."""
    import weft.fused_ops as ops

    world, group, (k, n) = dist.get_world_size(), dist.group.WORLD, layer
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def sets(*shape: int) -> list[Tensor]:
        return [random_tensor(shape, dtype, device) for _ in range(SETS)]

    if op in (*GATHERS, FLOAT8[0]):
        shards, (B,) = sets(m // world, k), sets(k, n // world)[:1]
        returned = op == GATHERS[1]
        of = ops.float8_all_gather_matmul if op in FLOAT8 else ops.fused_all_gather_matmul
        gathered = partial(of, gather_dim=0, group=group, return_A=returned)
        return lambda i: gathered(shards[i], [B])[1][0]
    if op in (*SCATTERS, "matmul_all_reduce", FLOAT8[1]):
        xs, (B,) = sets(m, k // world), sets(k // world, n)[:1]
        if op in FLOAT8:
            return lambda i: ops.float8_matmul_reduce_scatter(xs[i], B, "sum", 0, group)
        if op == "matmul_all_reduce":
            return lambda i: ops.fused_matmul_all_reduce(xs[i], B, "sum", group)
        added: list[dict[str, Any]] = (
            [{"residual": r} for r in sets(m // world, n)] if op == SCATTERS[1] else [{}] * SETS
        )
        return lambda i: ops.fused_matmul_reduce_scatter(xs[i], B, "sum", 0, group, **added[i])
    xs, residual, weight = sets(m, n), sets(m, n)[0], torch.ones(n, device=device, dtype=dtype)
    if op == "all_reduce":
        return lambda i: ops.one_shot_all_reduce(xs[i], "sum", group)
    if op == "all_gather":
        return lambda i: ops.one_shot_all_gather(xs[i], 0, group)
    if op == "reduce_scatter":
        return lambda i: ops.one_shot_reduce_scatter(xs[i], "sum", 0, group)
    if op == "all_reduce_layer_norm":
        bias = torch.zeros_like(weight)  # not the weight: guards of tensors pass none that is there twice
        return lambda i: ops.fused_all_reduce_layer_norm(xs[i], residual, weight, bias, 1e-6, group)[0]
    return lambda i: ops.fused_all_reduce_rms_norm(xs[i], residual, weight, 1e-6, group)[0]


def rows(ops: list[str], m_sizes: list[int], device: torch.device) -> Iterator[tuple[str, Callable[[], Run]]]:
    small = CPU_SCALE if device.type == "cpu" else 1
    for op in ops:
        layers = {"": (0, HIDDEN)}
        if "matmul" in op:
            gathers = op in (*GATHERS, FLOAT8[0])
            of, names = (GATHERS[0], GATHERED) if gathers else (SCATTERS[0], REDUCED)
            layers = {name: LAYERS[of][name] for name in names}
        for name, (k, n) in layers.items():
            for m in m_sizes:
                row = " ".join(filter(None, (op, name, str(m))))
                yield row, partial(runs_of, op, m, (k // small, n // small), device)


def time_of(run: Run, device: torch.device) -> float:
    series, plan = (15, Schedule(8)) if device.type == "cuda" else (3, Schedule(2, 1))
    timed = Series(lambda i: [run(i)], SETS, plan, "graph" if device.type == "cuda" else "eager", device)
    return median(over_ranks([timed.time() for _ in range(series)], device))


def host_time_of(run: Run, device: torch.device) -> float:
    """The device sleeps while the host launches: a full queue would have the host wait for the device."""
    series, calls = (16, 50) if device.type == "cuda" else (4, 5)
    found = []
    for _ in range(series):
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda._sleep(8_000 * CYCLES_PER_US)
        start_s = time.perf_counter()
        for i in range(calls):
            run(i % SETS)
        found.append((time.perf_counter() - start_s) / calls * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return median(over_ranks(found[1:], device))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", nargs="+", required=True)
    parser.add_argument("--m-sizes", nargs="*", type=int)
    parser.add_argument("--host", action="store_true")
    given = parser.parse_args()
    timed = host_time_of if given.host else time_of
    device = machine.join_ranks()
    sizes = given.m_sizes or ([1024, 2048, 4096, 8192] if device.type == "cuda" else [32])
    found: dict[str, float | None] = {}
    for name, made in rows(given.ops, sizes, device):
        try:
            found[name] = timed(made(), device)
        except (AttributeError, TypeError):  # an op or an argument that this weft does not have: on all ranks
            found[name] = None
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
