"""bench/process_group.py between CPU ranks, small: it runs, and says who took the calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "process_group.py"


def test_it_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["--sizes", "64,4096", "--width", "8"]
    result = subprocess.run(
        [*command, str(SCRIPT), *sizes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(" weft " in line for line in lines) == 3 == sum(" gloo " in line for line in lines)
    assert any(line.startswith("all_reduce: ") and "by weft" in line for line in lines)
    assert "WRONG" not in result.stdout
