"""What was measured, on disk: read back, and never trusted further than it says for what it is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weft.kernels.device.jit.program import write_whole
from weft.kernels.device.tuning import measured
from weft.kernels.device.tuning.measured import TimesFile, median_us

FIRST, SECOND = {"product": 1.5}, {"product": 2.5, "copy": 3.25}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_it_is_read_back_and_grows(folder: Path) -> None:
    file = TimesFile("NVIDIA H200 / 141GB", 4)
    assert file.read() == {}
    file.add({"kind": SECOND})
    file.add({"another": SECOND})
    file.add({"kind": FIRST})
    assert TimesFile("NVIDIA H200 / 141GB", 4).read() == {"another": SECOND, "kind": FIRST}
    assert list(folder.iterdir()) == [file.place]
    assert file.place.name.startswith("times-NVIDIA-H200-141GB-x4-")


def test_others_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    TimesFile("GPU", 4).add({"kind": FIRST})
    for other in (TimesFile("GPU 2", 4), TimesFile("GPU", 2)):
        assert other.read() == {}
    monkeypatch.setattr(measured, "_version", lambda: "another")
    assert TimesFile("GPU", 4).read() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b"null",
        b'{"for": {}, "kinds": {"kind": {"us": 1.0}}}',
        b"[" * 100_000,
    ],
)
def test_what_is_not_ours_is_ignored_and_replaced(content: bytes) -> None:
    file = TimesFile("GPU", 2)
    file.place.write_bytes(content)
    assert file.read() == {}
    file.add({"kind": FIRST})
    assert file.read() == {"kind": FIRST}


@pytest.mark.parametrize(
    "kinds",
    [None, [], "text", *({"kind": kept} for kept in (3, {}, [1.0], {"us": 1}, {"us": -1.0}, {"us": None}))],
)
def test_what_are_no_times_is_ignored(kinds: object) -> None:
    file = TimesFile("GPU", 2)
    file.add({"kind": FIRST})
    file.place.write_text(json.dumps(json.loads(file.place.read_text()) | {"kinds": kinds}))
    assert file.read() == {}


def test_another_gpu_of_the_same_file_name(folder: Path) -> None:
    TimesFile("a/b", 2).add({"kind": FIRST})
    assert TimesFile("a b", 2).place == TimesFile("a/b", 2).place
    assert TimesFile("a b", 2).read() == {}


def test_writers_at_once_leave_a_whole_file(folder: Path) -> None:
    file, wrong = TimesFile("GPU", 2), []

    def write(writer: int) -> None:
        for i in range(30):
            file.add({f"{writer}-{i}": SECOND})
            if not file.read():
                wrong.append((writer, i))

    writers = [threading.Thread(target=write, args=(w,)) for w in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert not wrong and all(kept == SECOND for kept in file.read().values())
    assert list(folder.iterdir()) == [file.place]


def test_what_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "a folder", b"content")
    assert [p.name for p in tmp_path.iterdir()] == ["a folder"]


@pytest.mark.parametrize(
    "changed", ["device/tuning/measured.py", "all_gather_matmul/kernel.cu", "device/ptx/sync.cuh", None]
)
def test_the_version_is_that_of_all_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str | None
) -> None:
    kernels = tmp_path / "kernels"
    for name in ("device/tuning/measured.py", "device/ptx/sync.cuh", "all_gather_matmul/kernel.cu"):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text(name)
    monkeypatch.setattr(measured, "_KERNELS", kernels)
    before = measured._version.__wrapped__()
    (kernels / (changed or "notes.txt")).write_text("another text")
    assert (measured._version.__wrapped__() == before) is (changed is None)


def test_the_real_kernels_are_read() -> None:
    assert measured._KERNELS.joinpath("matmul_reduce_scatter", "kernel.cu").is_file()


def test_measuring_takes_turns_and_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    times = iter(ms for i in range(5) for ms in (0.3 * (i + 1), 0.6))  # the warm-ups are not asked for theirs

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object) -> None:
            done.append("|")

        def elapsed_time(self, end: object) -> float:
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: done.append("end"))
    )
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    launches = [lambda: done.append("a"), lambda: done.append("b")]
    found = median_us(launches, torch.device("cuda", 0))
    assert found == pytest.approx([300.0, 200.0])
    assert done == [*["sleep", *"|aaa||bbb|"] * 7, "end"]
    assert next(times, None) is None
