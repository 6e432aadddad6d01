"""Measure weft's ops against PyTorch's and against the hardware's limit.

python bench/run.py                                    one rank a GPU, or 2 CPU ranks
python bench/run.py --ranks 4 --ops all_gather_matmul --m-sizes 1024,4096 --modes graph
torchrun --nproc-per-node 4 bench/run.py --layers llama8b

What follows goes to pytest (``--help`` lists the benchmark's own options under "weft's benchmark"). Rank 0 prints the
table and writes ``bench/results/<device>-x<world>-<op>.json``; a file of that name is kept under its date.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start_ranks(ranks: int | None, arguments: list[str]) -> int:
    """Run this file under torchrun; 0 when every rank was content."""
    import torch

    ranks = ranks or torch.cuda.device_count() or 2
    command = shlex.join(["python", "bench/run.py", "--ranks", str(ranks), *arguments])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    rank = [str(Path(__file__).resolve()), "--command", command, *arguments]
    return subprocess.call([*launcher, *rank], env=environment)


def run_rank(arguments: list[str]) -> int:
    if os.environ["RANK"] != "0":
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    import pytest

    # pytest-benchmark's own table gives the length of a round, with all contenders in it.
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "--benchmark-quiet", "--benchmark-disable-gc"]
    # The collectives go by their names before torch 2.13.
    quiet += ["-o", "filterwarnings=ignore:.*is deprecated:FutureWarning"]
    return int(pytest.main([str(HERE / "bench_ops.py"), f"--rootdir={HERE.parent}", *quiet, *arguments]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=int)
    known, rest = parser.parse_known_args()
    if "RANK" in os.environ:
        return run_rank(rest)
    return start_ranks(known.ranks, rest)


if __name__ == "__main__":
    sys.exit(main())
