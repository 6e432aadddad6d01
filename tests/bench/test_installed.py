"""bench/installed.py between CPU ranks, small: it runs, and says who took the calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "installed.py"


def test_it_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["--m-sizes", "6,10", "--hidden", "16", "--intermediate", "32"]
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
    assert sum("torch's, on weft" in line for line in lines) == 2
    assert any(line.startswith("fused_all_gather_matmul: ") and "by weft" in line for line in lines)
    assert "by torch" not in result.stdout
    assert "WRONG" not in result.stdout
