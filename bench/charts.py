"""A chart of a run of the suite ops: every contender and the limit of the hardware over the size, on two log axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from suite import CPU_NOTE
from weft.fused_ops.pictures.svg import box, framed, label, legend_svg, path, stroke

CURVES = {
    "weft": ("weft", "blue"),
    "unfused": ("NCCL", "grey"),
    "torch": ("torch.ops.symm_mem", "ochre"),
    "torch two-shot": ("torch two-shot", "brown"),
    "torch native": ("torch native", "violet"),
    "torch copies": ("torch copies", "violet"),
}
LIMIT = "limit"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Row = dict[str, Any]
Points = dict[str, list[tuple[float, float]]]
_WIDTH, _LEFT, _RIGHT, _GAP = 760, 54, 26, 26  # of the picture, beside a panel, below it
_LETTER = 6.7


class Scale(NamedTuple):
    """A logarithmic axis: from ``first`` at ``begin`` to ``last`` at ``end``."""

    first: float
    last: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        part = math.log(value / self.first) / (math.log(self.last / self.first) or 1.0)
        return self.begin + (self.end - self.begin) * part


class Measure(NamedTuple):
    """What is drawn over the size.

    Attributes:
        unit: what stands at the axis.
        of: a row's value of so many microseconds.
        size: of a row.
        in_bytes: whether sizes are bytes.
    """

    unit: str
    of: Callable[[Row, float], float]
    size: Callable[[Row], float]
    in_bytes: bool


def measure_of(meta: dict[str, Any], row: Row) -> Measure:
    """FLOP/s of ops with a matmul, else microseconds; over rows, or bytes of a collective alone."""
    if row["K"]:
        unit, scale = ("GFLOP/s a rank", 1e3) if meta["device"] == "cpu" else ("TFLOP/s a GPU", 1e6)
        scale *= meta["world"]

        def rate(r: Row, us: float) -> float:
            return float(2 * r["M"] * r["K"] * r["N"] / us / scale)

        return Measure(unit, rate, lambda r: r["M"], in_bytes=False)
    if row["op"] in ALONE:
        return Measure("us", lambda r, us: us, lambda r: r["M"] * r["N"] * BYTES[r["dtype"]], in_bytes=True)
    return Measure("us", lambda r, us: us, lambda r: r["M"], in_bytes=False)


def chosen_rows(rows: Sequence[Row], mode: str | None) -> tuple[str, list[Row]]:
    """The mode that is drawn, CUDA graphs where they were measured and none is asked for, and its rows.

    Raises:
        ValueError: there is none.
    """
    modes = sorted({row["mode"] for row in rows}, key=lambda of: of != "graph")
    if not modes:
        raise ValueError("rows: there is none, must be what bench/run.py ops --results writes")
    if mode is not None and mode not in modes:
        raise ValueError(f"mode: no row is of mode {mode!r}; --mode may be {' or '.join(modes)}")
    mode = mode or modes[0]
    return mode, [row for row in rows if row["mode"] == mode]


def points(rows: Sequence[Row], measure: Measure) -> Points:
    """(size, value) of each contender, and of the limit, by size; without those that have no time."""
    found: Points = {}
    for row in rows:
        for name, us in {**row["contenders_us"], LIMIT: row["limit_us"]}.items():
            if us is not None and us > 0:
                found.setdefault(name, []).append((measure.size(row), measure.of(row, us)))
    return {name: sorted(of) for name, of in found.items()}


def chart(content: dict[str, Any], mode: str | None = None) -> str:
    """The SVG of a results file of one op: a panel for each layer, or hidden size.

    Raises:
        ValueError: no row is of this mode, or none has a time.
        KeyError: it is no such file.
    """
    meta, (mode, rows) = content["meta"], chosen_rows(content["rows"], mode)
    measure = measure_of(meta, rows[0])
    panels: dict[str, list[Row]] = {}
    for row in rows:
        shape = f", N = {row['N']}" if not measure.in_bytes else ""
        shape = f", K = {row['K']}{shape}" if row["K"] else shape
        panels.setdefault(row["name"] + shape, []).append(row)
    drawn = {title: _seen(points(of, measure)) for title, of in panels.items()}
    drawn = {title: curves for title, curves in drawn.items() if curves}
    if not drawn:
        raise ValueError("rows: none has a time, so there is nothing to draw")
    cpu, columns = meta["device"] == "cpu", 1 if len(drawn) == 1 else 2
    device = f"{meta['world']} CPU ranks" if cpu else f"{meta['world']} {meta['device'].upper()}"
    better = "lower" if measure.unit == "us" else "higher"
    title = f"{rows[0]['op']} on {device}, {mode}, {meta['date'][:10]}: {measure.unit} ({better} is better)"
    there = dict.fromkeys(name for curves in drawn.values() for name in curves)
    names = {n: _words(n, rows[0], cpu) for n in sorted(there, key=[*CURVES, *there].index)}
    marks = {words: stroke(*_pen(name)) for name, words in names.items()}
    parts, y = legend_svg(marks, (10, 52 if cpu else 36), _WIDTH)
    width, height = _WIDTH / columns, 330 if columns == 1 else 230
    for i, (words, of_name) in enumerate(drawn.items()):
        top = y + 12 + i // columns * (height + _GAP)
        curves = {name: of_name[name] for name in names if name in of_name}
        parts.append(label(i % columns * width + 10, top + 12, words, bold=True))
        parts += _panel(curves, names, measure, (i % columns * width, top, width, height))
    bottom = y + 12 + -(-len(drawn) // columns) * (height + _GAP)
    return framed(title, (_WIDTH, bottom), parts, CPU_NOTE if cpu else "")


def _seen(curves: Points) -> Points:
    """Without the limit where it is below all times, as that of small sizes is by far."""
    timed = [value for name, of in curves.items() if name != LIMIT for _, value in of]
    seen = {
        name: [(size, value) for size, value in of if timed and value >= min(timed)]
        for name, of in curves.items()
    }
    return {name: of for name, of in seen.items() if of}


def _words(name: str, row: Row, cpu: bool) -> str:
    """A contender as the legend names it."""
    if name == LIMIT:
        return "limit: cuBLAS alone, or bytes / link" if row["K"] else "limit: bytes / link"
    if name != "unfused":
        return CURVES.get(name, (name, ""))[0]
    backend = "gloo" if cpu else "NCCL"
    return f"{backend} + {'torch.mm' if cpu else 'cuBLAS'}" if row["K"] else backend


def _pen(name: str) -> tuple[str, float, str]:
    if name == LIMIT:
        return "ink", 1.3, "4 2"
    return CURVES.get(name, (name, "violet"))[1], 2.5 if name == "weft" else 1.3, ""


def _steps(first: float, last: float) -> list[float]:
    """Round numbers, from the last that is not above ``first`` to the first that is not below ``last``."""
    each = (1, 2, 5) if last > 5 * first else (1, 1.5, 2, 3, 4, 5, 6, 8)
    every = [step * 10.0**decade for decade in range(-4, 9) for step in each]
    begin = max(i for i, value in enumerate(every) if value <= first or i == 0)
    end = min(i for i, value in enumerate(every) if value >= last or i == len(every) - 1)
    return every[begin : max(end, begin + 1) + 1]


def _size(value: float, in_bytes: bool) -> str:
    if not in_bytes:
        return f"{value:.0f}"
    power = min(2, int(math.log2(value)) // 10)
    return f"{value / 2 ** (10 * power):g} {('B', 'KiB', 'MiB')[power]}"


def _panel(
    curves: Points, names: Mapping[str, str], measure: Measure, place: tuple[float, float, float, float]
) -> list[str]:
    left, top, width, height = place
    every = [point for of in curves.values() for point in of]
    sizes = [size for size, _ in every]
    steps = _steps(min(value for _, value in every), max(value for _, value in every))
    x = Scale(min(sizes), max(sizes), left + _LEFT, left + width - _RIGHT)
    y = Scale(steps[0], steps[-1], top + height - 34, top + 26)
    parts = []
    powers = range(math.ceil(math.log2(x.first)), math.floor(math.log2(x.last)) + 1)
    every_nth = 1 + len(powers) * int(_LETTER * 9) // int(x.end - x.begin)
    for size in (2.0**power for power in powers[::every_nth]):
        parts.append(path(f"M{x.at(size):.1f} {y.begin:.1f}V{y.end:.1f}", "grid"))
        parts.append(label(round(x.at(size), 1), y.begin + 15, _size(size, measure.in_bytes), "middle"))
    for step in steps:
        parts.append(path(f"M{x.begin:.1f} {y.at(step):.1f}H{x.end:.1f}", "grid"))
        parts.append(label(x.begin - 6, round(y.at(step) + 4, 1), f"{step:g}", "end"))
    axis = "bytes" if measure.in_bytes else "rows (M)"
    parts.append(label(x.end, y.begin + 31, f"{measure.unit} over {axis}", "end"))
    for name in reversed(curves):
        colour, thick, dashes = _pen(name)
        places = [(f"{x.at(size):.1f}", f"{y.at(value):.1f}") for size, value in curves[name]]
        parts.append(path("M" + "L".join(map(" ".join, places)), colour, thick, dashes))
        if name == LIMIT:
            continue
        for (cx, cy), (size, value) in zip(places, curves[name], strict=True):
            tip = f"{names[name]}, {_size(size, measure.in_bytes)}: {value:.4g} {measure.unit}"
            parts.append(box(float(cx) - 2.5, float(cy) - 2.5, (5, 5), colour, tip))
    return parts
