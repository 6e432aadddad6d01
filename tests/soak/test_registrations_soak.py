"""A short soak of registered tensors."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks
from registrations import works


def test_some_registrations_on_three_ranks() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for steps in run_ranks(works, 3, 400, seed, fresh=True):
        assert sum(steps.values()) == 400 and min(steps.values()) > 20, steps
