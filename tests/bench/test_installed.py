"""bench/installed.py between CPU ranks, small: it runs, and says who took the calls."""

from __future__ import annotations

from two_ranks import output_of


def test_it_runs() -> None:
    printed = output_of("installed.py", "--m-sizes", "6,10", "--hidden", "16", "--intermediate", "32")
    lines = printed.splitlines()
    assert sum("torch's, on weft" in line for line in lines) == 2
    assert any(line.startswith("fused_all_gather_matmul: ") and "by weft" in line for line in lines)
    assert "by torch" not in printed
    assert "WRONG" not in printed
