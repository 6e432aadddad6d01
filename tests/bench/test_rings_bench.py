"""bench/rings.py between CPU ranks, small: it runs, and the results are right."""

from __future__ import annotations

import re

from two_ranks import output_of


def test_it_runs() -> None:
    printed = output_of("rings.py", "--small")
    assert re.search(
        r"^ +3 x +4096 bytes(?: +(?:put|batch_put|backend) +[\d.]+ ){3} +us$", printed, re.MULTILINE
    )
    assert re.search(
        r"^M +24 K +16 N +20(?: +(?:ring|fused|unfused) +[\d.]+ ){3} +us$", printed, re.MULTILINE
    )
