"""What the suite plot draws of suites other than ops, and what it says where it cannot draw."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from suites import plot

ROW = {
    "op": "all_reduce",
    "mode": "eager",
    "M": 4,
    "K": None,
    "name": "all_reduce",
    "N": 8,
    "dtype": "float32",
    "contenders_us": {"weft": 3.0},
    "limit_us": None,
}
META = {"world": 2, "device": "cpu", "date": "today"}


def said(tmp_path: Path, text: str, mode: str = "graph", *, capsys: Any) -> str:
    results = tmp_path / "results.json"
    results.write_text(text)
    assert plot.SUITE.start(Namespace(file=results, mode=mode, output=None), []) == 1
    assert not results.with_suffix(".svg").exists()
    error = str(capsys.readouterr().err)
    assert error.startswith(f"{results}: ") and error.count("\n") == 1
    return error


def test_reasons(tmp_path: Path, capsys: Any) -> None:
    how: dict[str, Any] = {"capsys": capsys}
    cpu = json.dumps({"meta": META, "rows": [ROW]})
    assert "mode: no row is of mode 'graph'; --mode may be eager" in said(tmp_path, cpu, **how)
    no_time = "has no row with a time of weft ('weft_us', microseconds)"
    assert no_time in said(tmp_path, json.dumps({"meta": META, "rows": []}), **how)
    none = json.dumps({"meta": META, "rows": [{**ROW, "contenders_us": {"weft": None}}]})
    assert no_time in said(tmp_path, none, "eager", **how)
    steps = json.dumps({"meta": META, "rows": [{"contender": "weft", "ms": 3.0}]})
    assert no_time in said(tmp_path, steps, **how)
    assert "KeyError('meta'): must be" in said(tmp_path, json.dumps({"rows": [ROW]}), **how)
    assert "must be what --results of a suite writes as JSON" in said(tmp_path, "[1]", **how)
    assert "Expecting value" in said(tmp_path, "no JSON", **how)


def drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    results = tmp_path / "h200-x2-own_suite.json"
    results.write_text(json.dumps({"meta": {**META, "device": "h200"}, "rows": rows}))
    assert plot.SUITE.start(Namespace(file=results, mode=None, output=None), []) == 0
    picture = results.with_suffix(".svg").read_text()
    assert "<title>own_suite on 2 H200, today: us (lower is better)</title>" in picture
    return picture


def test_a_suite_with_contenders_of_its_own(tmp_path: Path) -> None:
    """A panel for each op and model; the limit is what the rows say, or the product alone."""
    row = {"op": "layer", "model": "small", "M": 8, "H": 4, "weft_us": 4.0, "limit_us": 3.0}
    rows = [{**row, "torch_us": 8.0, "best_us": 6.0}, {**row, "M": 16, "weft_us": 7.0, "torch_us": None}]
    picture = drawn(tmp_path, [*rows, {**rows[0], "model": "large"}])
    for words in ("layer small", "layer large", "weft", "torch", "best", "limit"):
        assert picture.count(f">{words}<") == 1, words
    assert "product" not in picture and "NCCL" not in picture
    assert "<title>weft, 16: 7 us</title>" in picture and "<title>best, 8: 6 us</title>" in picture
    strokes = re.findall(r'<path class="line (\w+)" d="M0 6h22"', picture)
    assert len(strokes) == len(set(strokes)) == 4, "each has a colour of its own"
    picture = drawn(tmp_path, [{"M": 8, "H": 4, "V": 6, "weft_us": 4.0, "product_us": 3.0}])
    assert ">H = 4, V = 6<" in picture and ">limit<" in picture and ">product<" not in picture


def test_a_limit_far_below_all_times_is_not_drawn(tmp_path: Path) -> None:
    rows = [{"M": m, "V": 6, "weft_us": us, "limit_us": 3.0} for m, us in ((8, 5.0), (16, 7.0))]
    assert ">limit<" in drawn(tmp_path, rows)
    assert ">limit<" not in drawn(tmp_path, [{**row, "limit_us": 2.0} for row in rows])
