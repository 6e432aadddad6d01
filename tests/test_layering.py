"""Imports run one way: bench, tests, examples -> fused_ops -> kernels -> symm_mem."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "symm_mem": set[str](),
    "kernels": {"symm_mem"},
    "fused_ops": {"kernels", "symm_mem"},
}
USERS = ("bench", "examples", "tests")


def imports(source: str, parts: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, absolute dotted parts) of everything that the module ``parts`` of the checkout imports.

    ``weft.x`` and a relative import of ``x`` from the root are both given as ``("weft", "x")``.
    """
    package = ("weft", *parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            if node.level > len(package):
                yield node.lineno, ("beyond the package",)
                continue
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def violations(source: str, parts: tuple[str, ...]) -> list[str]:
    top = parts[0]
    found = []
    for line, target in imports(source, parts):
        where = f"{'/'.join(parts)}:{line} imports {'.'.join(target)}"
        if target[0] in (*MAY_IMPORT, *USERS, "beyond the package"):
            found.append(where)
        elif (
            target[0] == "weft" and len(target) > 1 and target[1] != top and target[1] not in MAY_IMPORT[top]
        ):
            found.append(where)
        elif (
            target[:2] == ("weft", "kernels")
            and top == "kernels"
            and len(target) > 2
            and target[2] not in (parts[1], "device")
        ):
            found.append(where + ": one op's folder does not use another's")
    return found


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_imports_run_one_way(top: str) -> None:
    files = sorted((ROOT / top).rglob("*.py"))
    assert files
    found = [v for f in files for v in violations(f.read_text(), f.relative_to(ROOT).parts)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line", "allowed"),
    [
        ("symm_mem/heap.py", "from .peers import x", True),
        ("symm_mem/heap.py", "from ..kernels.device import sync", False),
        ("symm_mem/backends/vmm.py", "from ...fused_ops import ops", False),
        ("kernels/all_reduce/host.py", "from ...symm_mem import heap", True),
        ("kernels/all_reduce/host.py", "from ..device import sync", True),
        ("kernels/all_reduce/host.py", "from ..all_gather_matmul import host", False),
        ("kernels/device/sync.py", "from ..all_reduce import host", False),
        ("kernels/all_reduce/host.py", "from ...fused_ops import plan", False),
        ("fused_ops/plan.py", "from ..kernels.all_reduce import host", True),
        ("fused_ops/plan.py", "import weft.symm_mem", True),
        ("fused_ops/plan.py", "import kernels", False),
        ("fused_ops/plan.py", "from bench import timer", False),
        ("fused_ops/plan.py", "from ...outside import x", False),
        ("symm_mem/heap.py", "def f():\n    import weft.fused_ops", False),
    ],
)
def test_a_violation_is_found(path: str, line: str, allowed: bool) -> None:
    assert (violations(line, tuple(path.split("/"))) == []) is allowed


@pytest.mark.parametrize("top", USERS)
def test_users_import_the_installed_package(top: str) -> None:
    found = [
        f"{f.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
        for f in sorted((ROOT / top).rglob("*.py"))
        for line, target in imports(f.read_text(), f.relative_to(ROOT).parts)
        if target[0] in MAY_IMPORT or target[0] == "beyond the package"
    ]
    assert not found, "\n".join(found)
