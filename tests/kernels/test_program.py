"""From source to cubin: the cache on disk, what its key covers, error texts, and a machine without a driver."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from unittest import mock

import pytest
from weft.kernels.device.jit import program as under_test
from weft.kernels.device.jit.ahead import Compilation, ProgramCounts, program_counts
from weft.kernels.device.jit.program import CompileError, Program, WaitParams, compile_cubin

SOURCE = '#include "part.cuh"\nextern "C" __global__ void kernel(int* out) { *out = VALUE + PART; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "kernel.cu"
    path.parent.mkdir()
    path.write_text(SOURCE)
    (path.parent / "part.cuh").write_text("#define PART 1\n")
    return path


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compilations so far, with a cache of this test's own."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    done: list[str] = []

    def counted(path: Path, arch: str, defines: dict[str, str | int]) -> bytes:
        done.append(arch)
        return compile_cubin(path, arch, defines)

    monkeypatch.setattr(under_test, "compile_cubin", counted)
    return done


def cubin(source: Path, arch: str = "sm_90a", value: int = 2) -> bytes:
    return Program(source, arch, {"VALUE": value}).cubin()


def test_a_program_is_compiled_once(source: Path, compiles: list[str], tmp_path: Path) -> None:
    first = cubin(source)
    assert first.startswith(b"\x7fELF")
    assert cubin(source) == first
    assert compiles == ["sm_90a"]
    (left,) = (tmp_path / "cache").iterdir()
    assert left.suffix == ".cubin"


def test_programs_are_compiled_in_the_background(source: Path, compiles: list[str]) -> None:
    before = program_counts()
    programs = [Program(source, defines={"VALUE": i}) for i in range(5)]
    programs += [Program(source, defines={"VALUE": "no number"})]
    on_their_way = Compilation(programs)
    assert programs[0].cubin() == cubin(source, value=0)  # waits for it, or compiles it itself
    assert on_their_way.wait(120)
    counted = program_counts() - before
    assert counted.ahead + counted.at_calls + counted.kept == 6 and counted.failed == 1
    now = program_counts()
    assert len({p.cubin() for p in programs[:5]}) == 5
    assert program_counts() == now


def test_where_no_thread_can_be_started_nothing_is_compiled_ahead(
    source: Path, compiles: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before, program = program_counts(), Program(source, defines={"VALUE": 7})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert Compilation([program]).wait(10) and not compiles
    assert "1 kernels are not compiled ahead" in caplog.text
    assert Compilation([program]).wait(60)
    assert program_counts() - before == ProgramCounts(ahead=1)


def test_whatever_changes_the_program_compiles_it_again(
    source: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cubin(source)
    assert cubin(source, value=3) != first
    assert cubin(source, arch="sm_100a") != first
    (source.parent / "part.cuh").write_text("#define PART 2\n")
    assert cubin(source) != first
    source.write_text(SOURCE.replace("+", "-"))
    assert cubin(source) != first
    assert len(compiles) == 5
    monkeypatch.setattr(under_test, "_OPTIONS", (*under_test._OPTIONS, "--generate-line-info"))
    cubin(source)
    assert len(compiles) == 6


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_compiled_again(
    source: Path, compiles: list[str], tmp_path: Path, damage: str
) -> None:
    first = cubin(source)
    (stored,) = (tmp_path / "cache").iterdir()
    good = stored.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    stored.write_bytes({"cut": good[:-1], "flipped": bytes(flipped), "empty": b""}[damage])
    assert cubin(source) == first
    assert len(compiles) == 2
    assert stored.read_bytes() == good


def test_without_a_place_for_the_cache_programs_compile_all_the_same(
    source: Path, compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cubin(source).startswith(b"\x7fELF")


def test_without_a_home_there_is_no_cache(
    source: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_CACHE_DIR")
    monkeypatch.setattr(
        Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory."))
    )
    assert cubin(source) == cubin(source)
    assert len(compiles) == 2


def test_headers_in_the_current_folder_are_not_the_programs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = compile_cubin(source, defines={"VALUE": 2})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "part.cuh").write_text("#define PART 5\n")
    monkeypatch.chdir(elsewhere)
    assert compile_cubin(source, defines={"VALUE": 2}) == want


def test_a_broken_source_is_shown_with_its_line(source: Path) -> None:
    source.write_text('extern "C" __global__ void kernel(int* out) {\n    *out = nonsense;\n}\n')
    with pytest.raises(CompileError) as error:
        compile_cubin(source)
    assert re.search(r"kernel\.cu\(2\): error: identifier \"nonsense\" is undefined", str(error.value))
    assert "sm_90a" in str(error.value)


def test_a_broken_instruction_is_shown(source: Path) -> None:
    source.write_text('extern "C" __global__ void kernel() { asm("st.nowhere.u32 [0], 1;"); }\n')
    with pytest.raises(CompileError, match="nowhere"):
        compile_cubin(source)


def test_a_missing_define_is_named() -> None:
    kernel = under_test.DEVICE_FOLDER.parent / "all_reduce" / "kernel.cu"
    with pytest.raises(CompileError, match="WORLD_SIZE, RANK: ranks of the group, 2 or more"):
        compile_cubin(kernel)


def test_a_launch_needs_a_driver(source: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(Exception, match="NVIDIA driver library"):
            Program(source, defines={"VALUE": 1}).function("kernel")
    else:
        pytest.skip("there is a driver")


def test_the_struct_that_kernels_take() -> None:
    assert ctypes.sizeof(WaitParams) == 40
    offsets = [
        field.offset
        for field in (WaitParams.fault, WaitParams.record, WaitParams.timeout_ns, WaitParams.rank)
    ]
    assert offsets == [8, 16, 24, 32]
