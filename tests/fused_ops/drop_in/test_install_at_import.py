"""WEFT_INSTALL=1: programs that never name weft, by torch's entry points; and by an import of weft without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from metadata import write_metadata

ASK = """
import sys
{first}
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
loaded = "weft.fused_ops" in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, 3)
try:
    y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, x.t(), "sum", 0, dist.group.WORLD.group_name)
    print(loaded, bool((y == 3).all()))
except NotImplementedError:
    print(loaded, "torch has none")
dist.destroy_process_group()
"""


def says(folder: Path, first: str = "", **env: str) -> tuple[str, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    result = subprocess.run(
        [sys.executable, "-c", ASK.format(first=first)],
        env={**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr


def test_the_variable_installs_when_torch_is_imported(tmp_path: Path) -> None:
    assert says(write_metadata(tmp_path), WEFT_INSTALL="1")[0] == "True True"


def test_without_it_torch_is_as_it_was(tmp_path: Path) -> None:
    """Nor does an import of torch import the library."""
    assert says(write_metadata(tmp_path), WEFT_INSTALL="0")[0] == "False torch has none"


def test_it_installs_where_weft_imports_torch(tmp_path: Path) -> None:
    """torch then asks for weft in the midst of its import."""
    assert says(write_metadata(tmp_path), "import weft.fused_ops", WEFT_INSTALL="1")[0] == "True True"


def test_it_installs_when_weft_is_imported(tmp_path: Path) -> None:
    """Where torch loads no entry points."""
    off = {"WEFT_INSTALL": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert says(write_metadata(tmp_path), "import weft.fused_ops", **off)[0] == "True True"


def test_an_import_that_fails_leaves_torch_usable(tmp_path: Path) -> None:
    broken = tmp_path / "cuda.py"  # what weft needs, as a module that raises
    broken.write_text("raise ImportError('out of order')")
    said, warned = says(write_metadata(tmp_path), WEFT_INSTALL="1")
    assert said.endswith("torch has none")
    assert "WEFT_INSTALL=1: weft cannot be imported" in warned and "out of order" in warned


def test_another_value_is_named(tmp_path: Path) -> None:
    from weft.fused_ops.drop_in.installation import install_if_asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_INSTALL", "yes")
        with pytest.raises(ValueError, match="WEFT_INSTALL: is 'yes', must be 0 or 1"):
            install_if_asked()
