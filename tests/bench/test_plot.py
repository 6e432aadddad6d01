"""What the suite plot says where it cannot draw."""

from __future__ import annotations

import json
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
    # CPU ranks have no graphs, which are drawn by default.
    assert "no row of an all-reduce is of mode 'graph'; --mode may be eager" in said(tmp_path, cpu, **how)
    none = json.dumps({"meta": META, "rows": [{**ROW, "op": "matmul_all_reduce"}]})
    assert "there is no row of an all-reduce at all" in said(tmp_path, none, **how)
    assert "has no 'meta'" in said(tmp_path, json.dumps({"rows": [ROW]}), **how)
    assert "Expecting value" in said(tmp_path, "no JSON", **how)
