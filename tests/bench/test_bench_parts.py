"""The registry, the schedule and the report."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import charts
import registry
import report
import timer

BENCH = str(Path(__file__).parents[2] / "bench")


def test_the_whole_table() -> None:
    rows = registry.select_rows("cuda")
    of = {op: [r for r in rows if r.op == op] for op in registry.OPS}
    assert {op: len(found) for op, found in of.items()} == {
        "all_gather_matmul": 6 * 6 * 2,
        "matmul_reduce_scatter": 5 * 6 * 2,
        "all_gather": (26 + 3) * 2,
        "reduce_scatter": (26 + 3) * 2,
        "all_to_all": (26 + 3) * 2,
        "all_reduce": 26 * 2,
        "all_reduce_rms_norm": 3 * 7 * 2,
        "matmul_all_reduce": 5 * 6 * 2,
    }
    assert len({r.id for r in rows}) == len(rows)
    largest = max(of["all_reduce"], key=lambda r: r.N)
    assert largest.N * largest.dtype.itemsize == 64 << 20


def test_every_row_divides_by_up_to_8_ranks() -> None:
    for row in registry.select_rows("cuda"):
        if row.K is not None:
            assert row.M % 8 == 0 or row.op == "matmul_all_reduce"
            assert (row.N if row.op == "all_gather_matmul" else row.K) % 8 == 0


def test_selection() -> None:
    rows = registry.select_rows(
        "cuda", ops=("matmul_reduce_scatter",), layers=("70b",), m_sizes=(256,), modes=("graph",)
    )
    assert [(r.name, r.M, r.K, r.N, r.mode) for r in rows] == [
        ("llama70b.o", 256, 8192, 8192, "graph"),
        ("llama70b.down", 256, 28672, 8192, "graph"),
    ]


def test_some_layers_are_measured_only_where_they_are_named() -> None:
    both = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for layers in ((), ("70b",)):
        assert not {r.name for r in registry.select_rows("cuda", both, layers)} & set(registry.ON_REQUEST)
    assert {r.name for r in registry.select_rows("cuda", both, ("last",))} == set(registry.LAST_DIMENSION)
    assert {r.op for r in registry.select_rows("cuda", both, ("last",))} == set(both[:2])


@pytest.mark.parametrize(
    ("device", "selection", "words"),
    [
        ("cuda", {"ops": ("matmul",)}, "ops: .*'matmul'"),
        ("cuda", {"layers": ("qkv", "llama9b")}, "layers: .*'llama9b'"),
        ("cpu", {"modes": ("graph",)}, "modes: .*'graph'.*cpu"),
    ],
)
def test_unknown_selection(device: str, selection: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        registry.select_rows(device, **selection)


def test_long_matmuls_get_fewer_calls() -> None:
    assert timer.schedule("cuda", 1e9, 0).calls > timer.schedule("cuda", 5e12, 0).calls > 0


@pytest.mark.parametrize("contenders", range(9))
def test_each_contender_follows_each_other_one_equally_often(contenders: int) -> None:
    rounds = timer.rounds_of(contenders)
    assert 5 <= rounds <= 8
    # Round 0 is the warm-up: what it ends with is what the first counted round follows.
    orders = [timer.order(contenders, number) for number in range(rounds + 1)]
    assert all(sorted(order) == list(range(contenders)) for order in orders)
    line = [i for order in orders for i in order][max(0, contenders - 1) :]
    followed = Counter(pairwise(line))
    if contenders > 1:
        times = rounds // (contenders - 1)
        assert followed == dict.fromkeys(permutations(range(contenders), 2), times)


def test_more_contenders_than_can_be_ordered_are_refused() -> None:
    with pytest.raises(ValueError, match="contenders: must be at most 13, got 14"):
        timer.order(14, 0)


def head_starts(rank: int, world: int) -> list[float]:
    """Of three contenders, of which the second needs the longest one, on rank 1."""
    sys.path.append(BENCH)
    import timer

    cpu = torch.device("cpu")
    series = [timer.Series(lambda _: (), 1, timer.Schedule(calls=1), "eager", cpu) for _ in range(3)]
    series[1].head_start_us = 1000.0 + rank
    timer.same_head_start(series, cpu)
    return [one.head_start_us for one in series]


def test_all_contenders_of_all_ranks_get_the_longest_head_start() -> None:
    assert run_ranks(head_starts, 2) == [[1001.0] * 3] * 2


def row(**change: Any) -> dict[str, Any]:
    base = {
        "name": "a", "op": "all_reduce", "M": 1, "K": None, "N": 8, "dtype": "bfloat16", "mode": "eager",
        "algorithm": "push", "weft_us": 2.0, "unfused_us": 8.0, "torch_us": 4.0, "limit_us": 1.0,
        "contenders_us": {"weft": 2.0, "unfused": 8.0, "torch": 4.0}, "error": None,
    }  # fmt: skip
    return base | change


def test_best_peer_is_the_faster_one() -> None:
    assert report.best_peer(row()) == 4.0
    assert report.best_peer(row(torch_us=None)) == 8.0
    assert report.best_peer(row(torch_us=None, unfused_us=None)) is None


def test_geometric_mean_skips_what_is_missing() -> None:
    assert report.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert report.geometric_mean([None]) is None


def test_table_shows_errors_and_counts_what_is_slower() -> None:
    rows = [row(), row(weft_us=5.0), row(weft_us=None, error="weft: wrong result")]
    assert [len(report.lines_of(r)) for r in rows] == [1, 1, 2]
    assert "weft: wrong result" in report.lines_of(rows[2])[1]
    (line,) = report.means(rows)
    assert "best peer / weft 1.26" in line and line.endswith("slower in 1")


def test_write_keeps_ops_apart(tmp_path: Path) -> None:
    rows = [row(), row(op="all_gather_matmul", K=4), row(N=16)]
    meta = {"device": "h200", "world": 4, "date": "2026-11-21 12:05 UTC"}
    paths = report.write(rows, meta, tmp_path / "new", "ops", {"losses": {"a": [1.0]}})
    assert [p.name for p in paths] == ["h200-x4-all_gather_matmul.json", "h200-x4-all_reduce.json"]
    assert json.loads(paths[1].read_text()) == {
        "meta": meta,
        "rows": [rows[0], rows[2]],
        "losses": {"a": [1.0]},
    }


def test_write_keeps_older_results(tmp_path: Path) -> None:
    """A run of one size would be all that is left of a whole table."""
    (tmp_path / "h200-x4-all_reduce.json").write_text("{")
    for minute in range(3):
        meta = {"device": "h200", "world": 4, "date": f"2026-11-21 12:0{minute} UTC"}
        report.write([row(weft_us=float(minute))], meta, tmp_path, "ops", {})
    assert (tmp_path / "h200-x4-all_reduce-undated.json").read_text() == "{"
    found = {f.name: json.loads(f.read_text())["rows"][0]["weft_us"] for f in tmp_path.glob("*[!d].json")}
    assert found == {
        "h200-x4-all_reduce.json": 2.0,
        "h200-x4-all_reduce-2026-11-21-12-01.json": 1.0,
        "h200-x4-all_reduce-2026-11-21-12-00.json": 0.0,
    }


def test_what_was_printed_is_kept_under_its_date(tmp_path: Path) -> None:
    path = tmp_path / "h200-x2-rings.txt"
    for minute in range(2):
        report.write_text(path, [f"2026-11-21 12:0{minute} UTC", "python bench/run.py rings"])
    assert path.read_text().startswith("2026-11-21 12:01 UTC\npython")
    assert (tmp_path / "h200-x2-rings-2026-11-21-12-00.txt").read_text().startswith("2026-11-21 12:00")


META = {"device": "h200", "world": 4, "date": "2026-11-21 12:00 UTC"}


def test_curves_are_of_one_mode() -> None:
    rows = [row(N=16), row(), row(mode="graph"), row(N=32, limit_us=None)]
    assert charts.chosen_rows(rows, None) == ("graph", [rows[2]])
    mode, eager = charts.chosen_rows(rows, "eager")
    assert (mode, eager) == ("eager", [rows[0], rows[1], rows[3]])
    assert charts.points(eager, charts.measure_of(META, rows[0])) == {
        "weft": [(16, 2.0), (32, 2.0), (64, 2.0)],
        "unfused": [(16, 8.0), (32, 8.0), (64, 8.0)],
        "torch": [(16, 4.0), (32, 4.0), (64, 4.0)],
        "limit": [(16, 1.0), (32, 1.0)],
    }
    with pytest.raises(ValueError, match="mode: no row is of mode 'captured'; --mode may be graph or eager"):
        charts.chosen_rows(rows, "captured")


def test_a_matmul_is_drawn_by_its_rate() -> None:
    """Of a rank: 2 * 512 * 4096 * 6144 / 4 operations in 10 us are 644 TFLOP/s."""
    of = row(op="all_gather_matmul", name="qkv", M=512, K=4096, N=6144, contenders_us={"weft": 10.0})
    drawn = charts.points([of], charts.measure_of(META, of))
    assert drawn["weft"] == [(512, pytest.approx(644.245, rel=1e-5))]
    rows = [of, {**of, "M": 1024}, {**of, "name": "upgate"}]
    picture = charts.chart({"meta": META, "rows": rows}, "qkv", "eager")
    root = ET.fromstring(picture)
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"qkv, K = 4096, N = 6144", "upgate, K = 4096, N = 6144"} <= set(words)
    assert words.count("TFLOP/s a GPU over rows (M)") == 2
    assert "limit: cuBLAS alone, or bytes / link" in words and words.count("weft") == 1
    tips = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "weft, 512: 644.2 TFLOP/s a GPU" in tips and "weft, 1024: 1288 TFLOP/s a GPU" in tips


def test_the_picture_shows_every_contender() -> None:
    rows = [row(), row(N=16, limit_us=2.5, contenders_us={"weft": 3.0, "torch two-shot": 5.0})]
    content: dict[str, Any] = {"meta": META, "rows": rows}
    picture = charts.chart(content, "all_reduce", "eager")
    assert picture == charts.chart(content, "all_reduce", "eager"), "the same numbers give the same file"
    for name in ("weft", "NCCL", "torch.ops.symm_mem", "torch two-shot", "limit: bytes / link"):
        assert f">{name}<" in picture
    root = ET.fromstring(picture)
    (line,) = (
        e.attrib["d"] for e in root.iter("{http://www.w3.org/2000/svg}path") if line_of(e, "blue", "L")
    )
    (first, second) = (tuple(map(float, at.split())) for at in line[1:].split("L"))
    # weft's at 16 bytes and 2 us, and at 32 and 3: the axes are from 16 to 32 and from 1, the limit, to 10.
    lines = [e.attrib["d"] for e in root.iter("{http://www.w3.org/2000/svg}path") if line_of(e, "grid", "H")]
    levels = [float(re.split("[ H]", d)[1]) for d in lines]
    low, high = levels[0], levels[-1]
    for (_, y), us in ((first, 2), (second, 3)):
        assert y == pytest.approx(low + (high - low) * math.log10(us), abs=0.1)
    assert second[0] - first[0] > 600
    content["meta"] = {**META, "device": "cpu"}
    drawn = charts.chart(content, "all_reduce", "eager")
    assert ">gloo<" in drawn and ">NCCL<" not in drawn
    assert (
        "4 CPU ranks" in drawn
        and ">CPU ranks: the protocol, for tests; such times say nothing of GPUs<" in drawn
    )


def line_of(element: ET.Element, colour: str, command: str) -> bool:
    return element.attrib["class"] == f"line {colour}" and command in element.attrib["d"]
