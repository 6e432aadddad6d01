"""This checkout's ops beside those of another one: a commit of the repository, or a folder.

    python bench/compare.py 2ef0fa7
    python bench/compare.py ../before --ops matmul_reduce_scatter all_reduce --m-sizes 1024 4096 --runs 3

The two run alternately, ``--runs`` times each, in their own processes, on the same GPUs (else on two CPU ranks). Prints
a markdown table: microseconds of a call, the lowest and highest of the runs of each, and the ratio of the lowest. What
a row is: compare_rank.py. "-": that checkout cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import torch
from compare_rank import OPS

HERE = Path(__file__).resolve().parent
Times = dict[str, float | None]


def checkout(other: str, folder: Path) -> Path:
    """Of a folder itself; a commit's files are unpacked into ``folder``.

    Raises:
        ValueError: it is neither.
    """
    if Path(other, "fused_ops").is_dir():
        return Path(other).resolve()
    packed = subprocess.run(
        ["git", "-C", str(HERE.parent), "archive", other], check=False, capture_output=True
    )
    if packed.returncode:
        raise ValueError(
            f"other: is {other!r}, must be a checkout or a commit: {packed.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def measured(root: Path, ranks: int, folder: Path, options: list[str]) -> Times:
    """Microseconds of each row, by the weft at ``root``."""
    found = folder / "found.json"
    with tempfile.TemporaryDirectory() as path:
        Path(path, "weft").symlink_to(root)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        worker = [str(HERE / "compare_rank.py"), "--out", str(found), *options]
        subprocess.run([*launcher, *worker], env=environment, check=True)
    times: Times = json.loads(found.read_text())
    return times


def line(name: str, before: list[float | None], now: list[float | None]) -> str:
    cells, lowest = [], []
    for runs in (before, now):
        there = [us for us in runs if us is not None]
        cells.append(f"{min(there):.1f} to {max(there):.1f}" if there else "-")
        lowest += [min(there)] if there else []
    ratio = f"{lowest[1] / lowest[0]:.3f}" if len(lowest) == 2 else "-"
    return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("other", help="a commit, or a folder")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--m-sizes", nargs="+", type=int, default=())
    parser.add_argument("--host", action="store_true", help="the host's time of eager calls")
    given = parser.parse_args()
    options = [*["--host"] * given.host, "--ops", *given.ops, "--m-sizes", *map(str, given.m_sizes)]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        roots = checkout(given.other, folder / "other"), HERE.parent
        runs: tuple[list[Times], list[Times]] = ([], [])
        for _ in range(given.runs):
            for root, times in zip(roots, runs, strict=True):
                times.append(measured(root, given.ranks, folder, options))
    print(f"| | {given.other} | this checkout | ratio |\n|---|---|---|---|")
    for name in runs[1][0]:
        print(line(name, *([times[name] for times in each] for each in runs)))


if __name__ == "__main__":
    main()
