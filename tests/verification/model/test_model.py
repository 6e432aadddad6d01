"""The small instances of the models of check.py, where SPIN is installed; `make model` runs them all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check


@pytest.mark.skipif(check.missing() is not None, reason=check.missing() or "")
@pytest.mark.parametrize("case", check.SMALL, ids=str)
def test_model(case: check.Case) -> None:
    assert check.check(case, seconds=120).outcome == case.outcome


def test_every_rule_that_can_be_broken_is_broken() -> None:
    """Each BREAK_ of a model has a case in which it must fail."""
    for model in ("workspace", "all_reduce", "all_reduce_rounds", "transfers"):
        source = (check.HERE / f"{model}.pml").read_text()
        broken = {
            f"BREAK_{case.broken}"
            for case in check.SMALL + check.LARGE
            if case.model == model and case.broken
        }
        assert set(re.findall(r"BREAK_\w+", source)) == broken
