"""bench/process_group.py between CPU ranks, small: it runs, and says who took the calls."""

from __future__ import annotations

from two_ranks import output_of


def test_it_runs() -> None:
    printed = output_of("process_group.py", "--sizes", "64,4096", "--width", "8")
    lines = printed.splitlines()
    for group in (" weft ", " gloo  ", " gloo beside "):
        assert sum(group in line for line in lines) == 3, group
    assert any(line.startswith("all_reduce: ") and "by weft" in line for line in lines)
    assert "WRONG" not in printed
