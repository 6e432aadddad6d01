"""Predicted microseconds of the ops without products, against all that was measured of them."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
from weft.kernels.all_reduce import configs
from weft.kernels.all_reduce_rms_norm import configs as norms
from weft.kernels.all_reduce_rms_norm.configs import estimate_all_reduce_rms_norm_us
from weft.kernels.device.comm.exchange_time import estimate_all_gather_us, estimate_reduce_scatter_us
from weft.kernels.device.comm.ll_exchange import VECTOR

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FILES = [
    "h100-x2-all_reduce",
    "h100-x3-all_reduce",
    "h100-x4-all_reduce",
    "h200-x2-all_reduce",
    "h200-x4-all_reduce",
    "h100-x2-all_gather",
    "h100-x2-reduce_scatter",
    "h100-x4-all_gather",
    "h100-x4-reduce_scatter",
    "h100-x2-all_reduce_rms_norm",
    "h200-x2-all_reduce_rms_norm",
    "h200-x4-all_reduce_rms_norm",
]


class Row(NamedTuple):
    op: str
    world: int
    rows: int
    columns: int
    us: float

    @property
    def log_ratio(self) -> float:
        """Of what is predicted to what was measured."""
        nbytes = self.rows * self.columns * 2
        predicted = {
            "all_reduce": lambda: configs.estimate_all_reduce_us(nbytes, self.world),
            "all_gather": lambda: estimate_all_gather_us(nbytes // self.world, self.world),
            "reduce_scatter": lambda: estimate_reduce_scatter_us(nbytes // self.world, self.world),
            "all_reduce_rms_norm": lambda: estimate_all_reduce_rms_norm_us(
                self.rows, self.columns * 2 // VECTOR, self.world
            ),
        }
        return math.log(predicted[self.op]() / self.us)


def measured(file: str) -> list[Row]:
    """Of CUDA graphs."""
    found = json.loads((RESULTS / f"{file}.json").read_text())
    world = int(found["meta"]["world"])
    return [
        Row(r["op"], world, r["M"], r["N"], r["weft_us"])
        for r in found["rows"]
        if r["mode"] == "graph" and r["dtype"] == "bfloat16"
    ]


def of_norm_kinds() -> list[Row]:
    """The usual norm and LayerNorms between 2 H100, by another benchmark."""
    text = (RESULTS / "h100-x2-norm-kinds.txt").read_text()
    rows = [
        [float(cell.split()[0]) for cell in line.strip("|\n ").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    # The second table, of few columns, has a LayerNorm beside the usual norm.
    columns = [(r[0], r[1], us) for r in rows for us in (r[2:3] if len(r) > 5 else r[2:4])]
    return [Row("all_reduce_rms_norm", 2, int(m), int(n), us) for m, n, us in columns]


@pytest.mark.parametrize("file", FILES)
def test_each_file_is_met(file: str) -> None:
    off = [row.log_ratio for row in measured(file)]
    assert len(off) >= 14
    # On average 5 to 10 %, with a bias of 6 % at most: what two runs of one pair differ by.
    assert fmean(map(abs, off)) < 0.105, off
    assert abs(fmean(off)) < 0.065, off


def test_all_rows_are_met() -> None:
    rows = [row for file in FILES for row in measured(file)]
    assert len(rows) > 160
    off = {row: row.log_ratio for row in rows}
    assert fmean(map(abs, off.values())) < 0.07
    assert abs(fmean(off.values())) < 0.02
    # Between 2 ranks: all-reduces of 3 MiB on either GPU, which this benchmark finds 5 us slower than another one does
    # (h100-x2-all-reduce-forms.txt), an all-reduce of 16 KiB, and a reduce-scatter of 16 MiB.
    far = {row: each for row, each in off.items() if abs(each) > math.log(1.25)}
    assert len(far) <= 4, far
    assert all(abs(each) < math.log(1.4) for each in far.values()), far


def test_norms_of_many_rows_and_of_both_kinds_are_met() -> None:
    """By a benchmark in which all take 10 % longer than in the files above."""
    rows = of_norm_kinds()
    assert len(rows) == 12 + 8 + 12 + 10 and max(row.rows for row in rows) == 4096
    off = [row.log_ratio for row in rows]
    assert fmean(map(abs, off)) < 0.15, off
    assert all(abs(each) < math.log(1.42) for each in off), off
    large = [row.log_ratio for row in rows if row.rows * row.columns >= 4096 * 4096]
    assert len(large) == 8 and all(abs(each) < 0.05 for each in large), large


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_more_takes_longer(world: int) -> None:
    """Also where another form is chosen, and where one launch becomes several."""
    sizes = [1 << i for i in range(6, 31)]
    for us in (
        [estimate_all_gather_us(size, world) for size in sizes],
        [estimate_reduce_scatter_us(size, world) for size in sizes],
        [configs.estimate_all_reduce_us(size, world) for size in sizes],
        [estimate_all_reduce_rms_norm_us(size, 512, world) for size in sizes[:-10]],
    ):
        assert us[0] > 3
        assert all(b >= a for a, b in pairwise(us)), us


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_form_counts(world: int) -> None:
    """One trip of little is faster, two trips of parts of much are not slower."""
    forms = [configs.AllReduceConfig(form) for form in ("one_shot", "two_shot")]
    little = [configs.estimate_all_reduce_us(1024, world, form) for form in forms]
    assert little[0] < little[1]
    much = [configs.estimate_all_reduce_us(configs.MAX_BYTES, world, form) for form in forms]
    assert much[0] > 1.4 * much[1] if world > 2 else 0 < much[1] - much[0] < 2
    assert configs.estimate_all_reduce_us(configs.MAX_BYTES, world) == configs.estimate_all_reduce_us(
        configs.MAX_BYTES, world, configs.choose_all_reduce(configs.MAX_BYTES, world)
    )


def test_each_launch_of_a_norm_counts() -> None:
    one = norms.MAX_BYTES // (512 * VECTOR)
    config = norms.choose_all_reduce_rms_norm(4 * one, 512, 2)
    single = estimate_all_reduce_rms_norm_us(one, 512, 2, config)
    assert estimate_all_reduce_rms_norm_us(4 * one, 512, 2, config) == pytest.approx(4 * single)
