"""A picture of an all-reduce."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pictures import all_reduce_curves
from suite import Suite


class Plot(Suite):
    """Time over size, both logarithmic, of every contender of an all-reduce: an SVG from a JSON file of the suite ops.

    It lies beside the JSON, as .svg, or where --output says.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--mode", default="graph")
        parser.add_argument("--output", type=Path)

    def rows(self, given: argparse.Namespace) -> tuple[Path, ...]:
        return (given.file,)

    def start(self, given: argparse.Namespace, arguments: list[str]) -> int:
        file: Path = given.file
        output = given.output or file.with_suffix(".svg")
        try:
            output.write_text(all_reduce_curves(json.loads(file.read_text()), given.mode))
        except KeyError as e:
            print(f"{file}: has no {e}, must be what bench/run.py ops --results writes", file=sys.stderr)
            return 1
        except (OSError, ValueError) as e:
            print(f"{file}: {e}", file=sys.stderr)
            return 1
        print(f"wrote {output}")
        return 0


SUITE = Plot()
