"""A chart of what a suite has measured: every contender and the limit of the hardware over the size, on log axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from machine import CPU_NOTE
from weft.fused_ops.pictures.svg import box, framed, label, legend_svg, path, stroke

CURVES = {
    "weft": ("weft", "blue"),
    "unfused": ("NCCL", "grey"),
    "torch": ("torch.ops.symm_mem", "ochre"),
    "torch two-shot": ("torch two-shot", "brown"),
    "torch native": ("torch native", "violet"),
    "torch copies": ("torch copies", "violet"),
}
OTHERS = ("ochre", "brown", "violet", "green", "red")  # of contenders that have no colour above
LIMIT = "limit"
NO_TIME = "has no row with a time of weft ('weft_us', microseconds), so there is nothing to draw"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Row = dict[str, Any]
Curve = list[tuple[float, float]]  # (size, value)
Points = dict[str, Curve]
Pen = tuple[str, float, str]
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
    if row.get("K"):
        unit, scale = ("GFLOP/s a rank", 1e3) if meta["device"] == "cpu" else ("TFLOP/s a GPU", 1e6)
        scale *= meta["world"]

        def rate(r: Row, us: float) -> float:
            return float(2 * r["M"] * r["K"] * r["N"] / us / scale)

        return Measure(unit, rate, lambda r: r["M"], in_bytes=False)
    if row.get("op") in ALONE:
        return Measure("us", lambda r, us: us, lambda r: r["M"] * r["N"] * BYTES[r["dtype"]], in_bytes=True)
    return Measure("us", lambda r, us: us, lambda r: r["M"], in_bytes=False)


def chosen_rows(rows: Sequence[Row], mode: str | None) -> tuple[str, list[Row]]:
    """The mode that is drawn, CUDA graphs where they were measured and none is asked for, and its rows.

    Raises:
        ValueError: there is none.
    """
    modes = sorted({row.get("mode", "") for row in rows if times_of(row)}, key=lambda of: of != "graph")
    if not modes:
        raise ValueError(NO_TIME)
    if mode is not None and mode not in modes:
        raise ValueError(f"mode: no row is of mode {mode!r}; --mode may be {' or '.join(modes)}")
    mode = mode or modes[0]
    return mode, [row for row in rows if row.get("mode", "") == mode]


def times_of(row: Row) -> dict[str, float]:
    """Microseconds of each contender, and of the limit, else of the product alone; none without weft's time."""
    named = {name.removesuffix("_us"): us for name, us in row.items() if name.endswith("_us")}
    product = named.pop("product", None)
    limit = named.pop(LIMIT, product)
    times = {**row.get("contenders_us", named), LIMIT: limit}
    return {name: us for name, us in times.items() if us and us > 0} if times.get("weft") else {}


def points(rows: Sequence[Row], measure: Measure) -> Points:
    """(size, value) of each contender, and of the limit, by size; without those that have no time."""
    found: Points = {}
    for row in rows:
        for name, us in times_of(row).items():
            found.setdefault(name, []).append((measure.size(row), measure.of(row, us)))
    return {name: sorted(of) for name, of in found.items()}


