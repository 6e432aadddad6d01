"""What a results file says of the machine and the code."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import machine


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_the_commit_and_whether_the_code_is_another(tmp_path: Path) -> None:
    try:
        git(tmp_path, "init")
    except FileNotFoundError:
        pytest.skip("no git")
    assert machine.commit(tmp_path) == ("unknown", None), "nothing is committed"
    (tmp_path / "code").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert machine.commit(tmp_path) == (head, False)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "h200.json").write_text("{}")
    assert machine.commit(tmp_path) == (head, False), "what a run writes is no change"
    (tmp_path / "code").write_text("2")
    assert machine.commit(tmp_path) == (head, True)
    assert machine.commit(tmp_path / "bench") == ("unknown", None), "a folder of another project"


def test_settings_name_no_path_and_no_host() -> None:
    environment = {
        "WEFT_PDL": "1",
        "WEFT_CACHE_DIR": "/home/someone/cache",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_HOSTID": "7",
        "NCCL_SOCKET_IFNAME": f"{platform.node()}x",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "HOME": "/home/someone",
    }
    assert machine.settings(environment) == {
        "NCCL_HOSTID": "set",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "set",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "WEFT_CACHE_DIR": "set",
        "WEFT_PDL": "1",
    }
