"""Heads to sequence and back, alone and around their products, and the head whose columns are gathered."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from accuracy import Expected, of_products
from contenders import LINK_BYTES_PER_US
from measure import timed
from parts import Bench, random_tensor
from suite import Run, Suite, numbers, words
from timer import Schedule
from torch import Tensor
from weft.fused_ops import (
    fused_all_to_all_matmul,
    fused_matmul_all_gather,
    fused_matmul_all_to_all,
    one_shot_all_gather,
    one_shot_all_to_all,
)

OPS = "heads", "heads_back", "matmul_all_to_all", "all_to_all_matmul", "matmul_all_gather"
CONTENDERS = "weft", "parts", "backend"
SIZE = 128  # of a head
VOCABULARY = 128256  # columns of what is gathered

Row = tuple[str, int, int]  # op, heads, M


def _to_heads(x: Tensor) -> Tensor:
    """By the group's backend: [M / W, N] to [M, N / W]."""
    world = dist.get_world_size()
    parts = x.unflatten(1, (world, -1)).movedim(1, 0).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts)
    return out.flatten(0, 1)


def _to_sequence(x: Tensor) -> Tensor:
    """The inverse."""
    out, world = torch.empty_like(x), dist.get_world_size()
    dist.all_to_all_single(out, x)
    return out.unflatten(0, (world, -1)).movedim(0, 1).flatten(1)


def _of_all(x: Tensor) -> Tensor:
    """Columns of all ranks."""
    out = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), x)
    return out.movedim(0, 1).flatten(1)


def _listed(call: Callable[[], Tensor], _: int) -> list[Tensor]:
    return [call()]


class Exchanges(Suite):
    """Heads to sequence and back, alone and around their products.

    weft: the op; parts: torch's product and weft's exchange; backend: torch's product, NCCL and what permutes around
    it. Of matmul_all_gather a model's head: all ranks have all tokens, and get the logits of the whole vocabulary.
    ``limit_us``: the time of the bytes that a rank receives over the links; ``product_us``: the product alone. M: the
    whole sequence; a model has as many columns as its heads. Every result is compared with float64.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--ops", type=words, default=OPS, help=f"of {', '.join(OPS)}; by commas")
        parser.add_argument("--heads", type=numbers, default=(), help="by commas")
        parser.add_argument("--m-sizes", type=numbers, default=(), help="by commas")

    def rows(self, given: argparse.Namespace) -> list[Row]:
        on_gpus = given.device == "cuda"
        if wrong := [op for op in given.ops if op not in OPS]:
            raise ValueError(f"--ops: has {', '.join(wrong)}, must be of {', '.join(OPS)}")
        heads = given.heads or ((32, 64) if on_gpus else (2,))
        sizes = given.m_sizes or ((2048, 4096, 8192, 16384, 32768) if on_gpus else (12,))
        return [(op, h, m) for op in given.ops for h in heads for m in sizes]

    def begin(self, run: Run) -> None:
        run.say(f"{'':<28}{'M':>6}" + "".join(f"{n:>10}" for n in (*CONTENDERS, "product", "limit")) + "  us")

    def measure(self, row: Row, run: Run) -> None:
        op, heads, m = row
        torch.manual_seed(1 + dist.get_rank())
        hidden, world = heads * SIZE, run.world
        dtype = torch.bfloat16 if run.on_gpus else torch.float32
        back = op in ("heads_back", "all_to_all_matmul")
        head = op == "matmul_all_gather"
        columns = VOCABULARY // world if head and run.on_gpus else hidden
        rows = m if back or head else m // world
        x = random_tensor((rows, hidden // world if back else hidden), dtype, run.device)
        weight = random_tensor((hidden, columns), dtype, run.device) / hidden**0.5
        dist.broadcast(x if head else weight, 0)
        calls, expected = _bench_of(op, x, weight)
        flops = 2.0 * x.numel() * columns if "matmul" in op else 0.0
        short = m * heads <= 1 << 18
        schedule = Schedule(10 if short else 4) if run.on_gpus else Schedule(2, 1)
        found = timed(
            Bench({name: partial(_listed, f) for name, f in calls.items()}, [expected], 1, flops),
            *(schedule, run.mode, run.device),
        )
        cells = {f"{name}_us": found.medians.get(name) for name in (*CONTENDERS, "product")}
        received = rows * columns * x.itemsize * (world - 1) if head else x.nbytes * (world - 1) / world
        limit = round(received / LINK_BYTES_PER_US, 2) if run.on_gpus else None
        run.rows.append({"op": op, "heads": heads, "M": m, **cells, "limit_us": limit})
        text = found.cells([*CONTENDERS, "product"]) + f"{limit or '-':>10}"
        run.say(f"{op} {heads:<{27 - len(op)}}{m:>6}{text}  {found.algorithm}", *found.problems)
        run.wrong |= bool(found.problems)


def _bench_of(op: str, x: Tensor, weight: Tensor) -> tuple[dict[str, Callable[[], Tensor]], Expected]:
    calls: dict[str, Callable[[], Tensor]]
    if op == "heads":
        want = _to_heads(x).double()
        calls = {"weft": lambda: one_shot_all_to_all(x, 1, 0), "backend": lambda: _to_heads(x)}
    elif op == "heads_back":
        want = _to_sequence(x).double()
        calls = {"weft": lambda: one_shot_all_to_all(x, 0, 1), "backend": lambda: _to_sequence(x)}
    elif op == "matmul_all_to_all":
        want = _to_heads(x.double() @ weight.double())
        calls = {
            "weft": lambda: fused_matmul_all_to_all(x, weight, 0),
            "parts": lambda: one_shot_all_to_all(x @ weight, 1, 0),
            "backend": lambda: _to_heads(x @ weight),
            "product": lambda: x @ weight,
        }
    elif op == "matmul_all_gather":
        want = _of_all(x.double() @ weight.double())
        calls = {
            "weft": lambda: fused_matmul_all_gather(x, weight),
            "parts": lambda: one_shot_all_gather(x @ weight, -1),
            "backend": lambda: _of_all(x @ weight),
            "product": lambda: x @ weight,
        }
    else:
        rows = _to_sequence(x)
        want = rows.double() @ weight.double()
        calls = {
            "weft": lambda: fused_all_to_all_matmul(x, weight, 0),
            "parts": lambda: one_shot_all_to_all(x, 0, 1) @ weight,
            "backend": lambda: _to_sequence(x) @ weight,
            "product": lambda: rows @ weight,
        }
    if "matmul" in op:
        return calls, of_products(want, want.abs(), 2, x.dtype)
    return calls, Expected(want, torch.zeros_like(want))


SUITE = Exchanges()
