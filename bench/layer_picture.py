"""When which kernels of a layer run, without the pass and with it: an SVG from a results file, for README.md.

python bench/layer_picture.py                       # docs/layer-h100-x2.svg
python bench/layer_picture.py --output picture.svg

The file is one of bench/llama.py, whose "layers" these are. It needs no library: the same file from the same numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from chart import LEFT, WIDTH, framed, label
from llama_page import LANES

ROOT = Path(__file__).parent.parent
MACHINE = "h100-x2"
CASE = "train whole seq 4096"
CONTENDERS = (("plain", "torch.compile"), ("weft", "with weft's pass"))
WORDS = {"matmul": "matmul, attention", "fused": "weft: matmul and communication", "other": "other kernels"}
LANE, TOP, GAP = 20, 92, 34
Interval = tuple[str, float, float]


def _legend() -> list[str]:
    parts, x = [], float(LEFT)
    for lane, colour in LANES.items():
        words = WORDS.get(lane, lane)
        parts += [
            f'<rect x="{x:g}" y="38" width="12" height="12" fill="{colour}"/>',
            label(x + 18, 49, words, "start"),
        ]
        x += 40 + 6.6 * len(words)
    return parts


def picture(layers: Sequence[Sequence[Interval]]) -> str:
    """The SVG of a layer of each of ``CONTENDERS``, in lanes of one scale."""
    longest = max(end for kernels in layers for _, _, end in kernels)
    scale = (WIDTH - 2 * LEFT) / longest
    title = "A layer of Llama-3 8B, forward in training, sequence 4096, 2 H100"
    parts, y = [], TOP
    for (_, words), kernels in zip(CONTENDERS, layers, strict=True):
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
        y += len(used) * LANE + GAP
    height = y - GAP + 14
    return framed(WIDTH, height, title, [*_legend(), *parts])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = ROOT / "bench" / "results" / f"{MACHINE}-llama-layer.json"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / f"layer-{MACHINE}.svg")
    options = parser.parse_args()
    layers = json.loads(options.results.read_text())["layers"]
    options.output.write_text(picture([layers[f"{CASE} {name}"] for name, _ in CONTENDERS]))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
