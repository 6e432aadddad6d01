"""The suite compare between CPU ranks: a folder and a commit beside this checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from suites import compare

ROOT = Path(__file__).resolve().parents[2]


def compared(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "compare", "--device=cpu", *arguments]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(printed: str) -> list[tuple[str, str, str, str]]:
    number = r"([\d.]+ to [\d.]+|-)"
    return re.findall(rf"^\| (\w[\w. ]*) \| {number} \| {number} \| ([\d.]+|-) \|$", printed, re.MULTILINE)


def test_a_folder_whose_weft_lacks_an_op(tmp_path: Path) -> None:
    """As an older one may: the rows that it cannot run have no time."""
    (tmp_path / "fused_ops").mkdir()
    for each in [*ROOT.iterdir(), *(ROOT / "fused_ops").iterdir()]:
        if not (there := tmp_path / each.relative_to(ROOT)).exists():
            there.symlink_to(each)
    public = tmp_path / "fused_ops" / "__init__.py"
    public.unlink()
    public.write_text((ROOT / "fused_ops" / "__init__.py").read_text() + "\ndel one_shot_all_reduce\n")
    ops = "all_reduce", "matmul_reduce_scatter_residual"
    printed = compared(
        str(tmp_path), "--ops", ",".join(ops), "--m-sizes", "16", "--runs", "1", "--ranks", "1"
    )
    found = {name: times for name, *times in rows_of(printed)}
    assert list(found) == [
        "all_reduce 16",
        *(f"{ops[1]} {layer} 16" for layer in ("llama8b.o", "llama8b.down")),
    ]
    for name, (before, now, ratio) in found.items():
        lacks = name.startswith("all_reduce")
        assert (before == "-", now == "-", ratio == "-") == (lacks, False, lacks), found


def test_a_commit_is_unpacked_and_anything_else_refused(tmp_path: Path) -> None:
    known = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=False, capture_output=True)
    if known.returncode == 0:
        there = compare.checkout("HEAD", tmp_path)
        assert (there / "fused_ops" / "__init__.py").is_file()
    with pytest.raises(ValueError, match="other: is 'no-such-commit', must be a checkout or a commit: "):
        compare.checkout("no-such-commit", tmp_path)
