"""A chart of what a suite has measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from charts import chart
from suite import Suite


class Plot(Suite):
    """weft, its peers and the limit of the hardware over the size, on log axes: an SVG from a results file.

    It takes every JSON whose rows have "weft_us", as those of ops, experts, expert_parallel and vocabulary. Of ops'
    matmuls it has FLOP/s over rows, else microseconds. It lies beside the JSON, as .svg, or where --output says.
    ``--plot`` of these suites draws what they have just measured.
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
            content = json.loads(file.read_text())
            name = file.stem.removeprefix(f"{content['meta']['device']}-x{content['meta']['world']}-")
            output.write_text(chart(content, name, given.mode))
        except (KeyError, TypeError) as e:
            print(f"{file}: {e!r}: must be what --results of a suite writes as JSON", file=sys.stderr)
            return 1
        except (OSError, ValueError) as e:
            print(f"{file}: {e}", file=sys.stderr)
            return 1
        print(f"wrote {output}")
        return 0


SUITE = Plot()
