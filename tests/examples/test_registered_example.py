"""The example of registered tensors runs and agrees with float64; and it fails where it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


PATIENT = {"WEFT_TIMEOUT": "60"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_rings_and_a_pipeline(ranks: int) -> None:
    done = run_program(EXAMPLES / "registered.py", ranks, env=PATIENT)
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
    done = run_program(program, 3, env=PATIENT)
    assert done.returncode != 0 and "FAILED" in done.stdout, done.stdout + done.stderr
