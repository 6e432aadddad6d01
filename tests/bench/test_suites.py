"""Suites of the benchmark between two CPU ranks, small: they run, results are right, and what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch_versions import needs_row_wise_products
from torchrun import run_program

RUN = Path(__file__).parents[2] / "bench" / "run.py"


def output_of(suite: str, *arguments: str) -> str:
    """What it prints; it must end well."""
    result = run_program(RUN, 2, suite, "--device=cpu", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f"\npython -m weft bench {suite} ") == 1, "rank 0 alone says what was run"
    assert "'world': 2" in result.stdout and "say nothing of GPUs" in result.stdout
    return result.stdout


def test_installed(tmp_path: Path) -> None:
    sizes = "--m-sizes", "6,10", "--hidden", "16", "--intermediate", "32"
    printed = output_of("installed", *sizes, f"--results={tmp_path}")
    lines = printed.splitlines()
    assert sum("torch's, on weft" in line for line in lines) == 2
    assert any(line.startswith("fused_all_gather_matmul: ") and "by weft" in line for line in lines)
    assert "by torch" not in printed and "WRONG" not in printed
    kept = (tmp_path / "cpu-x2-installed.txt").read_text()
    assert (
        kept in printed and str(tmp_path) not in kept and re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC\n", kept)
    )


def test_process_group() -> None:
    printed = output_of("process_group", "--sizes", "64,4096")
    lines = [line for line in printed.splitlines() if not line.startswith("python -m weft bench ")]
    for group in (" weft ", " gloo  ", " gloo beside "):
        assert sum(group in line for line in lines) == 2, group
    assert any(line.startswith("all_reduce: ") and "by weft" in line for line in lines)
    assert "WRONG" not in printed


def test_rings() -> None:
    printed = output_of("rings", "--small")
    batches, products = (
        r"(?: +(?:put|batch_put|backend) +[\d.]+){3}",
        r"(?: +(?:ring|fused|unfused) +[\d.]+){3}",
    )
    assert re.search(rf"^ +3 x +4096 bytes{batches} +us$", printed, re.MULTILINE)
    assert re.search(rf"^M +24 K +16 N +20{products} +us$", printed, re.MULTILINE)


def test_transfers() -> None:
    printed = output_of("transfers", "--sizes", "4096,65536")
    assert re.search(r"register: first [\d.]+ ms, then [\d.]+ ms; a hit [\d.]+ us", printed)
    rows = re.findall(r"^ +(\d+) +(\d)((?: +[\d.]+){3}) *$", printed, re.MULTILINE)
    assert [(size, ways) for size, ways, _ in rows] == [(s, w) for s in ("4096", "65536") for w in "12"]


def test_gathered_a() -> None:
    printed = output_of("gathered_a", "--m-sizes", "16")
    for columns, rows in (("[\\d.]+ +[\\d.]+ +[\\d.]+ +[\\d.]+ +-?[\\d.]+%", 5), ("[\\d.]+ +[\\d.]+", 2)):
        assert len(re.findall(rf"^ +16 [a-z, ]+ {columns}$", printed, re.MULTILINE)) == rows, printed


def test_kinds_of_norms() -> None:
    printed = output_of("norm_kinds", "--rows", "4", "--kinds", "usual", "LayerNorm")
    assert re.search(r"^\| 4 \| 512 \| [\d.]+ \| [\d.]+ \([\d.]+\) \|$", printed, re.MULTILINE)


def test_vocabulary() -> None:
    printed = output_of("vocabulary", "--shapes", "7,16,48")
    assert re.search(r"^ +7 +16 +48(?: +[\d.]+){6}$", printed, re.MULTILINE)
    assert "wrong result" not in printed


@needs_row_wise_products
def test_scaled() -> None:
    printed = output_of("scaled", "--m-sizes", "64", "--scalings", "tensor,rows")
    row = r"^\| (gather|scatter) \| small \| 64 \| (?:tensor|rows) \|(?: [\d.]* \|){6} host \| [\d.]+ \|$"
    assert re.findall(row, printed, re.MULTILINE) == ["gather"] * 2 + ["scatter"] * 2


@pytest.mark.slow
def test_sequence_layers() -> None:
    printed = output_of("sequence_layers", "--settings", "none", "True")
    assert re.search(r"^\| 16 \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    assert re.search(r"^16 rows, True: .*fused_", printed, re.MULTILINE)


def test_experts() -> None:
    printed = output_of("experts")
    for op in ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "layer"):
        assert re.search(rf"^{op} small +6(?: +[\d.-]+){{4}} *$", printed, re.MULTILINE), op
    assert "wrong" not in printed and "3 rows in" in printed


def test_exchanges() -> None:
    printed = output_of("exchanges")
    for op in ("heads 2", "heads_back 2", "matmul_all_to_all 2", "all_to_all_matmul 2"):
        assert re.search(rf"^{op} .* 12( +[\d.]+| +-){{5}} +host$", printed, re.MULTILINE), printed


def test_expert_parallel(tmp_path: Path) -> None:
    printed = output_of("expert_parallel", "--plot", f"--results={tmp_path}")
    picture = (tmp_path / "cpu-x2-expert_parallel.svg").read_text()
    assert ">moe_combine small<" in picture and ">backend<" in picture and "say nothing of GPUs" in picture
    for op in ("moe_dispatch", "moe_combine"):
        assert re.search(rf"^{op} small +6(?: +[\d.]+){{2}} *$", printed, re.MULTILINE), printed
    assert "wrong" not in printed and "2 rows in" in printed
