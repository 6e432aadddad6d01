"""The example of ops called by hand runs and agrees with float64; and it fails where it must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        program,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, timeout=200, capture_output=True, text=True, check=False)


def test_two_ranks() -> None:
    done = run(EXAMPLES / "by_hand.py")
    assert done.returncode == 0 and done.stdout.endswith("\nok\n"), done.stdout + done.stderr
    assert "algorithm='host'" in done.stdout


def test_a_wrong_result_is_noticed(tmp_path: Path) -> None:
    program = tmp_path / "wrong_by_hand.py"
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import by_hand
right = by_hand.fused_matmul_reduce_scatter
by_hand.fused_matmul_reduce_scatter = lambda *args: right(*args) * 1.001
by_hand.main()
"""
    )
    done = run(program)
    assert done.returncode != 0 and done.stdout.endswith("\nFAILED\n"), done.stdout + done.stderr
