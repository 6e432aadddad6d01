"""Imports run one way: between the top folders, between the rooms inside them, and between files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"symm_mem": set[str](), "kernels": {"symm_mem"}, "fused_ops": {"kernels", "symm_mem"}}
FOR_ALL = {"hooks", "__version__", "__file__"}  # of the root package
USERS = ("bench", "examples", "tests")
MOST_FILES = 13  # of a room, its __init__.py not counted


def imports(source: str, parts: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, absolute dotted parts) of everything that the module ``parts`` of the checkout imports.

    ``weft.x`` and a relative import of ``x`` from the root are both given as ``("weft", "x")``.
    """
    is_package = parts[-1].removesuffix(".py") == "__init__"
    package = ("weft", *parts[:-1])
    nodes = list(ast.walk(ast.parse(source)))
    yield from attributes_of_the_root(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            if node.level > len(package):
                yield node.lineno, ("beyond the package",)
                continue
            base += tuple(node.module.split(".")) if node.module else ()
            if is_package and node.level and not node.module:
                base = package[: len(package) + 1 - node.level]
            for alias in node.names:
                yield node.lineno, (*base, alias.name)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                yield node.lineno, ("beyond the package",)
                continue
            level = len(name.value) - len(name.value.lstrip("."))
            base = package[: len(package) + 1 - level] if level else ()
            yield node.lineno, (*base, *name.value.lstrip(".").split("."))


def called(node: ast.Call) -> str:
    """The last name of the function that is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def attributes_of_the_root(nodes: list[ast.AST]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, ("weft", name)) of what is used of the root package, which finds any floor by its name."""
    roots = {
        alias.asname or "weft"
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "weft" or (alias.name.startswith("weft.") and not alias.asname)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots:
            yield node.lineno, ("weft", node.attr)


def violations(source: str, parts: tuple[str, ...]) -> list[str]:
    top = parts[0]
    found = []
    for line, target in imports(source, parts):
        where = f"{'/'.join(parts)}:{line} imports {'.'.join(target)}"
        if target[0] in (*MAY_IMPORT, *USERS, "beyond the package"):
            found.append(where)
        elif target[0] == "weft" and len(target) > 1 and target[1] not in {top, *MAY_IMPORT[top], *FOR_ALL}:
            found.append(where)
        elif (
            target[:2] == ("weft", "kernels")
            and top == "kernels"
            and len(target) > 2
            and target[2] not in (parts[1], "device")
        ):
            found.append(where + ": one op's folder does not use another's")
    return found


@cache
def file_graph() -> dict[str, set[str]]:
    """Which file of the package imports which, also for types alone; without ``__init__`` files, which re-export."""
    files = {
        f.relative_to(ROOT).as_posix()
        for top in MAY_IMPORT
        for f in (ROOT / top).rglob("*.py")
        if f.name != "__init__.py"
    }
    graph: dict[str, set[str]] = {}
    for file in files:
        graph[file] = set()
        for _, target in imports((ROOT / file).read_text(), tuple(file.split("/"))):
            for end in range(len(target), 1, -1):
                if (found := "/".join(target[1:end]) + ".py") in files:
                    graph[file].add(found)
                    break
    return graph


def room_of(file: str) -> str:
    """The folder of a file inside a top folder; a file that stands in the top folder itself is a room of its own."""
    folder = file.rsplit("/", 1)[0]
    return file if folder in (*MAY_IMPORT, "fused_ops/passes", "kernels/device") else folder


def room_graph(files: Mapping[str, set[str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for file, targets in files.items():
        graph.setdefault(room_of(file), set()).update(map(room_of, targets))
    return {room: targets - {room} for room, targets in graph.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every set of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in graph.items()}
    for through in graph:
        for node in graph:
            if through in reach[node]:
                reach[node] |= reach[through]
    found = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph}
    return sorted(sorted(circle) for circle in found if circle)


def test_imports_run_one_way() -> None:
    files = [f for top in MAY_IMPORT for f in sorted((ROOT / top).rglob("*.py"))]
    assert {f.relative_to(ROOT).parts[0] for f in files} == {*MAY_IMPORT}
    found = [v for f in files for v in violations(f.read_text(), f.relative_to(ROOT).parts)]
    assert not found, "\n".join(found)


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert not circles(file_graph())


def test_rooms_import_one_way() -> None:
    assert not circles(room_graph(file_graph()))


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"a"}}) == [["a"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    rooms = room_graph({"symm_mem/heap/a.py": {"symm_mem/b.py"}, "symm_mem/b.py": {"symm_mem/heap/c.py"}})
    assert circles(rooms) == [["symm_mem/b.py", "symm_mem/heap"]]
    assert file_graph()["symm_mem/heap/registry.py"] >= {"symm_mem/heap/heap.py", "symm_mem/errors.py"}


def test_no_room_is_crowded() -> None:
    kinds = (".py", ".cu", ".cuh")
    rooms = {f.parent for top in MAY_IMPORT for f in (ROOT / top).rglob("*") if f.suffix in kinds}
    crowded = {
        room.relative_to(ROOT).as_posix(): count
        for room in rooms
        if (count := sum(f.suffix in kinds and f.name != "__init__.py" for f in room.iterdir())) > MOST_FILES
    }
    assert not crowded


def test_a_violation_is_found() -> None:
    rows = [
        ("symm_mem/heap/heap.py", "from ..tensors import x", True),
        ("symm_mem/heap/heap.py", "from ...kernels.device.jit import program", False),
        ("symm_mem/backends/vmm.py", "from ...fused_ops.library import schema", False),
        ("kernels/all_reduce/host.py", "from ...symm_mem import heap", True),
        ("kernels/all_reduce/host.py", "from ..device.comm import double_buffer", True),
        ("kernels/all_reduce/host.py", "from ..all_gather_matmul import host", False),
        ("kernels/device/jit/ahead.py", "from ...all_reduce import host", False),
        ("kernels/all_reduce/host.py", "from ...fused_ops.dispatch import plan", False),
        ("fused_ops/dispatch/plan.py", "from ...kernels.all_reduce import host", True),
        ("fused_ops/functional.py", "import weft.symm_mem", True),
        ("fused_ops/functional.py", "import kernels", False),
        ("fused_ops/functional.py", "from bench import timer", False),
        ("fused_ops/functional.py", "from ...outside import x", False),
        ("symm_mem/heap/heap.py", "def f():\n    import weft.fused_ops", False),
        ("symm_mem/heap/heap.py", "from ... import hooks", True),
        ("symm_mem/heap/heap.py", "import weft\nweft.__version__", True),
        ("symm_mem/heap/heap.py", "import weft\nweft.plan", False),
        ("symm_mem/heap/heap.py", "import weft as root\nroot.kernels", False),
        ("symm_mem/heap/heap.py", "import weft.symm_mem\nweft.fused_ops.plan", False),
        ("symm_mem/heap/heap.py", "from weft import plan", False),
        ("symm_mem/heap/heap.py", "importlib.import_module('weft.kernels.transfer')", False),
        ("symm_mem/heap/heap.py", "import_module('...fused_ops', __package__)", False),
        ("symm_mem/heap/heap.py", "__import__('weft.fused_ops')", False),
        ("symm_mem/heap/heap.py", "importlib.import_module(name)", False),
        ("symm_mem/heap/heap.py", "importlib.import_module('torch._inductor')", True),
    ]
    wrong = [
        (path, line)
        for path, line, allowed in rows
        if (not violations(line, tuple(path.split("/")))) != allowed
    ]
    assert not wrong


def test_a_circle_by_name_is_found() -> None:
    here = ("fused_ops", "library", "compiled.py")
    assert (1, ("weft", "fused_ops", "library", "inductor")) in [
        *imports("importlib.import_module('.inductor', __package__)", here)
    ]


def test_users_import_the_installed_package() -> None:
    found = [
        f"{f.relative_to(ROOT)}:{line} imports {'.'.join(target)}"
        for top in USERS
        for f in sorted((ROOT / top).rglob("*.py"))
        for line, target in imports(f.read_text(), f.relative_to(ROOT).parts)
        if target[0] in MAY_IMPORT or target[0] == "beyond the package"
    ]
    assert not found, "\n".join(found)
