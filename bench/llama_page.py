"""The page of bench/llama.py: charts of its rows, loss curves, and lanes of what ran on the GPU in a step."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {
    "plain": "#a7adb5",
    "torch": "#e0a458",
    "weft": "#2b6cb0",
    "weft agree=False": "#90b8e0",
    "weft agree=ahead": "#5a9bd4",
    "weft agree=each": "#35618f",
    "weft regather=True": "#4c2b9c",
    "plain without communication": "#d8d2c4",
}
LANES = {"matmul": "#4c956c", "fused": "#2b6cb0", "communication": "#c8553d", "other": "#a7adb5"}
WIDTH = 900


def page(content: Mapping[str, Any], timelines: Mapping[str, Sequence[tuple[str, float, float]]]) -> str:
    """HTML that needs no other file."""
    meta, rows = content["meta"], content["rows"]
    machine = ", ".join(f"{k} {meta[k]}" for k in ("device", "world", "torch", "date", "commit") if k in meta)
    parts = [f"<h1>Llama-3 8B, 8 layers</h1><p>{html.escape(machine)}<br>{html.escape(meta['command'])}</p>"]
    for mode in ("train", "prefill", "decode"):
        if of_mode := [r for r in rows if r["mode"] == mode]:
            parts += [f"<h2>{mode}: milliseconds a step</h2>", bars(of_mode)]
    if curves := content.get("losses"):
        parts += ["<h2>Losses</h2>", loss_lines(curves)]
    for name, kernels in timelines.items():
        if kernels:
            parts += [f"<h3>{html.escape(name)}</h3>", kernel_lanes(kernels)]
    legend = " ".join(
        f'<b style="color:{colour}">{name}</b>' for name, colour in {**COLOURS, **LANES}.items()
    )
    style = "body{font:14px sans-serif;margin:2em;max-width:960px}text{font:11px sans-serif}"
    return f"<!doctype html><meta charset='utf-8'><style>{style}</style>{parts[0]}<p>{legend}</p>" + "".join(
        parts[1:]
    )


def bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each row, as long as its part of the slowest contender's of its case."""
    lines, y, before = [], 0, None
    for row in rows:
        case = (row["compile"], row["seq"], row["batch"])
        if case != before:
            y += 8
        before = case
        of_case = [r["ms"] for r in rows if (r["compile"], r["seq"], r["batch"]) == case]
        length = 420 * row["ms"] / max(of_case)
        words = f"{row['compile']} seq {row['seq']} batch {row['batch']} {row['contender']}"
        exposed = "" if row["exposed_comm_ms"] is None else f", exposed {row['exposed_comm_ms']:.2f}"
        value = f"{row['ms']:.2f} ms, {row['tokens_per_s']} tokens/s{exposed}"
        lines += [
            f'<text x="0" y="{y + 11}">{html.escape(words)}</text>',
            f'<rect x="260" y="{y}" width="{length:.1f}" height="13" fill="{COLOURS[row["contender"]]}"/>',
            f'<text x="{265 + length:.1f}" y="{y + 11}">{value}</text>',
        ]
        y += 16
    return f'<svg width="{WIDTH}" height="{y + 4}">{"".join(lines)}</svg>'


def loss_lines(curves: Mapping[str, Sequence[float]]) -> str:
    """One line a contender."""
    values = [v for curve in curves.values() for v in curve]
    low, high = min(values), max(values)
    lines = []
    for name, curve in curves.items():
        points = " ".join(
            f"{i * 800 / max(1, len(curve) - 1):.1f},{200 - 190 * (v - low) / ((high - low) or 1):.1f}"
            for i, v in enumerate(curve)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
    return f'<svg width="{WIDTH}" height="210">{"".join(lines)}</svg><p>from {high:.3f} to {low:.3f}</p>'


def kernel_lanes(kernels: Sequence[tuple[str, float, float]]) -> str:
    """A lane for each kind of kernel; the whole width is the step."""
    end = max(e for _, _, e in kernels)
    places = {lane: 4 + 20 * i for i, lane in enumerate(LANES)}
    marks = [
        f'<rect x="{100 + 780 * s / end:.2f}" y="{places[lane]}" width="{max(0.2, 780 * (e - s) / end):.2f}" '
        f'height="16" fill="{LANES[lane]}"/>'
        for lane, s, e in kernels
    ]
    names = [f'<text x="0" y="{y + 12}">{lane}</text>' for lane, y in places.items()]
    return f'<svg width="{WIDTH}" height="90">{"".join(names + marks)}</svg><p>{end / 1e3:.2f} ms</p>'
