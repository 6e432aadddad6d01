"""The example of registered tensors runs and agrees with float64; and it fails where it must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WEFT_TIMEOUT": "60"}
    return subprocess.run(
        [*command, str(program)], env=env, timeout=200, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_rings_and_a_pipeline(ranks: int) -> None:
    done = run(EXAMPLES / "registered.py", ranks)
    assert done.returncode == 0 and done.stdout.endswith("\nok\n"), done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["attention", "gather", "pipeline", "ok"]


def test_a_block_that_is_overwritten_too_early_is_noticed(tmp_path: Path) -> None:
    """A ring of one box: the next block comes into the one that is used."""
    program = tmp_path / "one_box.py"
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import registered
made = registered.symm_mem.register
registered.symm_mem.register = lambda tensors, group: made(tensors[:1], group) * 2
registered.main()
"""
    )
    done = run(program, 3)
    assert done.returncode != 0 and "FAILED" in done.stdout, done.stdout + done.stderr
