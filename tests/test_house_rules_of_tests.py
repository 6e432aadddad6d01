"""House rules of tests that a search can hold: a function of theirs patches no more than one of weft's internals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mutations import MUTANTS

TESTS = Path(__file__).parent

PATCHES = ("setattr", "setitem", "delattr", "patch", "object")


def weft_names(module: ast.Module) -> set[str]:
    """What a module calls weft, or has imported of it."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {
                (a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "weft"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
            names |= {a.asname or a.name for a in node.names}
    return names


def patched(function: ast.AST) -> Iterator[ast.expr]:
    """The targets of monkeypatch.setattr, .setitem and .delattr, mock.patch and mock.patch.object in it."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in PATCHES:
            called = ast.unparse(node.func)
            by_pytest = "monkeypatch" in called and called.endswith((".setattr", ".setitem", ".delattr"))
            if by_pytest or called in ("mock.patch", "mock.patch.object", "patch", "patch.object"):
                yield node.args[0]


def is_of_weft(target: ast.expr, names: set[str]) -> bool:
    if isinstance(target, ast.Constant):
        return str(target.value).split(".")[0] == "weft"
    if isinstance(target, ast.JoinedStr):
        return is_of_weft(target.values[0], names) if target.values else False
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Call):
        target = target.func if isinstance(target, ast.Call) else target.value
    return isinstance(target, ast.Name) and target.id in names


def patches(source: str) -> dict[str, int]:
    """How many of weft's internals each function, those inside of it included, patches: each place counts once."""
    if "patch" not in source:
        return {}
    module = ast.parse(source)
    names, found = weft_names(module), {}
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    for of in (node for node in module.body if isinstance(node, ast.ClassDef)):
        functions += [node for node in of.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        # A loop over several of weft's modules names each in its turn.
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
        turns = {
            name.id
            for loop in loops
            if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(loop.iter))
            for name in ast.walk(loop.target)
            if isinstance(name, ast.Name)
        }
        count = sum(is_of_weft(target, names | turns) for target in patched(function))
        if count:
            found[function.name] = count
    return found


def test_tests_patch_one_internal() -> None:
    found = {
        f"{file.relative_to(TESTS).as_posix()}::{name}": count
        for file in sorted(TESTS.rglob("*.py"))
        for name, count in patches(file.read_text()).items()
        if count > 1
    }
    assert not found, f"more than one of weft's internals: {found}"


def test_the_rule_can_fail() -> None:
    seen = patches(
        """
from unittest import mock
import torch
from weft.fused_ops import dispatch
from weft.symm_mem.heap import registry as heaps
import weft.kernels

def stage(monkeypatch):
    monkeypatch.setattr(dispatch.plan, "on", 1)
    monkeypatch.setattr("weft.kernels.x", 1)
    monkeypatch.setitem(heaps._heaps, 1, 2)
    monkeypatch.setenv("WEFT_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "Event", 1)
    def inside():
        with mock.patch.object(dispatch, "y", 1), mock.patch("weft.z"):
            pass
    for module in (dispatch, heaps):
        monkeypatch.setattr(module, "num_sms", 132)

def none(monkeypatch, stage):
    monkeypatch.setattr(stage.kernel, "launch", 1)
    mock.patch.dict(dispatch.known, clear=True)

class Gpu:
    def __init__(self, monkeypatch):
        self.monkeypatch.setattr(heaps, "x", 1)
"""
    )
    assert seen == {"stage": 6, "__init__": 1}


def test_what_conftest_names_is_there() -> None:
    """The files that come first, and how the second run of `make test` is told from others."""
    conftest = (TESTS / "conftest.py").read_text()
    names = re.findall(r'"(test_\w+\.py)"', conftest)
    assert len(names) > 10 and not [n for n in names if not list(TESTS.rglob(n))]
    (second,) = re.findall(r'^_SECOND_RUN = "(.*)"$', conftest, re.MULTILINE)
    assert f'-m "{second}"' in (TESTS.parent / "Makefile").read_text()


def test_mutants_are_of_todays_files() -> None:
    """Each text stands once in its file, and the tests that must see the mutant are there."""
    for mutant in MUTANTS:
        assert (TESTS.parent / mutant.file).read_text().count(mutant.text) == 1, mutant
        for path, _, name in (each.partition("::") for each in re.findall(r"tests/\S+", mutant.tests)):
            assert f"def {name}" in (TESTS.parent / path).read_text(), mutant
