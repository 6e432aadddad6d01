"""Mistakes on purpose, each of which a test has to see: `make mutants`.

A mutant is a text of a file, what stands there instead, and the tests of which one must fail. They run in a copy of
this tree in a temporary folder, one after the other. First the tests run on the copy as it is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import MUTANTS

ROOT = Path(__file__).parents[1]
FOLDERS = ("symm_mem", "kernels", "fused_ops", "tests", "examples", "bench")


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu and not slow", *shlex.split(tests)]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutants of files whose path has this in it")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m.file]
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as above:
        copy = Path(above) / "weft"
        copy.mkdir()
        for each in ROOT.iterdir():
            if each.is_file():
                shutil.copy(each, copy)
            elif each.name in FOLDERS:
                shutil.copytree(
                    each, copy / each.name, ignore=shutil.ignore_patterns("__pycache__", "results")
                )
        for tests in dict.fromkeys(m.tests for m in chosen):
            done = run(copy, tests)
            if done.returncode != 0:
                sys.exit(f"{tests}: fails without a mistake\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
        alive = 0
        for mutant in chosen:
            file, begin = copy / mutant.file, time.monotonic()
            whole = file.read_text()
            if (found := whole.count(mutant.text)) != 1:
                sys.exit(f"{mutant.file}: {found} times, not once: {mutant.text}")
            file.write_text(whole.replace(mutant.text, mutant.instead))
            killed = run(copy, mutant.tests).returncode == 1
            file.write_text(whole)
            alive += not killed
            what = mutant.text.strip().splitlines()[0][:70]
            print(
                f"{'killed' if killed else 'ALIVE':6} {time.monotonic() - begin:4.0f} s  {mutant.file}: {what}",
                flush=True,
            )
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    sys.exit(alive != 0)


if __name__ == "__main__":
    main()
