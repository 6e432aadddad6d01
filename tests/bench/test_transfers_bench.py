"""bench/transfers.py between CPU ranks, small: it runs, and the data are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "transfers.py"


def test_it_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(SCRIPT), "--sizes", "4096,65536"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"register: first [\d.]+ ms, then [\d.]+ ms; a hit [\d.]+ us", result.stdout)
    rows = re.findall(r"^ +(\d+) +(\d)((?: +[\d.]+){3}) *$", result.stdout, re.MULTILINE)
    assert [(size, ways) for size, ways, _ in rows] == [(s, w) for s in ("4096", "65536") for w in "12"]
