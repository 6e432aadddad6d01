"""The suite frameworks of the benchmark between CPU ranks, tiny: each contender's losses and gradients are plain's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import run_program

pytest.importorskip("transformers")

RUN = Path(__file__).parents[2] / "bench" / "run.py"
COMPILED, GROUPS = {"plain", "weft", "agree=False"}, {"plain alone", "plain", "process group"}
CASES = {
    "Qwen3 prefill 9": COMPILED,
    "Llama generate 9": COMPILED,
    "Mixtral train 9": COMPILED,
    "Llama ddp 9": GROUPS,
    "Llama fsdp2 9": GROUPS,
    "Qwen3Moe experts 9": {"plain", "weft"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_case(case: str, tmp_path: Path) -> None:
    if "experts" in case:
        pytest.importorskip("transformers.distributed.expert_parallel")
    short = ("--rounds", "1", "--steps", "1", "--warmup", "2")
    given = ("--device=cpu", "--cases", case, "--results", str(tmp_path), *short)
    done = run_program(RUN, 2, "frameworks", *given, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "cpu-x2-frameworks.json").read_text())
    rows = {row["contender"]: row for row in kept["rows"]}
    assert rows.keys() == CASES[case]
    for name, row in rows.items():
        assert row["error"] < 1e-4, name
        assert "experts" in case or (row["fused"] > 0) is not name.startswith("plain"), name
