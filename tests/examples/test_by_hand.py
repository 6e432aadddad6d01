"""The example of ops called by hand runs and agrees with float64; and it fails where it must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchrun import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_ranks() -> None:
    done = run_program(EXAMPLES / "by_hand.py", 2)
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
    done = run_program(program, 2)
    assert done.returncode != 0 and done.stdout.endswith("\nFAILED\n"), done.stdout + done.stderr


def test_without_ranks_it_says_how_to_start_them() -> None:
    env = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "by_hand.py"],
        env={**env, "OMP_NUM_THREADS": "1"},
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    said = "by_hand.py runs on several ranks: torchrun --nproc-per-node 4 examples/by_hand.py\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
