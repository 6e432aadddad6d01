"""The pictures of README.md and docs/benchmarks.md: SVGs from results files, without any library.

The same file comes from the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_profile import LANES

MACHINE, M, MODE = "h100-x2", 8192, "graph"
Place = Callable[[float], float]
LAYERS = (
    ("all_gather_matmul", "llama8b.qkv", "qkv"),
    ("all_gather_matmul", "llama8b.upgate", "up + gate"),
    ("matmul_reduce_scatter", "llama8b.o", "o"),
    ("matmul_reduce_scatter", "llama8b.down", "down"),
)
WORDS = {"all_gather_matmul": "all-gather + matmul", "matmul_reduce_scatter": "matmul + reduce-scatter"}
CONTENDERS = (
    ("unfused_us", "NCCL + cuBLAS", "#a7adb5"),
    ("torch_us", "torch.ops.symm_mem", "#e0a458"),
    ("weft_us", "weft", "#2b6cb0"),
)
WIDTH, HEIGHT, LEFT, TOP, BASE = 760, 330, 20, 74, 280
BAR, GAP = 50, 6
INK = "#24292f"


def _chosen_rows(folder: Path) -> list[dict[str, Any]]:
    """The row of each layer.

    Raises:
        ValueError: a file has no such row, or more than one.
    """
    found = []
    for op, name, _ in LAYERS:
        content = json.loads((folder / f"{MACHINE}-{op}.json").read_text())
        rows = [r for r in content["rows"] if (r["name"], r["M"], r["mode"]) == (name, M, MODE)]
        if len(rows) != 1:
            raise ValueError(f"{op}: {len(rows)} rows are {name} at M = {M}, mode {MODE}; must be one")
        found += rows
    return found


def label(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{words}</text>'


def framed(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The SVG of some parts below a title."""
    head = f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="13"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {head} fill="{INK}">',
            f"<title>{title}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            label(LEFT, 23, title, "start", ' font-size="15" font-weight="bold"'),
            *parts,
            "</svg>",
            "",
        ]
    )


def _bars_legend() -> list[str]:
    parts, x = [], float(LEFT)
    for _, name, colour in CONTENDERS:
        parts += [f'<rect x="{x:g}" y="38" width="12" height="12" fill="{colour}"/>']
        parts += [label(x + 18, 49, name, "start")]
        x += 40 + 7.2 * len(name)
    parts += [f'<path d="M{x:g} 44h22" stroke="{INK}" stroke-width="2" stroke-dasharray="4 2"/>']
    return [*parts, label(x + 28, 49, "limit: max(cuBLAS alone, bytes / link)", "start")]


def _group(row: dict[str, Any], layer: str, x: float, scale: float) -> list[str]:
    parts = []
    for i, (column, _, colour) in enumerate(CONTENDERS):
        us = row[column]
        left, height = x + i * (BAR + GAP), us * scale
        parts += [
            f'<rect x="{left:g}" y="{BASE - height:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}"/>'
        ]
        bold = ' font-weight="bold"' if column == "weft_us" else ""
        parts += [label(left + BAR / 2, round(BASE - height - 5, 1), f"{us:.0f}", more=bold)]
    y, wide = BASE - row["limit_us"] * scale, len(CONTENDERS) * (BAR + GAP) - GAP
    parts += [
        f'<path d="M{x - 3:g} {y:.1f}h{wide + 6}" stroke="{INK}" stroke-width="2" stroke-dasharray="4 2"/>'
    ]
    middle = x + wide / 2
    parts += [label(middle, BASE + 18, layer, more=' font-weight="bold"')]
    return [*parts, label(middle, BASE + 35, WORDS[row["op"]])]


def layer_bars(results: Path) -> str:
    """The SVG of times of a few layers, each contender a bar, the limit a line across them."""
    rows = _chosen_rows(results)
    highest = max(row[column] for row in rows for column, *_ in CONTENDERS)
    scale = (BASE - TOP) / highest
    step = (WIDTH - 2 * LEFT) / len(rows)
    inset = (step - len(CONTENDERS) * (BAR + GAP) + GAP) / 2
    title = f"Llama 8B, M = {M}, bfloat16, 2 H100: microseconds a layer (lower is better)"
    parts = [*_bars_legend(), f'<path d="M{LEFT} {BASE}h{WIDTH - 2 * LEFT}" stroke="{INK}"/>']
    for i, (row, (_, _, layer)) in enumerate(zip(rows, LAYERS, strict=True)):
        parts += _group(row, layer, LEFT + i * step + inset, scale)
    return framed(WIDTH, HEIGHT, title, parts)


