"""What bench/plot.py says where it cannot draw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import plot

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


def said(tmp_path: Path, text: str, *options: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    results = tmp_path / "results.json"
    results.write_text(text)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(results), *options])
    with pytest.raises(SystemExit) as end:
        plot.main()
    assert end.value.code == 1 and not results.with_suffix(".svg").exists()
    error = str(capsys.readouterr().err)
    assert error.startswith(f"plot.py: {results}: ") and error.count("\n") == 1
    return error


def test_reasons(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"capsys": capsys, "monkeypatch": monkeypatch}
    cpu = json.dumps({"meta": META, "rows": [ROW]})
    # CPU ranks have no graphs, which are drawn by default.
    assert "no row of an all-reduce is of mode 'graph'; --mode may be eager" in said(tmp_path, cpu, **how)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # there is none
    text = said(tmp_path, cpu, "--mode", "eager", **how)
    assert "matplotlib draws the picture: pip install 'weft-nvlink[plot]'" in text
    none = json.dumps({"meta": META, "rows": [{**ROW, "op": "matmul_all_reduce"}]})
    assert "there is no row of an all-reduce at all" in said(tmp_path, none, **how)
    assert "has no 'meta'" in said(tmp_path, json.dumps({"rows": [ROW]}), **how)
    assert "Expecting value" in said(tmp_path, "no JSON", **how)
