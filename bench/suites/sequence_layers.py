"""A decoder with sequence parallelism and without."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from suite import Run, Suite, numbers
from timer import Schedule, Series, medians
from torch import Tensor
from weft.fused_ops import FusionPass

LAYERS = 2
SETTINGS: dict[str, Any] = {"none": None, "False": False, "True": True, "auto": "auto"}
# Hidden, heads' whole width, the inner width, and a head's.
SIZES = {"cuda": (4096, 4096, 14336, 128), "cpu": (64, 64, 96, 16)}


def _residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * weight, residual


def _decoder(x: Tensor, residual: Tensor, weights: list[Tensor], head: int) -> Tensor:
    group = dist.distributed_c10d._get_default_group()
    for i in range(0, len(weights), 6):
        before, qkv, out, between, up, down = weights[i : i + 6]
        y, residual = _residual_norm(x, residual, before)
        q, k, v = ((y @ qkv).unflatten(-1, (3, -1, head)).movedim(-3, 0).movedim(-2, -3)).unbind(0)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = funcol.all_reduce(y.movedim(0, 1).flatten(1) @ out, "sum", group)
        y, residual = _residual_norm(x, residual, between)
        gate, other = (y @ up).chunk(2, -1)
        x = funcol.all_reduce((F.silu(gate) * other) @ down, "sum", group)
    return _residual_norm(x, residual, weights[0])[0] @ weights[1]


def _operands(rows: int, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor], int]:
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


class SequenceLayers(Suite):
    """A tensor-parallel decoder with the pass's sequence parallelism and without, inference in bfloat16.

    Two layers as a serving engine writes them (a norm, one product for queries, keys and values, attention, a product,
    an all-reduce, a residual; likewise feed-forward), by torch.compile alone and with the pass. Median of CUDA graphs
    of one run (between CPU ranks of eager ones), the slowest rank's. Prints a markdown table of microseconds, and under
    it what became of the collectives. Results are compared with those without the pass.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--rows", type=numbers, default=(), dest="tokens", help="by commas")
        parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)

    def rows(self, given: argparse.Namespace) -> tuple[int, ...]:
        on_gpus = given.device == "cuda"
        tokens: tuple[int, ...] = given.tokens or ((16, 256, 1024, 4096, 8192) if on_gpus else (16,))
        return tokens

    def begin(self, run: Run) -> None:
        torch._dynamo.config.recompile_limit = 64
        self._became: dict[str, Counter[str]] = {}
        names = [f"sequence_parallel={n}" if n != "none" else "no pass" for n in run.given.settings]
        run.say(f"| rows | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|")

    @torch.no_grad()
    def measure(self, row: int, run: Run) -> None:
        args = _operands(row, run.device)
        series: dict[str, Series] = {}
        for name in run.given.settings:
            torch._dynamo.reset()
            setting = SETTINGS[name]
            fusion = None if name == "none" else FusionPass(agree="capture", sequence_parallel=setting)
            options = {} if fusion is None else fusion.options
            compiled = torch.compile(_decoder, options=options, dynamic=False)
            call = lambda _, compiled=compiled: [compiled(*args)]  # noqa: E731
            series[name] = Series(call, 1, Schedule(1), run.mode, run.device)
            series[name].run()
            if fusion is not None:
                ops = (str(e.fused_into or "left").partition("::")[2] for e in fusion.report().entries)
                self._became[f"{row} rows, {name}"] = Counter(ops)
        results = [one.last[0].double() for one in series.values()]
        far = [((r - results[0]).norm() / results[0].norm()).item() for r in results]
        assert max(far) < 5e-2, far
        cells = [f"{us:.1f}" for us in medians(series, 4, run.device).values()]
        run.say(f"| {row} | {' | '.join(cells)} |")

    def end(self, run: Run) -> None:
        for where, counts in self._became.items():
            run.say(f"{where}: {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}")


SUITE = SequenceLayers()
