"""The table on the terminal, and the files of results: ``<device>-x<world>-<op or suite>.json`` or ``.txt``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("weft_us", "unfused_us", "torch_us", "limit_us")
HEAD = f"{'row':<30}{'M':>6}{'K':>7}{'N':>10}  {'mode':<6}{'weft':>9}{'unfused':>9}{'torch':>9}{'limit':>9}"
HEAD += f"{'peer/weft':>11}{'weft/limit':>11}  algorithm"


def best_peer(row: dict[str, Any]) -> float | None:
    peers = [row[c] for c in ("unfused_us", "torch_us") if row[c] is not None]
    return min(peers) if peers else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below is not None and above > 0 and below > 0 else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    logs = [math.log(v) for v in values if v is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _cell(value: float | None, digits: int, width: int = 9) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


def lines_of(row: dict[str, Any]) -> list[str]:
    """What is printed of a row, below ``HEAD``: microseconds a call; ``peer/weft`` above 1 means weft is faster."""
    times = "".join(_cell(row[c], 1) for c in COLUMNS)
    ratios = _cell(ratio(best_peer(row), row["weft_us"]), 2, 11)
    ratios += _cell(ratio(row["weft_us"], row["limit_us"]), 2, 11)
    shape = f"{row['M']:>6}{row['K'] or '-':>7}{row['N']:>10}"
    line = f"{row['name']:<30}{shape}  {row['mode']:<6}{times}{ratios}  {row['algorithm']}"
    return [line, *([f"    {row['error']}"] if row["error"] else [])]


def means(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each op and mode."""
    lines = []
    for op, mode in sorted({(row["op"], row["mode"]) for row in rows}):
        of = [row for row in rows if (row["op"], row["mode"]) == (op, mode)]
        peers = geometric_mean(ratio(best_peer(row), row["weft_us"]) for row in of)
        limits = geometric_mean(ratio(row["weft_us"], row["limit_us"]) for row in of)
        slower = sum((r := ratio(best_peer(row), row["weft_us"])) is not None and r < 1 for row in of)
        lines.append(
            f"{op} {mode}, geometric means of {len(of)} rows: "
            f"best peer / weft {_cell(peers, 2, 0)}, weft / limit {_cell(limits, 2, 0)}; slower in {slower}"
        )
    return lines


def keep_under_its_date(path: Path) -> None:
    """A results file of this name gets its date after the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        # No parser: what was measured just now is not to be lost over a file that was cut off.
        date = re.search(r'^(?:.*"date": ")?(\d{4}-[\d-]+)[ T](\d+):(\d+)', path.read_text(), re.MULTILINE)
        path.rename(path.with_stem("-".join((path.stem, *(date.groups() if date else ("undated",))))))


def by_file(rows: list[dict[str, Any]], suite: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each results file, by its op or by the suite."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["op"] if suite == "ops" else suite, []).append(row)
    return dict(sorted(found.items()))


def write(
    rows: list[dict[str, Any]], meta: dict[str, Any], folder: Path, suite: str, more: dict[str, Any]
) -> list[Path]:
    """One file for each op of suite "ops", or of the suite; what stood there is kept, with its date after its name.

    Args:
        more: stands beside the rows in the file.
    """
    written = []
    for name, of in by_file(rows, suite).items():
        path = folder / f"{meta['device']}-x{meta['world']}-{name}.json"
        keep_under_its_date(path)
        lines = ",\n".join("    " + json.dumps(row) for row in of)
        parts = "".join(f',\n  "{key}": {json.dumps(value)}' for key, value in more.items())
        path.write_text(f'{{\n  "meta": {json.dumps(meta)},\n  "rows": [\n{lines}\n  ]{parts}\n}}\n')
        written.append(path)
    return written


def write_text(path: Path, lines: list[str]) -> Path:
    """What a run printed."""
    keep_under_its_date(path)
    path.write_text("\n".join(lines) + "\n")
    return path
