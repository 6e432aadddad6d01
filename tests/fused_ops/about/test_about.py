"""``python -m weft``: on this machine, on machines that are made up, and as a door to the bench."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import weft
from weft.fused_ops.about import command, text
from weft.fused_ops.about.gpus import Gpu, why_not_on
from weft.symm_mem import switches

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, True, (1, 2))
THREE = [replace(H100, index=i, reaches=tuple({0, 1, 2} - {i})) for i in range(3)]


def lines(found: list[Gpu] | str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(text, "visible_gpus", lambda: found)
    return [line.strip() for line in text.about_text(measured=False).splitlines()]


def test_here() -> None:
    """Without a GPU, and without anything of CUDA where there is one."""
    program = "import torch, weft.fused_ops.about.text as t; print(t.about_text(measured=False))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; assert not torch.cuda.is_initialized()"],
        env={**os.environ, "WEFT_TIMEOUT": "77"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert f"weft {weft.__version__}" in said and f"torch {torch.__version__}" in said
    assert "a heap in shared memory: possible" in said
    assert "a wait for a peer ends after 77 s" in said and "WEFT_TIMEOUT=77" in said
    first, *titles = [line for line in said.splitlines() if line and not line.startswith(" ")]
    assert torch.cuda.device_count() or first == "no GPU: CPU ranks, for tests only"
    assert titles == ["Versions", "GPUs", "CPU ranks", "Groups", "Ops", "Plugged in", "Environment"]


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "--help"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "python -m weft bench" in done.stdout


def test_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(THREE, monkeypatch)
    assert "0: NVIDIA H100 80GB HBM3, 9.0, 132 SMs, 80 GiB" in said
    assert "2: peer-to-peer access to all others" in said
    assert "a heap across all of them: possible" in said
    assert said[0] == (
        "3 NVIDIA H100 80GB HBM3 that reach each other's memory: fused kernels where they are predicted to be faster"
    )


@pytest.mark.parametrize(
    ("index", "change", "why"),
    [
        (2, {"capability": (8, 0)}, "GPU 2 has compute capability 8.0, must be 9.0"),
        (1, {"shares": False}, "GPU 1 cannot share memory as file descriptors"),
        (1, {"reaches": (2,)}, "GPU 1 has no peer-to-peer access to GPU 0"),
        (2, {"sms": 114}, "GPU 2 has 114 SMs, GPU 0 has 132"),
    ],
)
def test_gpus_that_do_not(
    monkeypatch: pytest.MonkeyPatch, index: int, change: dict[str, object], why: str
) -> None:
    gpus = [*THREE]
    gpus[index] = replace(gpus[index], **change)  # type: ignore[arg-type]
    assert why_not_on(gpus) == why
    said = lines(gpus, monkeypatch)
    assert f"a heap across all of them: not possible: {why}" in said
    assert said[0] == f"3 NVIDIA H100 80GB HBM3: ops run unfused over NCCL: {why}"


def test_one_gpu_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one, none = lines(THREE[:1], monkeypatch), lines("no driver", monkeypatch)
    assert any("WEFT_SHARE_GPUS=1" in line for line in one) and "none: no driver" in none
    assert one[0] == "1 NVIDIA H100 80GB HBM3: ops run unfused, as one rank has nobody to send to"
    assert none[0] == "no GPU: CPU ranks, for tests only"


def test_the_door_to_the_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(command.subprocess, "call", lambda given: called.append(given) or 7)
    assert command.command_line(["bench", "--ranks", "2"]) == 7
    ((python, script, *rest),) = called
    assert python == sys.executable and rest == ["--ranks", "2"]
    assert Path(script) == Path(__file__).resolve().parents[3] / "bench" / "run.py"


def test_no_bench_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weft, "__file__", str(tmp_path / "__init__.py"))
    assert command.command_line(["bench"]) == 2
    assert "bench/run.py is not beside this weft" in capsys.readouterr().err


@pytest.mark.gpu
def test_copies_are_timed() -> None:
    from weft.fused_ops.about.gpus import copy_speed

    speed = copy_speed(0, 1)
    assert isinstance(speed, float) and speed > 1


def test_what_is_wrong_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "abc")
    monkeypatch.setenv("WEFT_TIMOUT", "3")
    monkeypatch.setenv("WEFT_ZZZ", "")
    said = lines("no GPU", monkeypatch)
    assert any(line.startswith("WEFT_TIMEOUT: is 'abc', must be a number of seconds") for line in said)
    assert "WEFT_TIMOUT=3 (weft reads no such variable, but WEFT_TIMEOUT)" in said
    assert "WEFT_ZZZ= (weft reads no such variable)" in said
    assert "Environment" in said and "WEFT_TIMEOUT=abc" in said


def test_a_misspelt_variable_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEFT_REPROT", "report.txt")
    switches.warn_of_unknown_variables()
    assert caplog.messages == ["WEFT_REPROT: weft reads no such variable, but WEFT_REPORT"]


def test_all_variables_are_known() -> None:
    root = Path(weft.__file__).resolve().parent
    files = [f for top in ("symm_mem", "kernels", "fused_ops") for f in (root / top).rglob("*.py")]
    read = {name for f in files for name in re.findall(r'"(WEFT_[A-Z_]*[A-Z])"', f.read_text())}
    page = (root / "docs" / "operations.md").read_text()
    columns = re.findall(r"^\| (`WEFT_[^|]*) \|", page, re.MULTILINE)
    told = {name for column in columns for name in re.findall(r"`(WEFT_[A-Z_]*[A-Z])", column)}
    assert set(switches.VARIABLES) == read and told <= read
    assert read - told <= {"WEFT_TEST_SHARED_GPUS"}
