"""pyproject.toml lists packages and data by hand: the lists are the tree's, and the wheel holds what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import weft

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
TOPS = ("symm_mem", "kernels", "fused_ops")
FOLDERS = (*TOPS, "bench", "examples", "tests", "docs", ".ci")
MODULES = tuple(sorted(f.name for f in ROOT.glob("*.py")))
FILES = (
    *MODULES,
    "py.typed",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "constraints.txt",
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def sources() -> set[Path]:
    """Every file of the package, from the root, that a user needs."""
    kinds = (".py", ".cu", ".cuh")
    inside = {f.relative_to(ROOT) for top in TOPS for f in (ROOT / top).rglob("*") if f.suffix in kinds}
    return inside | {*map(Path, MODULES), Path("py.typed")}


def test_package_list_is_the_tree() -> None:
    found = {
        ".".join(("weft", *f.parent.relative_to(ROOT).parts))
        for top in TOPS
        for f in (ROOT / top).rglob("__init__.py")
    }
    assert set(SETUPTOOLS["packages"]) == {"weft"} | found
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_every_folder_with_code_is_a_package() -> None:
    folders = {f.parent for f in sources() if len(f.parts) > 1}
    missing = sorted(
        str(f) for f in folders if not (ROOT / f / "__init__.py").exists() and f != Path("kernels")
    )
    assert not missing
    assert not [f for f in sources() if f.parent == Path("kernels")], "kernels/ itself is no package"


def test_package_data_is_the_tree() -> None:
    listed = {
        (package, pattern) for package, patterns in SETUPTOOLS["package-data"].items() for pattern in patterns
    }
    needed = {
        (".".join(("weft", *f.parent.parts)), f"*{f.suffix}")
        for f in sources()
        if f.suffix in (".cu", ".cuh")
    }
    assert needed | {("weft", "py.typed")} <= listed


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        re.split(r"[=;\s]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    names = {re.split(r"[><=!\[; ]", requirement)[0].lower() for requirement in wanted}
    # triton's version is torch's business, or the Makefile's.
    assert names - {PYPROJECT["project"]["name"], "triton"} <= pinned


def test_no_text_installs_the_other_project() -> None:
    """``weft`` on PyPI is another one. An extra of it is what a requirement or an install command would fetch."""
    suffixes = (".py", ".md", ".rst", ".toml", ".txt", "")
    files = [ROOT / f for f in FILES] + [f for top in FOLDERS for f in (ROOT / top).rglob("*") if f.is_file()]
    fetches = re.compile(r"(pip install|uv add|uv pip install)( -\S+)* ['\"]?weft(?!-nvlink)\b|['\"]weft\[")
    found = [
        f"{f.relative_to(ROOT)}: {match.group()}"
        for f in files
        if f.suffix in suffixes
        if (match := fetches.search(f.read_text()))
    ]
    assert not found


def test_makefile_names_the_triton_for_cpu() -> None:
    assert re.search(
        r"^TRITON_FOR_CPU := triton==\d+\.\d+\.\d+$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )


def build(kind: str, source: Path, out: Path) -> Path:
    """``kind`` is "sdist" or "wheel"; building leaves folders in ``source``."""
    program = f"from setuptools import build_meta as b; b.build_{kind}({str(out)!r})"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    (built,) = (f for f in out.iterdir() if f.suffix in (".gz", ".whl"))
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's content."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sdist")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    with tarfile.open(build("sdist", copy, out)) as archive:
        archive.extractall(out)
    (folder,) = (f for f in out.iterdir() if f.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that the sdist builds."""
    return zipfile.ZipFile(build("wheel", unpacked, tmp_path_factory.mktemp("wheel")))


def test_sdist_holds_the_checkout(unpacked: Path) -> None:
    wanted = {f.relative_to(ROOT) for top in FOLDERS for f in (ROOT / top).rglob("*") if f.is_file()}
    wanted = {f for f in wanted if "__pycache__" not in f.parts} | {Path(f) for f in FILES}
    held = {f.relative_to(unpacked) for f in unpacked.rglob("*") if f.is_file()}
    assert not wanted - held


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert held == {f"weft/{f.as_posix()}" for f in sources()}