GAINS = ("over NCCL + cuBLAS", "#7d848c"), ("over torch.ops.symm_mem", "#e0a458")
NAMES_END, GAIN_BAR = 330, 14


def gain_bars(title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The SVG of how many times as fast weft is: a bar each, none for "-", and a line at 1.

    Args:
        rows: a name, and its gains as a table has them: one, or one of each of ``GAINS``.
    """
    colours = [colour for _, colour in GAINS] if len(rows[0][1]) > 1 else ["#2b6cb0"]
    widest = max(float(gain) for _, gains in rows for gain in gains if gain != "-")
    scale, parts, top = (WIDTH - 60 - NAMES_END) / widest, [], 44
    if len(colours) > 1:
        top = 66
        for at, (words, colour) in zip((LEFT, LEFT + 160), GAINS, strict=True):
            parts += [f'<rect x="{at}" y="38" width="12" height="12" fill="{colour}"/>']
            parts += [label(at + 18, 49, words, "start")]
    step = len(colours) * GAIN_BAR + 10
    for y, (name, gains) in zip(range(top, top + step * len(rows), step), rows, strict=True):
        parts += [label(NAMES_END - 8, y + len(colours) * GAIN_BAR / 2 + 4, name, "end")]
        for i, (gain, colour) in enumerate(zip(gains, colours, strict=True)):
            if gain != "-":
                at, wide = y + i * GAIN_BAR, float(gain) * scale
                box = f'width="{wide:.1f}" height="{GAIN_BAR - 2}" fill="{colour}"'
                parts += [f'<rect x="{NAMES_END}" y="{at}" {box}/>']
                parts += [label(round(NAMES_END + wide + 5, 1), at + 11, gain, "start")]
    bottom = top + step * len(rows) - 6
    one = f'<path d="M{NAMES_END + scale:.1f} {top - 4}V{bottom}" stroke="{INK}" stroke-dasharray="4 2"/>'
    return framed(WIDTH, bottom + 10, title, [*parts, one])


CASE = "train whole seq 4096"
COMPILED = (("plain", "torch.compile"), ("weft", "with weft's pass"))
LANE_WORDS = {
    "matmul": "matmul, attention",
    "fused": "weft: matmul and communication",
    "other": "other kernels",
}
LANE, LANES_TOP, LANES_GAP = 20, 92, 34


def _lanes_legend() -> list[str]:
    parts, x = [], float(LEFT)
    for lane, colour in LANES.items():
        words = LANE_WORDS.get(lane, lane)
        parts += [
            f'<rect x="{x:g}" y="38" width="12" height="12" fill="{colour}"/>',
            label(x + 18, 49, words, "start"),
        ]
        x += 40 + 6.6 * len(words)
    return parts


def layer_lanes(results: Path) -> str:
    """The SVG of when which kernels of a layer run, without the pass and with it, in lanes of one scale."""
    found = json.loads((results / f"{MACHINE}-llama-layer.json").read_text())["layers"]
    layers = [found[f"{CASE} {name}"] for name, _ in COMPILED]
    longest = max(end for kernels in layers for _, _, end in kernels)
    scale = (WIDTH - 2 * LEFT) / longest
    title = "A layer of Llama-3 8B, forward in training, sequence 4096, 2 H100"
    parts, y = [], LANES_TOP
    for (_, words), kernels in zip(COMPILED, layers, strict=True):
        total = max(end for _, _, end in kernels)
        parts += [label(LEFT, y - 8, f"{words}: {total:.0f} us", "start", ' font-weight="bold"')]
        used = [lane for lane in LANES if any(kernel[0] == lane for kernel in kernels)]
        for i, lane in enumerate(used):
            at = y + i * LANE
            parts += [
                f'<rect x="{LEFT}" y="{at}" width="{longest * scale:g}" height="{LANE - 4}" fill="#f2f4f6"/>'
            ]
            parts += [
                f'<rect x="{LEFT + start * scale:.1f}" y="{at}" width="{max(0.6, (end - start) * scale):.1f}" '
                f'height="{LANE - 4}" fill="{LANES[lane]}"/>'
                for of, start, end in kernels
                if of == lane
            ]
        y += len(used) * LANE + LANES_GAP
    height = y - LANES_GAP + 14
    return framed(WIDTH, height, title, [*_lanes_legend(), *parts])


CURVES = {
    "weft": ("weft", "#2b6cb0"),
    "unfused": ("NCCL", "#7d848c"),
    "torch": ("torch one-shot", "#e0a458"),
    "torch two-shot": ("torch two-shot", "#8f5b2e"),
    "limit": ("bytes received / link", INK),
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Points = list[tuple[int, float]]
SIDE, FLOOR, CEILING = 60, 400, 70  # of the curves' axes, in a picture of WIDTH x 440


def curves(rows: Sequence[dict[str, Any]], mode: str) -> dict[str, Points]:
    """(bytes, microseconds) by contender of an all-reduce, sorted; and of the limit.

    Raises:
        ValueError: there is no row of this mode.
    """
    found: dict[str, Points] = {}
    for row in rows:
        if row["op"] != "all_reduce" or row["mode"] != mode:
            continue
        size = row["M"] * row["N"] * BYTES[row["dtype"]]
        for name, us in {**row["contenders_us"], "limit": row["limit_us"]}.items():
            if us is not None and us > 0:
                found.setdefault(name, []).append((size, us))
    if not found:
        modes = sorted({row["mode"] for row in rows if row["op"] == "all_reduce"})
        there = f"--mode may be {' or '.join(modes)}" if modes else "there is no row of an all-reduce at all"
        raise ValueError(f"mode: no row of an all-reduce is of mode {mode!r}; {there}")
    return {name: sorted(points) for name, points in found.items()}


def _axes(sizes: tuple[int, int], highest: float, x: Place, y: Place) -> list[str]:
    """A grid line and its number for every fourth size, and for 1, 2 and 5 of each decade."""
    parts = []
    first, last = (round(math.log2(size)) for size in sizes)
    for power in range(first, last + 1, 2):
        unit = "MiB" if power >= 20 else "KiB" if power >= 10 else "B"
        at, words = x(2**power), f"{2 ** (power % 10)} {unit}"
        parts += [f'<path d="M{at:.1f} {CEILING}V{FLOOR}" stroke="#dfe3e8"/>', label(at, FLOOR + 18, words)]
    for us in (step * 10**decade for decade in range(5) for step in (1, 2, 5)):
        if us <= highest:
            line = f'<path d="M{SIDE} {y(us):.1f}H{WIDTH - 2 * LEFT}" stroke="#dfe3e8"/>'
            parts += [line, label(SIDE - 6, round(y(us) + 4, 1), f"{us}", "end")]
    return parts


def all_reduce_curves(content: dict[str, Any], mode: str = "graph") -> str:
    """The SVG of every contender's time over its size, both logarithmic, from a file of the suite ops.

    Raises:
        ValueError: it has no row of this mode.
    """
    meta, drawn = content["meta"], curves(content["rows"], mode)
    drawn = {name: [point for point in points if point[1] >= 1] for name, points in drawn.items()}
    every = [point for points in drawn.values() for point in points]
    sizes = min(size for size, _ in every), max(size for size, _ in every)
    highest = max(us for _, us in every)
    wide, high = math.log(sizes[1] / sizes[0]) or 1.0, math.log(max(highest, 2.0))

    def x(size: float) -> float:
        return SIDE + (WIDTH - 2 * LEFT - SIDE) * math.log(size / sizes[0]) / wide

    def y(us: float) -> float:
        return FLOOR - (FLOOR - CEILING) * math.log(us) / high

    parts, at = _axes(sizes, highest, x, y), float(LEFT)
    for name, points in drawn.items():
        words, colour = CURVES.get(name, (name, "#a7adb5"))
        words = "gloo" if name == "unfused" and meta["device"] == "cpu" else words
        dashes = ' stroke-dasharray="3 3"' if name == "limit" else ""
        line = f'fill="none" stroke="{colour}" stroke-width="{2.5 if name == "weft" else 1.3}"{dashes}'
        places = [(f"{x(size):.1f}", f"{y(us):.1f}") for size, us in points]
        parts += [f'<polyline points="{" ".join(map(",".join, places))}" {line}/>']
        if name != "limit":
            parts += [f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{colour}"/>' for cx, cy in places]
        parts += [f'<path d="M{at:g} 44h22" {line}/>', label(at + 28, 49, words, "start")]
        at += 54 + 7 * len(words)
    date = meta["date"][:10]
    title = f"All-reduce on {meta['world']} {meta['device'].upper()}, {mode}, {date}: microseconds by size"
    return framed(WIDTH, 440, title, parts)
