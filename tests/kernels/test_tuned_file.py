"""What was measured, on disk: read back, and never trusted further than it says for what it is."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from weft.kernels.device.jit.program import write_whole
from weft.kernels.device.tuning import tuned_file
from weft.kernels.device.tuning.tuned_file import TunedFile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_it_is_read_back_and_grows(folder: Path) -> None:
    file = TunedFile("NVIDIA H200 / 141GB", 4)
    assert file.read() == {}
    file.add({"kind": "config"})
    file.add({"another": "config 2"})
    file.add({"kind": "config 3"})
    assert TunedFile("NVIDIA H200 / 141GB", 4).read() == {"another": "config 2", "kind": "config 3"}
    assert list(folder.iterdir()) == [file.place]
    assert file.place.name.startswith("tuned-NVIDIA-H200-141GB-x4-")


def test_others_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    TunedFile("GPU", 4).add({"kind": "config"})
    for other in (TunedFile("GPU 2", 4), TunedFile("GPU", 2)):
        assert other.read() == {}
    monkeypatch.setattr(tuned_file, "_version", lambda: "another")
    assert TunedFile("GPU", 4).read() == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"{", b"[]", b"null", b'{"for": {}, "kinds": {"kind": "config"}}', b"[" * 100_000],
)
def test_what_is_not_ours_is_ignored_and_replaced(content: bytes) -> None:
    file = TunedFile("GPU", 2)
    file.place.write_bytes(content)
    assert file.read() == {}
    file.add({"kind": "config"})
    assert file.read() == {"kind": "config"}


@pytest.mark.parametrize("kinds", [None, [], "text", {"kind": 3}, {"kind": ["config"]}])
def test_what_is_no_configuration_is_ignored(kinds: object) -> None:
    file = TunedFile("GPU", 2)
    file.add({"kind": "config"})
    file.place.write_text(json.dumps(json.loads(file.place.read_text()) | {"kinds": kinds}))
    assert file.read() == {}


def test_another_gpu_of_the_same_file_name(folder: Path) -> None:
    TunedFile("a/b", 2).add({"kind": "config"})
    assert TunedFile("a b", 2).place == TunedFile("a/b", 2).place
    assert TunedFile("a b", 2).read() == {}


def test_writers_at_once_leave_a_whole_file(folder: Path) -> None:
    file, wrong = TunedFile("GPU", 2), []

    def write(writer: int) -> None:
        for i in range(30):
            file.add({f"{writer}-{i}": "config" * 50})
            if not file.read():
                wrong.append((writer, i))

    writers = [threading.Thread(target=write, args=(w,)) for w in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert not wrong and set(file.read().values()) == {"config" * 50}
    assert list(folder.iterdir()) == [file.place]


def test_what_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "a folder", b"content")
    assert [p.name for p in tmp_path.iterdir()] == ["a folder"]


@pytest.mark.parametrize(
    "changed", ["device/tuning/benchmark.py", "all_gather_matmul/kernel.cu", "device/ptx/sync.cuh", None]
)
def test_the_version_is_that_of_all_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str | None
) -> None:
    kernels = tmp_path / "kernels"
    for name in ("device/tuning/benchmark.py", "device/ptx/sync.cuh", "all_gather_matmul/kernel.cu"):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text(name)
    monkeypatch.setattr(tuned_file, "_KERNELS", kernels)
    before = tuned_file._version.__wrapped__()
    (kernels / (changed or "notes.txt")).write_text("another text")
    assert (tuned_file._version.__wrapped__() == before) is (changed is None)


def test_the_real_kernels_are_read() -> None:
    assert tuned_file._KERNELS.joinpath("matmul_reduce_scatter", "kernel.cu").is_file()
