"""A picture of what the suite ops has measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from charts import chart
from suite import Suite


class Plot(Suite):
    """weft, its peers and the limit of the hardware over the size, on log axes: an SVG from a JSON file of suite ops.

    Of ops with a matmul it has FLOP/s over rows, else microseconds. It lies beside the JSON, as .svg, or where --output
    says. ``ops --plot`` draws what it has just measured.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--mode", help="default: graph, where there are such rows")
        parser.add_argument("--output", type=Path)

    def rows(self, given: argparse.Namespace) -> tuple[Path, ...]:
        return (given.file,)

    def start(self, given: argparse.Namespace, arguments: list[str]) -> int:
        file: Path = given.file
        output = given.output or file.with_suffix(".svg")
        try:
            output.write_text(chart(json.loads(file.read_text()), given.mode))
        except KeyError as e:
            print(f"{file}: has no {e}, must be what bench/run.py ops --results writes", file=sys.stderr)
            return 1
        except (OSError, ValueError) as e:
            print(f"{file}: {e}", file=sys.stderr)
            return 1
        print(f"wrote {output}")
        return 0


SUITE = Plot()
