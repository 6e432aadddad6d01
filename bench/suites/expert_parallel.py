"""Tokens to the ranks of their experts, and back."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accuracy import of_sums
from contenders import LINK_BYTES_PER_US
from measure import timed
from parts import Bench, random_tensor
from suite import Run, Suite, numbers, words
from timer import Schedule
from torch import Tensor
from weft.fused_ops import moe_combine, moe_dispatch

# Hidden, experts, choices of a token.
MODELS = {
    "Mixtral": (4096, 8, 2),
    "Qwen3-30B": (2048, 128, 8),
    "GPT-OSS-20B": (2880, 32, 4),
    "Qwen3-235B": (4096, 128, 8),
    "DeepSeek-V3": (7168, 256, 8),
}
SMALL = {"small": (16, 4, 2)}
OPS = "moe_dispatch", "moe_combine"
CONTENDERS = "weft", "backend"

Row = tuple[str, str, int]  # op, model, M


class _BySplits:
    """The group's ``all_to_all_single``, a row for each choice, with sizes that the host knew before the clock ran."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        self.order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=experts)
        every = torch.empty(size * experts, dtype=counts.dtype, device=ids.device)
        dist.all_gather_into_tensor(every, counts)
        mine = slice(rank * experts // size, (rank + 1) * experts // size)
        self.sent = counts.view(size, -1).sum(1).tolist()
        of_ranks = every.view(size, experts)[:, mine]
        self.received = of_ranks.sum(1).tolist()
        number = torch.arange(experts // size, device=ids.device).repeat(size)
        self.by_expert = number.repeat_interleave(of_ranks.flatten()).argsort(stable=True)
        self.k = ids.shape[1]

    def dispatch(self, x: Tensor) -> Tensor:
        rows = x.new_empty(sum(self.received), x.shape[1])
        dist.all_to_all_single(rows, x[self.order // self.k], self.received, self.sent)
        return rows[self.by_expert]

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        by_rank, back = torch.empty_like(y), y.new_empty(len(self.order), y.shape[1])
        by_rank[self.by_expert] = y
        dist.all_to_all_single(back, by_rank, self.sent, self.received)
        rows = torch.empty_like(back)
        rows[self.order] = back
        return (rows.view(-1, self.k, y.shape[1]) * weights[..., None]).sum(1).to(y.dtype)


class ExpertParallel(Suite):
    """Tokens to the ranks of their experts, and back: weft's, and the group's all_to_all_single of every choice.

    The latter's split sizes are known to the host before the clock runs. ``limit_us``: the time of the bytes that a
    rank receives if each token comes once, over the links. M: tokens of a rank. Every result is compared with float64.
    """

    plots = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--ops", type=words, default=OPS, help=f"of {', '.join(OPS)}; by commas")
        parser.add_argument("--models", type=words, default=(), help="by commas")
        parser.add_argument("--m-sizes", type=numbers, default=(), help="by commas")

    def rows(self, given: argparse.Namespace) -> list[Row]:
        on_gpus = given.device == "cuda"
        there = MODELS if on_gpus else SMALL
        models = given.models or tuple(there)
        for option, asked, known in (("ops", given.ops, OPS), ("models", models, there)):
            if wrong := [name for name in asked if name not in known]:
                raise ValueError(f"--{option}: has {', '.join(wrong)}, must be of {', '.join(known)}")
        sizes = given.m_sizes or ((64, 512, 2048, 8192) if on_gpus else (6,))
        return [(op, model, m) for model in models for m in sizes for op in given.ops]

    def begin(self, run: Run) -> None:
        run.say(f"{'':<32}{'M':>6}" + "".join(f"{name:>11}" for name in CONTENDERS) + "  us")

    def measure(self, row: Row, run: Run) -> None:
        op, model, m = row
        hidden, experts, choices = (MODELS | SMALL)[model]
        torch.manual_seed(1 + dist.get_rank())
        x = random_tensor((m, hidden), torch.bfloat16 if run.on_gpus else torch.float32, run.device)
        ids = torch.rand(m, experts, device=run.device).topk(choices, dim=1)[1]
        weights = torch.rand(m, choices, device=run.device)
        splits = _BySplits(ids, experts)
        count = sum(splits.received)
        rows, _, handle = moe_dispatch(x, ids, experts)
        if op == "moe_dispatch":
            want = splits.dispatch(x).double()
            bench = Bench(
                {
                    "weft": lambda _: [moe_dispatch(x, ids, experts)[0][:count]],
                    "backend": lambda _: [splits.dispatch(x)],
                },
                [of_sums(want, want.abs(), 0, x.dtype)],
                1,
            )
        else:
            y, want = rows[:count].clone(), x.double() * weights.double().sum(1, keepdim=True)
            bench = Bench(
                {
                    "weft": lambda _: [moe_combine(rows, handle, weights)],
                    "backend": lambda _: [splits.combine(y, weights)],
                },
                # Of each rank's part, and of their sum; those in float32 are as small as one more.
                [of_sums(want, want.abs(), 3, x.dtype)],
                1,
            )
        found = timed(
            bench, Schedule(10 if m <= 512 else 3) if run.on_gpus else Schedule(2, 1), run.mode, run.device
        )
        cells = {f"{name}_us": found.medians.get(name) for name in CONTENDERS}
        # A dispatch receives others' tokens that need this rank, a combine sums of own ones from others.
        wanted, own = (
            (handle.ranks >> torch.arange(run.world, device=run.device)[:, None] & 1),
            dist.get_rank(),
        )
        per_rank = wanted.view(run.world, run.world, m)
        others = per_rank[own] if op == "moe_dispatch" else per_rank[:, own]
        tokens = int(others.sum() - others[own].sum())
        limit = round(tokens * hidden * x.element_size() / LINK_BYTES_PER_US, 2) if run.on_gpus else None
        sizes = {"H": hidden, "E": experts, "k": choices}
        run.rows.append(
            {"op": op, "model": model, "M": m, **sizes, **cells, "product_us": None, "limit_us": limit}
        )
        run.say(f"{op + ' ' + model:<32}{m:>6}{found.cells(list(CONTENDERS), 11)}", *found.problems)
        run.wrong |= bool(found.problems)


SUITE = ExpertParallel()
