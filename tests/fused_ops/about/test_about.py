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
from weft.fused_ops.about.kernels import kernels_text
from weft.kernels.device.capability import ALL, KERNELS, capabilities_text
from weft.symm_mem import switches

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, True, (1, 2), (1, 2))


def joined(count: int, gpu: Gpu, *, nvlink: bool = True) -> list[Gpu]:
    others = [tuple({*range(count)} - {i}) for i in range(count)]
    return [
        replace(gpu, index=i, reaches=those, by_nvlink=those if nvlink else ())
        for i, those in enumerate(others)
    ]


THREE = joined(3, H100)
A100 = joined(2, replace(H100, name="NVIDIA A100-SXM4-80GB", capability=(8, 0), sms=108))
L40S = joined(2, replace(H100, name="NVIDIA L40S", capability=(8, 9), sms=142), nvlink=False)
B200 = joined(2, replace(H100, name="NVIDIA B200", capability=(10, 0), sms=148))
PCIE = joined(2, replace(H100, name="NVIDIA H100 PCIe", sms=114), nvlink=False)


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


def test_the_help_names_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """test_packaging.py runs the module as a program."""
    with pytest.raises(SystemExit, match=r"^0$"):
        command.command_line(["--help"])
    assert "python -m weft bench" in capsys.readouterr().out


def test_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(THREE, monkeypatch)
    assert "0: NVIDIA H100 80GB HBM3, 9.0, 132 SMs, 80 GiB" in said
    assert "2: peer-to-peer access to all others, over NVLink" in said
    assert "a heap across all of them: possible" in said
    assert (
        "on GPUs: sm_90a (H100, H200): float32, bfloat16 and float16 on weft's kernels where that is profitable"
        in said
    )
    assert said[0] == (
        "3 NVIDIA H100 80GB HBM3 that reach each other's memory: fused kernels where they are predicted to be faster"
    )


ONLY_COMPILED = "kernels were only compiled for it, and run on no such GPU"


@pytest.mark.parametrize(
    ("gpus", "arch"), [(A100, "sm_80 (A100)"), (L40S, "sm_89 (L40S, RTX 4090)"), (B200, "sm_100a (B200)")]
)
def test_gpus_that_no_kernel_was_run_on(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], arch: str) -> None:
    said = lines(gpus, monkeypatch)
    assert f"on GPUs: {arch}: {ONLY_COMPILED}" in said and "all ops run unfused over NCCL" in said
    assert said[0] == f"2 {gpus[0].name} that reach each other's memory: {arch}: {ONLY_COMPILED}"
    assert "a heap across all of them: possible" in said
    (could,) = (
        line for line in said if line.startswith("WEFT_UNTESTED=1 takes weft's kernels, after a check, for: ")
    )
    for every in (
        "all-reduces",
        "transfers",
        "matmul + all-gather",
        "tokens to experts",
        "losses of a shared",
    ):
        assert every in could
    has_gemm = arch.startswith("sm_100a")
    assert ("grouped matmul" in could) == has_gemm
    fp8 = {"sm_80 (A100)": False}.get(arch, True)
    assert ("norms to fp8" in could) == ("all-gather + fp8 matmul" in could) == fp8
    assert ("routing of experts" in could) == has_gemm

    monkeypatch.setenv("WEFT_UNTESTED", "1")
    said = lines(gpus, monkeypatch)
    assert f"on GPUs: {arch}: {ONLY_COMPILED}" in said and "all ops run unfused over NCCL" not in said
    (runs,) = (
        line for line in said if line.startswith("WEFT_UNTESTED=1: on weft's kernels, after a check: ")
    )
    assert runs.partition("check: ")[2] == could.partition("for: ")[2]
    assert has_gemm != any(
        line.startswith("matmuls: around cuBLAS's, by one-shot exchanges or copy engines") for line in said
    )
    why = "grouped matmul by torch: its kernels are for GPUs of compute capability 9.0 or 10.0 or 10.3"
    assert (why in said) != has_gemm
    assert (
        "norms to fp8 unfused: its kernels are for GPUs of compute capability 8.9 or 9.0" in " ".join(said)
    ) != fp8


def test_a_pair_over_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in (PCIE, L40S):
        said = lines(pair, monkeypatch)
        assert "0: peer-to-peer access to all others, over PCIe, where no kernel was run" in said
        assert any(
            line.startswith("over PCIe: a group's first heap is checked; collectives send to one")
            for line in said
        )
        assert "a heap across all of them: possible" in said
    apart = [replace(gpu, reaches=(), by_nvlink=()) for gpu in L40S]  # as GeForce cards are
    said = lines(apart, monkeypatch)
    assert "0: peer-to-peer access to none" in said
    assert said[0].endswith(": ops run unfused over NCCL: GPU 0 has no peer-to-peer access to GPU 1")


def test_the_table_of_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command_line(["kernels"]) == 0  # without a GPU, too
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line and line[0] != " "] == [
        "Kernels",
        "Architectures",
        "Here",
    ]
    said = kernels_text([*THREE, A100[0], replace(H100, capability=(7, 0))])
    kernels, _, here = said.partition("\nHere\n")
    assert "sm_90a (H100, H200): float32" in here and "sm_80 (A100): kernels were only compiled" in here
    assert "its kernels are for GPUs of compute capability 8.0 or 8.6" in here
    rows = dict(re.findall(r"^  (\S+/\S+)\n((?:    .*\n)+)", kernels, re.MULTILINE))
    assert set(rows) == set(KERNELS)
    assert "only compiled for sm_80, sm_86, sm_89, sm_100a, sm_103a, sm_120a" in rows["all_reduce/kernel.cu"]
    assert "only compiled for sm_100a, sm_103a" in rows["matmul_reduce_scatter/kernel.cu"]


@pytest.mark.parametrize(
    ("index", "change", "why"),
    [
        (2, {"capability": (8, 0)}, "GPU 2 has compute capability 8.0, GPU 0 has 9.0"),
        (2, {"capability": (7, 0)}, f"GPU 2 has compute capability 7.0, must have {capabilities_text(ALL)}"),
        (1, {"shares": False}, "GPU 1 cannot share memory as file descriptors"),
        (1, {"reaches": (2,), "by_nvlink": (2,)}, "GPU 1 has no peer-to-peer access to GPU 0"),
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
