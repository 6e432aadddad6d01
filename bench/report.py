"""The table on the terminal, and the rows as JSON: ``<device>-x<world>-<op>.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("weft_us", "unfused_us", "torch_us", "limit_us")
_HEAD = f"{'row':<30}{'M':>6}{'K':>7}{'N':>10}  {'mode':<6}{'weft':>9}{'unfused':>9}{'torch':>9}{'limit':>9}"


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


def result_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines to print. Times are microseconds a call; ``peer/weft`` above 1 means weft is faster."""
    lines = [f"{_HEAD}{'peer/weft':>11}{'weft/limit':>11}  algorithm"]
    for row in rows:
        times = "".join(_cell(row[c], 1) for c in COLUMNS)
        ratios = _cell(ratio(best_peer(row), row["weft_us"]), 2, 11) + _cell(
            ratio(row["weft_us"], row["limit_us"]), 2, 11
        )
        shape = f"{row['M']:>6}{row['K'] or '-':>7}{row['N']:>10}"
        lines.append(f"{row['name']:<30}{shape}  {row['mode']:<6}{times}{ratios}  {row['algorithm']}")
        if row["error"]:
            lines.append(f"    {row['error']}")
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
    if path.exists():
        # No parser: what was measured just now is not to be lost over a file that was cut off.
        date = re.search(r'"date": "([\d-]+)[ T](\d+):(\d+)', path.read_text())
        path.rename(path.with_stem("-".join((path.stem, *(date.groups() if date else ("undated",))))))


def write(rows: list[dict[str, Any]], meta: dict[str, Any], folder: Path) -> list[Path]:
    """One file for each op that was measured; what stood there is kept, with its date after its name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op in sorted({row["op"] for row in rows}):
        path = folder / f"{meta['device']}-x{meta['world']}-{op}.json"
        keep_under_its_date(path)
        lines = ",\n".join("    " + json.dumps(row) for row in rows if row["op"] == op)
        path.write_text(f'{{\n  "meta": {json.dumps(meta)},\n  "rows": [\n{lines}\n  ]\n}}\n')
        written.append(path)
    return written
