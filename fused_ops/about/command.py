"""``python -m weft`` and ``python -m weft bench``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import weft

_DESCRIPTION = """What is here, and what weft does with it: for a look, and for bug reports.

python -m weft                 text
python -m weft --no-copies     without timing copies between GPUs
python -m weft kernels         which kernel was run on which GPU, and which was only compiled
python -m weft bench SUITE     bench/run.py of a checkout; without SUITE a list of them
"""


def command_line(arguments: Sequence[str]) -> int:
    """Runs ``python -m weft`` with these; the exit status."""
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    if arguments == ["kernels"]:
        from .kernels import kernels_text

        print(kernels_text())
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m weft", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--no-copies", action="store_true", help="do not time copies between GPUs")
    given = parser.parse_args(arguments)
    from .text import about_text

    print(about_text(measured=not given.no_copies))
    return 0


def _bench(arguments: Sequence[str]) -> int:
    # The package may be reached by a link to the checkout.
    script = Path(weft.__file__).resolve().parent / "bench" / "run.py"
    if not script.is_file():
        print(
            "python -m weft bench: bench/run.py is not beside this weft, which was installed without its checkout: "
            "install it from there (pip install -e .)",
            file=sys.stderr,
        )
        return 2
    return subprocess.call([sys.executable, str(script), *arguments])
