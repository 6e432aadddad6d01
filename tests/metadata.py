"""The entry points of pyproject.toml as an installed distribution has them, whatever is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]


def write_metadata(folder: Path) -> Path:
    """``folder``, which is to be on ``sys.path``, then holds the metadata of a distribution with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "weft_nvlink-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-nvlink\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def use_metadata(folder: Path) -> None:
    """In this process, also where torch has looked for backends before."""
    from torch._dynamo.backends import registry

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        registry._discover_entrypoint_backends.cache_clear()
        registry._lazy_import.cache_clear()
