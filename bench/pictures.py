"""The pictures of layers in README.md and docs/benchmarks.md: SVGs from results files.

The same file comes from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_profile import LANES
from weft.fused_ops.pictures.lanes import Bar, Panel, lanes_svg
from weft.fused_ops.pictures.svg import box, framed, label, legend_svg, path, stroke, swatch

MACHINE, M, MODE = "h100-x2", 8192, "graph"
LAYERS = (
    ("all_gather_matmul", "llama8b.qkv", "qkv"),
    ("all_gather_matmul", "llama8b.upgate", "up + gate"),
    ("matmul_reduce_scatter", "llama8b.o", "o"),
    ("matmul_reduce_scatter", "llama8b.down", "down"),
)
WORDS = {"all_gather_matmul": "all-gather + matmul", "matmul_reduce_scatter": "matmul + reduce-scatter"}
CONTENDERS = (
    ("unfused_us", "NCCL + cuBLAS", "grey"),
    ("torch_us", "torch.ops.symm_mem", "ochre"),
    ("weft_us", "weft", "blue"),
)
WIDTH, HEIGHT, LEFT, TOP, BASE = 760, 330, 20, 74, 280
BAR, GAP = 50, 6


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


def _group(row: dict[str, Any], layer: str, x: float, scale: float) -> list[str]:
    parts = []
    for i, (column, _, colour) in enumerate(CONTENDERS):
        us = row[column]
        left, height = x + i * (BAR + GAP), us * scale
        parts += [box(left, round(BASE - height, 1), (BAR, round(height, 1)), colour)]
        at = left + BAR / 2, round(BASE - height - 5, 1)
        parts += [label(*at, f"{us:.0f}", "middle", bold=column == "weft_us")]
    y, wide = BASE - row["limit_us"] * scale, len(CONTENDERS) * (BAR + GAP) - GAP
    middle = x + wide / 2
    return [
        *parts,
        path(f"M{x - 3:g} {y:.1f}h{wide + 6}", "ink", 2, "4 2"),
        label(middle, BASE + 18, layer, "middle", bold=True),
        label(middle, BASE + 35, WORDS[row["op"]], "middle"),
    ]


def layer_bars(results: Path) -> str:
    """The SVG of times of a few layers, each contender a bar, the limit a line across them."""
    rows = _chosen_rows(results)
    highest = max(row[column] for row in rows for column, *_ in CONTENDERS)
    scale = (BASE - TOP) / highest
    step = (WIDTH - 2 * LEFT) / len(rows)
    inset = (step - len(CONTENDERS) * (BAR + GAP) + GAP) / 2
    title = f"Llama 8B, M = {M}, bfloat16, 2 H100: microseconds a layer (lower is better)"
    marks = {name: swatch(colour) for _, name, colour in CONTENDERS}
    marks["limit: max(cuBLAS alone, bytes / link)"] = stroke("ink", 2, "4 2")
    parts, _ = legend_svg(marks, (LEFT, 38), WIDTH)
    parts.append(path(f"M{LEFT} {BASE}h{WIDTH - 2 * LEFT}", "ink"))
    for i, (row, (_, _, layer)) in enumerate(zip(rows, LAYERS, strict=True)):
        parts += _group(row, layer, LEFT + i * step + inset, scale)
    return framed(title, (WIDTH, HEIGHT), parts)


GAINS = {"over NCCL + cuBLAS": "grey", "over torch.ops.symm_mem": "ochre"}
NAMES_END, GAIN_BAR = 330, 14


def gain_bars(title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The SVG of how many times as fast weft is: a bar each, none for "-", and a line at 1.

    Args:
        rows: a name, and its gains as a table has them: one, or one of each of ``GAINS``.
    """
    colours = [*GAINS.values()] if len(rows[0][1]) > 1 else ["blue"]
    widest = max(float(gain) for _, gains in rows for gain in gains if gain != "-")
    scale, top, parts = (WIDTH - 60 - NAMES_END) / widest, 44, list[str]()
    if len(colours) > 1:
        marks = {words: swatch(colour) for words, colour in GAINS.items()}
        (parts, _), top = legend_svg(marks, (LEFT, 38), WIDTH), 66
    step = len(colours) * GAIN_BAR + 10
    for y, (name, gains) in zip(range(top, top + step * len(rows), step), rows, strict=True):
        parts += [label(NAMES_END - 8, y + len(colours) * GAIN_BAR / 2 + 4, name, "end")]
        for i, (gain, colour) in enumerate(zip(gains, colours, strict=True)):
            if gain != "-":
                at, wide = y + i * GAIN_BAR, round(float(gain) * scale, 1)
                parts += [box(NAMES_END, at, (wide, GAIN_BAR - 2), colour)]
                parts += [label(NAMES_END + wide + 5, at + 11, gain)]
    bottom = top + step * len(rows) - 6
    parts.append(path(f"M{NAMES_END + scale:.1f} {top - 4}V{bottom}", "ink", 1, "4 2"))
    return framed(title, (WIDTH, bottom + 10), parts)


CASE = "train whole seq 4096"
COMPILED = (("plain", "torch.compile"), ("weft", "with weft's pass"))
LANE_WORDS = {
    "matmul": "matmul, attention",
    "fused": "weft: matmul and communication",
    "other": "other kernels",
}


def layer_lanes(results: Path) -> str:
    """The SVG of when which kernels of a layer run, without the pass and with it, in lanes of one scale."""
    found = json.loads((results / f"{MACHINE}-llama-layer.json").read_text())["layers"]
    panels = []
    for name, words in COMPILED:
        kernels = found[f"{CASE} {name}"]
        lanes: dict[str, list[Bar]] = {lane: [] for lane in LANES if any(of == lane for of, *_ in kernels)}
        for lane, begin, end in kernels:
            lanes[lane].append((LANE_WORDS.get(lane, lane), lane, begin, end))
        panels.append(Panel(f"{words}: {max(end for *_, end in kernels):.0f} us", lanes))
    colours = {LANE_WORDS.get(lane, lane): colour for lane, colour in LANES.items()}
    return lanes_svg("A layer of Llama-3 8B, forward in training, sequence 4096, 2 H100", panels, colours)
