"""fused_all_reduce_rms_norm of every kind beside the usual one.

    torchrun --nproc-per-node 2 bench/norm_kinds.py

Median of CUDA graphs of 50 calls (between CPU ranks of 5 eager ones), behind a kernel that writes the input, of the
slowest rank. Prints a markdown table of microseconds, and how many times the usual one's each is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
from parts import after_producer, random_tensor
from timer import Schedule, Series, order, over_ranks, same_head_start
from weft.fused_ops import fused_all_reduce_rms_norm

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


def series_of(rows: int, hidden: int, device: torch.device) -> list[Series]:
    x = random_tensor((rows, hidden), torch.bfloat16, device)
    residual, weight = (
        random_tensor((rows, hidden), x.dtype, device),
        random_tensor((hidden,), x.dtype, device),
    )
    given = torch.empty_like(x)
    on_gpu = device.type == "cuda"
    plan = Schedule(50) if on_gpu else Schedule(5, 1)
    found = []
    for added, wide, named in KINDS.values():
        of = weight.float() if wide else weight
        args = given, residual if added else None, of, EPS, dist.group.WORLD
        call: Any = partial(fused_all_reduce_rms_norm, *args, **named)
        found.append(Series(after_producer(given, x, call), 1, plan, "graph" if on_gpu else "eager", device))
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
    lines = [f"| rows | hidden | {' | '.join(KINDS)} |", "|---" * (2 + len(KINDS)) + "|"]
    for hidden in (4096, 8192) if on_gpus else (512,):
        for rows in (1, 16, 64, 256, 1024, 4096) if on_gpus else (4, 64):
            usual, *others = microseconds(series_of(rows, hidden, device), device)
            cells = [f"{usual:.1f}", *(f"{us:.1f} ({us / usual:.2f})" for us in others)]
            lines.append(f"| {rows} | {hidden} | {' | '.join(cells)} |")
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if on_gpus else "CPU"
        print(f"{dist.get_world_size()} ranks, {name}, bfloat16, us", *lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