def chart(content: dict[str, Any], name: str, mode: str | None = None) -> str:
    """The SVG of a results file: a panel for all rows that differ in M alone.

    Args:
        name: of the op or the suite, for the title.

    Raises:
        ValueError: no row is of this mode, or none has a time.
        KeyError, TypeError: it is no such file.
    """
    meta, (mode, rows) = content["meta"], chosen_rows(content["rows"], mode)
    measure = measure_of(meta, rows[0])
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_title(row, measure), []).append(row)
    drawn = {title: _seen(points(of, measure)) for title, of in panels.items()}
    drawn = {title: curves for title, curves in drawn.items() if curves}
    cpu, columns = meta["device"] == "cpu", 1 if len(drawn) == 1 else 2
    device = f"{meta['world']} CPU ranks" if cpu else f"{meta['world']} {meta['device'].upper()}"
    better = "lower" if measure.unit == "us" else "higher"
    how = ", ".join(filter(None, [mode, meta["date"][:10]]))
    title = f"{name} on {device}, {how}: {measure.unit} ({better} is better)"
    there = dict.fromkeys(name for curves in drawn.values() for name in curves)
    names = {n: _words(n, rows[0], cpu) for n in sorted(there, key=[*CURVES, *there].index)}
    pens = _pens(names)
    marks = {words: stroke(*pens[n]) for n, words in names.items()}
    parts, y = legend_svg(marks, (10, 52 if cpu else 36), _WIDTH)
    width, height = _WIDTH / columns, 330 if columns == 1 else 230
    for i, (words, of_name) in enumerate(drawn.items()):
        top = y + 12 + i // columns * (height + _GAP)
        curves = {words_of: (pens[n], of_name[n]) for n, words_of in names.items() if n in of_name}
        parts.append(label(i % columns * width + 10, top + 12, words, bold=True))
        parts += _panel(curves, measure, (i % columns * width, top, width, height))
    bottom = y + 12 + -(-len(drawn) // columns) * (height + _GAP)
    return framed(title, (_WIDTH, bottom), parts, CPU_NOTE if cpu else "")


def _title(row: Row, measure: Measure) -> str:
    """Of a panel: what its rows have in common."""
    if "name" not in row:
        words = [" ".join(row[key] for key in ("op", "model") if key in row)]
        keys = [key for key, value in row.items() if isinstance(value, int) and key != "M" and "_" not in key]
        sizes = [f"{key} = {row[key]}" for key in keys]
        return ", ".join(filter(None, words if "model" in row else [*words, *sizes]))
    shape = f", N = {row['N']}" if not measure.in_bytes else ""
    return f"{row['name']}, K = {row['K']}{shape}" if row["K"] else f"{row['name']}{shape}"


def _seen(curves: Points) -> Points:
    """Without the limit where it is far below all times, as that of small sizes is."""
    timed = [value for name, of in curves.items() if name != LIMIT for _, value in of]
    seen = {
        name: [(size, value) for size, value in of if timed and value >= min(timed) / 2]
        for name, of in curves.items()
    }
    return {name: of for name, of in seen.items() if of}


def _words(name: str, row: Row, cpu: bool) -> str:
    """A contender as the legend names it."""
    if "contenders_us" not in row:  # as its suite calls it
        return name
    if name == LIMIT:
        return "limit: cuBLAS alone, or bytes / link" if row["K"] else "limit: bytes / link"
    if name != "unfused":
        return CURVES.get(name, (name, ""))[0]
    backend = "gloo" if cpu else "NCCL"
    return f"{backend} + {'torch.mm' if cpu else 'cuBLAS'}" if row["K"] else backend


def _pens(names: Collection[str]) -> dict[str, Pen]:
    """Colour, width and dashes of each contender."""
    others = cycle([of for of in OTHERS if of not in {CURVES[n][1] for n in names if n in CURVES}])
    found = {n: (CURVES[n][1] if n in CURVES else next(others), 1.3, "") for n in names if n != LIMIT}
    return {**found, "weft": ("blue", 2.5, ""), LIMIT: ("ink", 1.3, "4 2")}


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
    curves: Mapping[str, tuple[Pen, Curve]], measure: Measure, place: tuple[float, float, float, float]
) -> list[str]:
    left, top, width, height = place
    every = [point for _, of in curves.values() for point in of]
    sizes = [size for size, _ in every]
    steps = _steps(min(value for _, value in every), max(value for _, value in every))
    x = Scale(min(sizes), max(sizes), left + _LEFT, left + width - _RIGHT)
    y = Scale(steps[0], steps[-1], top + height - 34, top + 26)
    parts = []
    powers = range(math.ceil(math.log2(x.first)), math.floor(math.log2(x.last)) + 1)
    every_nth = 1 + len(powers) * int(_LETTER * 9) // int(x.end - x.begin)
    for size in [2.0**power for power in powers[::every_nth]] or [x.first]:
        parts.append(path(f"M{x.at(size):.1f} {y.begin:.1f}V{y.end:.1f}", "grid"))
        parts.append(label(round(x.at(size), 1), y.begin + 15, _size(size, measure.in_bytes), "middle"))
    for step in steps:
        parts.append(path(f"M{x.begin:.1f} {y.at(step):.1f}H{x.end:.1f}", "grid"))
        parts.append(label(x.begin - 6, round(y.at(step) + 4, 1), f"{step:g}", "end"))
    axis = "bytes" if measure.in_bytes else "rows (M)"
    parts.append(label(x.end, y.begin + 31, f"{measure.unit} over {axis}", "end"))
    for words, ((colour, thick, dashes), curve) in reversed([*curves.items()]):
        places = [(f"{x.at(size):.1f}", f"{y.at(value):.1f}") for size, value in curve]
        parts.append(path("M" + "L".join(map(" ".join, places)), colour, thick, dashes))
        if dashes:  # the limit
            continue
        for (cx, cy), (size, value) in zip(places, curve, strict=True):
            tip = f"{words}, {_size(size, measure.in_bytes)}: {value:.4g} {measure.unit}"
            parts.append(box(float(cx) - 2.5, float(cy) - 2.5, (5, 5), colour, tip))
    return parts
