"""The table of all ops."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import registry
import report
import torch
from contenders import LINK_BYTES_PER_US, TABLE
from measure import timed
from parts import HIDDEN
from registry import Row
from suite import Run, Suite, numbers, words
from timer import schedule


def line_of(row: Row, group: str, device: torch.device) -> dict[str, Any]:
    """The row's line of the table: times in microseconds, None where there is none.

    A time is the median of the rounds, ``spread_us`` the least and the greatest of them, each that of the slowest rank.
    ``limit_us`` is the larger of ``product_us``, cuBLAS's time of the product alone, and of the bytes' time over the
    links: a reference, measured too, that repeats to about 5 %, so weft is below it in a few rows.
    """
    bench = TABLE[row.op](row, group, device)
    found = timed(bench, schedule(device.type, bench.flops, row.N), row.mode, device)
    medians = found.medians
    before = medians.get("producer", 0.0)

    def of(*names: str) -> float | None:
        there = [medians[name] - before for name in names if name in medians]
        return round(min(there), 2) if there else None

    limit = None
    if device.type == "cuda":
        limit = round(max(medians.get("product", 0.0), bench.bytes_received / LINK_BYTES_PER_US), 2)
    return {
        "name": row.name,
        "op": row.op,
        "M": row.M,
        "K": row.K,
        "N": row.N,
        "dtype": str(row.dtype).removeprefix("torch."),
        "mode": row.mode,
        "algorithm": found.algorithm,
        "weft_us": of("weft"),
        "unfused_us": of("unfused"),
        "torch_us": of("torch", "torch native", "torch two-shot"),
        "limit_us": limit,
        "product_us": of("product"),
        "contenders_us": {name: of(name) for name in medians if name not in HIDDEN},
        "spread_us": {
            name: [round(us - before, 2) for us in (min(times_us), max(times_us))]
            for name, times_us in found.rounds.items()
            if name != "producer"
        },
        "host_us": {name: us for name, us in found.host_us.items() if name not in HIDDEN},
        "error": "; ".join(found.problems) or None,
    }


class Ops(Suite):
    """Every op, layer and size: weft, "unfused" (NCCL + cuBLAS, of CPU ranks gloo + torch.mm), torch.ops.symm_mem.

    Microseconds a call: the median of the rounds, of the slowest rank, eager or in a CUDA graph ("graph"). Results are
    compared with float64; an op whose result is wrong gets no time, and the exit status is 1. The limit is the larger
    of cuBLAS's time of the product alone and of the bytes' time over the links. Lists are separated by commas. With
    --plot there is a chart of each op, in the folder of --results or the current one.
    """

    plots = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        every = "/".join((*registry.OPS, registry.LAYER_NORM, *registry.SCALED_OPS))
        parser.add_argument("--ops", type=words, default=registry.OPS, help=every)
        parser.add_argument(
            "--layers", type=words, default=(), help="parts of layers' names, as in llama8b,qkv"
        )
        parser.add_argument("--m-sizes", type=numbers, default=(), help="rows of the whole left matrix")
        parser.add_argument(
            "--kib-sizes", type=numbers, default=(), help="of a collective alone: the tensor's KiB"
        )
        parser.add_argument("--modes", type=words, default=(), help="/".join(registry.MODES))

    def rows(self, given: argparse.Namespace) -> Sequence[Row]:
        selection = given.ops, given.layers, given.m_sizes, given.kib_sizes, given.modes
        return registry.select_rows(given.device, *selection)

    def begin(self, run: Run) -> None:
        run.say(report.HEAD)

    def measure(self, row: Row, run: Run) -> None:
        line = line_of(row, run.group.group_name, run.device)
        run.rows.append(line)
        run.wrong |= line["weft_us"] is None
        run.say(*report.lines_of(line))

    def end(self, run: Run) -> None:
        if run.on_gpus:
            run.say(*report.means(run.rows))


SUITE = Ops()
