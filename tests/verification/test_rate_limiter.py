"""The rate limiter by which a rank's warps keep to what the links take, compiled for the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from fibers import DEVICE, mistakes

HERE = Path(__file__).parent
SOURCE = DEVICE / "comm" / "rate_limiter.cuh"


def said(folder: Path, old: str = "", new: str = "") -> str:
    """What rate_limiter.cpp says of rate_limiter.cuh, in which ``new`` stands for ``old``."""
    text = SOURCE.read_text().replace('#include "comm/double_buffer.cuh"\n', "")
    assert old in text
    (folder / "rate_limiter.cuh").write_text(text.replace(old, new) if old else text)
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    options = ["-std=c++17", "-O1", "-w", f'-DRATE_LIMITER="{folder / "rate_limiter.cuh"}"']
    subprocess.run([compiler, *options, HERE / "rate_limiter.cpp", "-o", folder / "rate_limiter"], check=True)
    return subprocess.run(
        [folder / "rate_limiter"], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_bursts_of_all_warps_share_what_the_links_take(tmp_path: Path) -> None:
    assert said(tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    mistakes(
        [
            ("bursts * interval", "interval", "bursts are counted once"),
            ("if (start + LATE < now) atomicMax(clock(), now);", "", "a burst out of turn"),
            ("now < start", "false", "a burst out of turn"),
        ],
        3,
    ),
    ids=["counted-once", "clock-not-set", "not-awaited"],
)
def test_mistakes_are_found(old: str, new: str, what: str, tmp_path: Path) -> None:
    assert what in said(tmp_path, old, new)
