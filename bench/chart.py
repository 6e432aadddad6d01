"""Times of a few layers, each contender a bar, the limit a line across them: an SVG from results files, for README.md.

python bench/chart.py                       # docs/layers-h100-x2.svg
python bench/chart.py --output picture.svg

It needs no library: the same file from the same numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MACHINE, M, MODE = "h100-x2", 8192, "graph"
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


def chosen_rows(folder: Path) -> list[dict[str, Any]]:
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


def _legend() -> list[str]:
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


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """The SVG of ``rows``, those of ``LAYERS``."""
    highest = max(row[column] for row in rows for column, *_ in CONTENDERS)
    scale = (BASE - TOP) / highest
    step = (WIDTH - 2 * LEFT) / len(rows)
    inset = (step - len(CONTENDERS) * (BAR + GAP) + GAP) / 2
    title = f"Llama 8B, M = {M}, bfloat16, 2 H100: microseconds a layer (lower is better)"
    parts = [*_legend(), f'<path d="M{LEFT} {BASE}h{WIDTH - 2 * LEFT}" stroke="{INK}"/>']
    for i, (row, (_, _, layer)) in enumerate(zip(rows, LAYERS, strict=True)):
        parts += _group(row, layer, LEFT + i * step + inset, scale)
    return framed(WIDTH, HEIGHT, title, parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / f"layers-{MACHINE}.svg")
    options = parser.parse_args()
    options.output.write_text(chart(chosen_rows(options.results)))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
