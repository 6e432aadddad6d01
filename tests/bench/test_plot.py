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
    assert "rows: there is none" in said(tmp_path, json.dumps({"meta": META, "rows": []}), **how)
    none = json.dumps({"meta": META, "rows": [{**ROW, "contenders_us": {"weft": None}}]})
    assert "rows: none has a time" in said(tmp_path, none, "eager", **how)
    assert "has no 'meta'" in said(tmp_path, json.dumps({"rows": [ROW]}), **how)
    assert "Expecting value" in said(tmp_path, "no JSON", **how)
