"""A script of bench/ between two CPU ranks."""

from __future__ import annotations

from pathlib import Path

from torchrun import run_program

BENCH = Path(__file__).parents[2] / "bench"


def output_of(script: str, *arguments: str) -> str:
    """What it prints; it must end well."""
    result = run_program(BENCH / script, 2, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout
