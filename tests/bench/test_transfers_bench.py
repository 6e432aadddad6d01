"""bench/transfers.py between CPU ranks, small: it runs, and the data are right."""

from __future__ import annotations

import re

from two_ranks import output_of


def test_it_runs() -> None:
    printed = output_of("transfers.py", "--sizes", "4096,65536")
    assert re.search(r"register: first [\d.]+ ms, then [\d.]+ ms; a hit [\d.]+ us", printed)
    rows = re.findall(r"^ +(\d+) +(\d)((?: +[\d.]+){3}) *$", printed, re.MULTILINE)
    assert [(size, ways) for size, ways, _ in rows] == [(s, w) for s in ("4096", "65536") for w in "12"]
