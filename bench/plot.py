"""Time over size, both logarithmic, of every contender of an all-reduce: an SVG from a run's JSON.

python bench/plot.py bench/results/h200-x4-all_reduce.json            beside it, as .svg
python bench/plot.py results.json --mode eager --output picture.svg

Needs matplotlib: pip install 'weft-nvlink[plot]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {
    "weft": "weft",
    "unfused": "NCCL",
    "torch": "torch one-shot",
    "torch two-shot": "torch two-shot",
}
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def curves(rows: list[dict[str, Any]], mode: str) -> dict[str, list[tuple[int, float]]]:
    """(bytes, microseconds) by contender, sorted; and of the limit.

    Raises:
        ValueError: there is no row of this mode.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["op"] != "all_reduce" or row["mode"] != mode:
            continue
        size = row["M"] * row["N"] * WIDTHS[row["dtype"]]
        times = {**row["contenders_us"], "limit": row["limit_us"]}
        for name, us in times.items():
            if us is not None and us > 0:
                found.setdefault(name, []).append((size, us))
    if not found:
        modes = sorted({row["mode"] for row in rows if row["op"] == "all_reduce"})
        there = f"--mode may be {' or '.join(modes)}" if modes else "there is no row of an all-reduce at all"
        raise ValueError(f"mode: no row of an all-reduce is of mode {mode!r}; {there}")
    return {name: sorted(points) for name, points in found.items()}


def draw(content: dict[str, Any], mode: str, output: Path) -> None:
    """Write the picture of a results file to ``output``.

    Raises:
        ValueError: it has no row of this mode.
        ModuleNotFoundError: there is no matplotlib.
    """
    meta, drawn = content["meta"], curves(content["rows"], mode)
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError("matplotlib draws the picture: pip install 'weft-nvlink[plot]'") from e

    mpl.use("svg")
    from matplotlib import pyplot as plt

    # The same file from the same numbers: no date, no random names, text as text.
    plt.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, points in drawn.items():
        style = {"weft": "o-", "limit": "k:"}.get(name, "x--")
        label = "bytes received / link" if name == "limit" else NAMES.get(name, name)
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=2 if name == "weft" else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds")
    axes.set_title(f"all-reduce on {meta['world']} {meta['device'].upper()}, {mode}, {meta['date']}")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(output, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or options.results.with_suffix(".svg")
    try:
        draw(json.loads(options.results.read_text()), options.mode, output)
    except (ModuleNotFoundError, OSError, ValueError) as e:
        parser.exit(1, f"{parser.prog}: {options.results}: {e}\n")
    except KeyError as e:
        parser.exit(
            1, f"{parser.prog}: {options.results}: has no {e}, must be what bench/run.py --results writes\n"
        )
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