def test_wheel_puts_one_name_on_the_path(wheel: zipfile.ZipFile) -> None:
    tops = {n.split("/")[0] for n in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"weft"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = wheel.read(name).decode()
    assert "Name: weft-nvlink\n" in metadata
    assert f"Version: {weft.__version__}\n" in metadata
    assert "License-Expression: BSD-3-Clause" in metadata
    assert any(n.endswith("LICENSE") for n in wheel.namelist())


def test_the_version_is_that_of_the_package() -> None:
    """``weft.__version__`` is where it stands; what cannot read it has the same."""
    assert re.search(
        rf"^version: {re.escape(weft.__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert f"## [{weft.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_repository_is_named_in_one_place() -> None:
    """[project.urls], for the site's links to edit pages; what cannot read it has the same, or none."""
    named = re.findall(r"^repository-code: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    url = PYPROJECT["project"].get("urls", {}).get("Repository")
    assert named == ([url] if url else [])


def git(folder: Path, *arguments: str) -> str:
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.skipif(
    not shutil.which("git") or not (ROOT / ".git").exists(), reason="wants git and a checkout"
)
def test_a_tag_is_the_version() -> None:
    assert set(git(ROOT, "tag", "--points-at", "HEAD", "--list", "v*").split()) <= {f"v{weft.__version__}"}


@pytest.mark.skipif(shutil.which("git") is None, reason="wants git")
def test_a_release_is_refused_or_built(unpacked: Path, tmp_path: Path) -> None:
    """By its tag: another version, a day that the changelog has not, and what is right."""
    folder = tmp_path / "release"
    shutil.copytree(unpacked, folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "a release")
    environment = {**os.environ, "PYTHON": sys.executable}

    def released() -> subprocess.CompletedProcess[str]:
        command = "bash", ".ci/release"
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    git(folder, "tag", "v9.9")
    done = released()
    assert done.returncode == 1 and f"tag v9.9: must be v{weft.__version__}, " in done.stderr
    git(folder, "tag", "-d", "v9.9")
    git(folder, "tag", f"v{weft.__version__}")
    changes = folder / "CHANGELOG.md"
    head = f"## [{weft.__version__}] - "
    changes.write_text(re.sub(rf"{re.escape(head)}.*", f"{head}unreleased", changes.read_text()))
    done = released()
    assert done.returncode == 1 and "CHANGELOG.md: must have the day of " in done.stderr
    assert not (folder / "dist").exists()
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    changes.write_text(changes.read_text().replace(f"{head}unreleased", f"{head}2027-01-31"))
    done = released()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(f.suffix for f in (folder / "dist").iterdir()) == [".gz", ".whl"]


def test_the_workflow_builds_a_release_of_a_tag() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert 'tags: ["v*"]' in workflow and "run: bash .ci/release" in workflow
    assert all(tool in workflow for tool in ("setuptools", "twine", "check-wheel-contents"))


def succeeds(*command: str | Path, folder: Path | None = None) -> str:
    """What it prints, without the checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_registries_and_linters_take_them(unpacked: Path, wheel: zipfile.ZipFile) -> None:
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    (sdist,) = unpacked.parent.glob("*.tar.gz")
    assert wheel.filename is not None
    succeeds(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel.filename)
    succeeds(sys.executable, "-m", "check_wheel_contents", wheel.filename)


def test_an_installed_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """In an environment of its own, which has torch by a path alone: no other weft's .pth file is read there."""
    # Not by its import, after which setuptools cannot be imported in this process any more.
    try:
        metadata.version("pip")
    except metadata.PackageNotFoundError:
        pytest.skip("there is no pip")
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    assert wheel.filename is not None
    install = "install", "--quiet", "--no-index", "--no-deps", wheel.filename
    succeeds(sys.executable, "-m", "pip", "--python", python, *install)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    said = succeeds(python, "-m", "weft", "--no-copies", folder=tmp_path)
    assert said.startswith("no GPU: CPU ranks, for tests only\n"), said
    assert said.count(": known to torch\n") == 2, said

    program = (ROOT / "examples" / "quickstart.py").read_text() + "\nimport weft\n\nprint(weft.__file__)\n"
    (tmp_path / "quickstart.py").write_text(program)
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    said = succeeds(python, *launcher, "quickstart.py", folder=tmp_path)
    assert said.count("algorithm='host'") == said.count(f"{site}/weft/__init__.py") == 2, said


def test_kernels_of_the_checkout_does_not_shadow_another_library(tmp_path: Path) -> None:
    """With the checkout first on sys.path, a regular package `kernels` further back is the one that is found."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("mine = True\n")
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import kernels; print(kernels.mine)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "True", result.stderr
