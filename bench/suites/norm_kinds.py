"""The norms after an all-reduce, of every kind beside the usual one."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parts import after_producer, random_tensor
from suite import Run, Suite, numbers
from timer import Schedule, Series, medians
from weft.fused_ops import (
    fused_all_reduce_layer_norm,
    fused_all_reduce_rms_norm,
    fused_all_reduce_rms_norm_quant,
)

EPS = 1e-6
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


def _series(rows: int, hidden: int, run: Run) -> dict[str, Series]:
    device = run.device
    x = random_tensor((rows, hidden), torch.bfloat16, device)
    residual, weight = (
        random_tensor((rows, hidden), x.dtype, device),
        random_tensor((hidden,), x.dtype, device),
    )
    given = torch.empty_like(x)
    plan = Schedule(50) if run.on_gpus else Schedule(5, 1)
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
    return {
        name: Series(after_producer(given, x, calls[name]), 1, plan, run.mode, device)
        for name in run.given.kinds
    }


class NormKinds(Suite):
    """fused_all_reduce_rms_norm, its norm in fp8 and fused_all_reduce_layer_norm, of every kind beside the usual one.

    Median of CUDA graphs of 50 calls (between CPU ranks of 5 eager ones), after a kernel that writes the input, of the
    slowest rank. Prints a markdown table of microseconds, and how many times the first one's each is.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--rows", type=numbers, default=(), dest="tokens", help="by commas")
        parser.add_argument("--hidden", type=numbers, default=(), help="by commas")
        every = (*KINDS, *QUANTS, *LAYER_NORMS)
        parser.add_argument("--kinds", nargs="+", choices=every, default=every)

    def rows(self, given: argparse.Namespace) -> list[tuple[int, int]]:
        on_gpus = given.device == "cuda"
        sizes = given.tokens or ((1, 16, 64, 256, 1024, 4096) if on_gpus else (4, 64))
        return [(m, n) for n in given.hidden or ((4096, 8192) if on_gpus else (512,)) for m in sizes]

    def begin(self, run: Run) -> None:
        kinds = run.given.kinds
        run.say(f"| rows | hidden | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|")

    def measure(self, row: tuple[int, int], run: Run) -> None:
        first, *others = medians(_series(*row, run), 1, run.device).values()
        cells = [f"{first:.1f}", *(f"{us:.1f} ({us / first:.2f})" for us in others)]
        run.say(f"| {row[0]} | {row[1]} | {' | '.join(cells)} |")


SUITE = NormKinds()
