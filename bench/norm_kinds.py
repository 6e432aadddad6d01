"""fused_all_reduce_rms_norm, its norm in fp8 and fused_all_reduce_layer_norm, of every kind beside the usual one.

    torchrun --nproc-per-node 2 bench/norm_kinds.py [--rows 1 16] [--hidden 4096] [--kinds usual LayerNorm]

Median of CUDA graphs of 50 calls (between CPU ranks of 5 eager ones), after a kernel that writes the input, of the
slowest rank. Prints a markdown table of microseconds, and how many times the first one's each is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
from parts import after_producer, random_tensor
from timer import Schedule, Series, order, over_ranks, same_head_start
from weft.fused_ops import (
    fused_all_reduce_layer_norm,
    fused_all_reduce_rms_norm,
    fused_all_reduce_rms_norm_quant,
)

EPS = 1e-6
ROUNDS = 10
# Whether there is a residual, whether the weight is float32, and the arguments.
KINDS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "usual": (True, False, {}),
    "unrounded sum": (True, False, {"round_sum": False}),
    "weight + 1": (True, False, {"weight_offset": 1.0}),
    "float32 weight": (True, True, {}),
    "all three": (True, True, {"round_sum": False, "weight_offset": 1.0}),
    "no residual": (False, False, {}),
}
# Whether a scale is given, and the arguments.
QUANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "fp8, given scale": (True, {}),
    "fp8, scales of rows": (False, {}),
    "fp8, scales of rows, divided by": (False, {"scale_op": "divide"}),
}
# Whether there are a weight and a bias, and whether they are float32.
LAYER_NORMS: dict[str, tuple[bool, bool]] = {
    "LayerNorm": (True, False),
    "float32 LayerNorm": (True, True),
    "LayerNorm without weight and bias": (False, False),
}


def series_of(rows: int, hidden: int, kinds: Sequence[str], device: torch.device) -> list[Series]:
    x = random_tensor((rows, hidden), torch.bfloat16, device)
    residual, weight = (
        random_tensor((rows, hidden), x.dtype, device),
        random_tensor((hidden,), x.dtype, device),
    )
    given = torch.empty_like(x)
    on_gpu = device.type == "cuda"
    plan = Schedule(50) if on_gpu else Schedule(5, 1)
    calls: dict[str, Any] = {}
    for name, (added, wide, named) in KINDS.items():
        of = weight.float() if wide else weight
        args = given, residual if added else None, of, EPS, dist.group.WORLD
        calls[name] = partial(fused_all_reduce_rms_norm, *args, **named)
    scale = torch.full((1,), 0.01, device=device)
    for name, (is_given, named) in QUANTS.items():
        quant = {"scale": scale if is_given else None, **named}
        calls[name] = partial(
            fused_all_reduce_rms_norm_quant, given, residual, weight, EPS, dist.group.WORLD, **quant
        )
    for name, (there, wide) in LAYER_NORMS.items():
        of = weight.float() if wide else weight
        columns = (of, of.neg()) if there else (None, None)
        operands: Any = given, residual, *columns, EPS, dist.group.WORLD
        calls[name] = partial(fused_all_reduce_layer_norm, *operands)
    mode = "graph" if on_gpu else "eager"
    found = [Series(after_producer(given, x, calls[name]), 1, plan, mode, device) for name in kinds]
    same_head_start(found, device)
    return found


def microseconds(series: Sequence[Series], device: torch.device) -> list[float]:
    rounds: list[list[float]] = [[] for _ in series]
    for number in range(ROUNDS):
        for i in order(len(series), number):
            rounds[i].append(series[i].time())
    return [median(over_ranks(times, device)) for times in rounds]


def main() -> None:
    device = machine.join_ranks()
    on_gpus = device.type == "cuda"
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rows", type=int, nargs="+", default=(1, 16, 64, 256, 1024, 4096) if on_gpus else (4, 64)
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=(4096, 8192) if on_gpus else (512,))
    every = (*KINDS, *QUANTS, *LAYER_NORMS)
    parser.add_argument("--kinds", nargs="+", choices=every, default=every)
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if on_gpus else "CPU"
    say(f"{dist.get_world_size()} ranks, {name}, bfloat16, us")
    say(f"| rows | hidden | {' | '.join(given.kinds)} |\n" + "|---" * (2 + len(given.kinds)) + "|")
    for hidden in given.hidden:
        for rows in given.rows:
            first, *others = microseconds(series_of(rows, hidden, given.kinds, device), device)
            cells = [f"{first:.1f}", *(f"{us:.1f} ({us / first:.2f})" for us in others)]
            say(f"| {rows} | {hidden} | {' | '.join(cells)} |")
    dist.destroy_process_group()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
