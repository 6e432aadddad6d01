"""The example of Ulysses attention agrees with the attention of the whole sequence; and it fails where it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_heads_and_sequence(ranks: int) -> None:
    done = run_program(EXAMPLES / "ulysses.py", ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", 0 wrong") == ranks


def test_heads_in_another_order_are_noticed(tmp_path: Path) -> None:
    program = tmp_path / "other_heads.py"
    program.write_text(
        f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import ulysses
right = ulysses.one_shot_all_to_all
ulysses.one_shot_all_to_all = lambda x, *how: right(x.flip(1), *how)
ulysses.main()
"""
    )
    done = run_program(program, 2)
    assert done.returncode != 0 and ", 0 wrong" not in done.stdout, done.stdout + done.stderr
