"""Every public function, class and method has an example in its docstring, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import io
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import weft
from ranks import run_ranks
from torch._inductor import config as inductor_config
from weft import fused_ops, symm_mem

ROOT = Path(__file__).parent.parent
MODULES = {"fused_ops": fused_ops, "symm_mem": symm_mem}
# The group broken by one example must not fail all that come after it only after minutes.
DEADLINE = 30.0  # seconds


def of_class(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods that weft defines; those of torch's that it overrides where it has more to say of them."""
    for method in (m for m in dir(cls) if not m.startswith("_") and inspect.isroutine(getattr(cls, m))):
        definitions = [base for base in reversed(cls.__mro__) if method in vars(base)]
        ours = [base for base in definitions if base.__module__.startswith("weft.")]
        documented = [base for base in ours if vars(base)[method].__doc__]
        if documented or definitions[0] in ours:
            yield f"{name}.{method}", getattr((documented or ours)[-1], method)


def public() -> dict[str, Any]:
    """By name; without type aliases, which have no docstring of their own."""
    found: dict[str, Any] = {}
    for module, content in MODULES.items():
        for name in content.__all__:
            value = getattr(content, name)
            if inspect.isclass(value):
                found[f"{module}.{name}"] = value
                found.update(of_class(f"{module}.{name}", value))
            elif inspect.isroutine(value):
                found[f"{module}.{name}"] = value
    return found


def example(value: Any) -> doctest.DocTest:
    name = f"{value.__module__}.{value.__qualname__}"
    return doctest.DocTestParser().get_doctest(value.__doc__ or "", {}, name, None, 0)


def runs_examples(rank: int, world_size: int) -> dict[str, str]:
    """What went otherwise than shown, by name."""
    failed = {}
    # A graph from Inductor's cache is in no report. One thread: others start processes.
    caches = inductor_config.patch(fx_graph_cache=False, compile_threads=1)
    with caches, tempfile.TemporaryDirectory() as tempfile.tempdir:
        for name, value in public().items():
            symm_mem.set_timeout(DEADLINE)
            printed = io.StringIO()
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            runner.run(example(value), out=printed.write)
            if printed.getvalue():
                failed[name] = printed.getvalue()
        dist.barrier()  # an example's folder is that of rank 0
    return failed


@cache
def failures() -> dict[str, str]:
    first, second = run_ranks(runs_examples, 2, fresh=True)
    return {name: first.get(name) or second[name] for name in {**first, **second}}


@pytest.mark.parametrize("name", public())
def test_the_example_runs(name: str) -> None:
    assert name not in failures(), failures()[name]


def fault_of(doc: str) -> str:
    """The example follows the first paragraph, which says what it is; all else comes after it.

    On the API page two names at one colon would be taken for a name and its type.
    """
    paragraphs = doc.split("\n\n")
    if len(paragraphs) < 2 or not paragraphs[1].startswith(">>> "):
        return "does not begin with an example"
    if "\n" in paragraphs[0]:
        return "begins with more than one line"
    sections = re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?)+)", doc, re.MULTILINE)
    several = [line for text in sections for line in text.splitlines() if re.match(r" {4}\w+, ", line)]
    return f"two arguments share a line: {several}" if several else ""


def test_docstrings_begin_with_an_example_and_have_a_line_for_each_argument() -> None:
    faults = {name: fault_of(inspect.cleandoc(value.__doc__ or "")) for name, value in public().items()}
    assert not (found := {name: fault for name, fault in faults.items() if fault}), found


def test_faults_of_docstrings_are_found() -> None:
    example = ">>> f()"
    assert fault_of("") == fault_of("One.\n\nMore.") == "does not begin with an example"
    assert fault_of(f"One\nor two.\n\n{example}") == "begins with more than one line"
    assert "share a line" in fault_of(f"One.\n\n{example}\n\nArgs:\n    a, b: numbers.")
    assert not fault_of(f"One.\n\n{example}\n\nArgs:\n    a: a number, b, or both.")


def test_names_are_on_their_pages() -> None:
    for module, content in MODULES.items():
        page = (ROOT / "docs" / "api" / f"{module}.rst").read_text()
        there = set(re.findall(r"^\.\. \S+:: (\w+)(?:\(\))?$", page, re.MULTILINE))
        assert not {*content.__all__} - there


def test_a_failing_example_is_seen() -> None:
    def wrong() -> None:
        """One.

        >>> 1 + 1
        3
        """

    printed = io.StringIO()
    doctest.DocTestRunner().run(example(wrong), out=printed.write)
    assert "Expected" in printed.getvalue()


def test_methods_are_found() -> None:
    names = public()
    assert {
        "symm_mem.Peers.put",
        "fused_ops.FusionPass.report",
        "fused_ops.RowParallelLinear.from_linear",
    } <= {*names}
    assert "fused_ops.FusionPass.uuid" not in names, "torch's"


def test_each_name_is_found_in_the_root_package_or_one_submodule() -> None:
    submodules = {"checkpoint", "drop_in", "passes", *MODULES}
    apart = {*weft.checkpoint.__all__, *weft.drop_in.__all__, *weft.passes.__all__}
    of_groups = {"GroupCalls", "WeftProcessGroup", "is_weft_group"}
    errors = {name for name in symm_mem.__all__ if is_error(getattr(symm_mem, name))}
    root = set(weft.__all__) - submodules - errors - {"__version__"}
    assert root | apart | of_groups >= {*fused_ops.__all__}
    assert root <= {*fused_ops.__all__} and errors <= {*weft.__all__}
    assert root & apart == {"FusionError", "FusionPass", "compile", "install"}


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, symm_mem.WeftError)


def test_a_group_that_is_not_given_is_the_default_one() -> None:
    """The examples call the ops so."""
    takes = {name: inspect.signature(getattr(fused_ops, name)).parameters for name in fused_ops.__all__}
    groups = {name: parameters["group"] for name, parameters in takes.items() if "group" in parameters}
    ops = {name for name in fused_ops.__all__ if name.startswith(("fused_", "one_shot_", "float8_"))}
    assert groups.keys() >= {*ops, "ColumnParallelLinear", "RowParallelLinear", "all_reduce_gradients"}
    assert not [name for name, group in groups.items() if group.default is not None]
