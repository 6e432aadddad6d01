"""bench/frameworks.py between CPU ranks, tiny: each contender's losses and gradients are plain's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import run_program

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[2] / "bench"
COMPILED, GROUPS = {"plain", "weft", "agree=False"}, {"plain alone", "plain", "process group"}
CASES = {
    "Qwen3 prefill 9": COMPILED,
    "Llama generate 9": COMPILED,
    "Mixtral train 9": COMPILED,
    "Llama ddp 9": GROUPS,
    "Llama fsdp2 9": GROUPS,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_case(case: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    short = ("--rounds", "1", "--steps", "1", "--warmup", "2")
    given = ("--small", "--cases", case, "--out", str(out), *short)
    done = run_program(BENCH / "frameworks.py", 2, *given, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["contender"]: row for row in json.loads(out.read_text())}
    assert rows.keys() == CASES[case]
    for name, row in rows.items():
        assert row["error"] < 1e-4, name
        assert (row["fused"] > 0) is not name.startswith("plain"), name
