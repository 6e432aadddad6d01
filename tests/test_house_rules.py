"""House rules that a search can hold: where inline assembly stands, what is never called, how long a file is, names."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path

import weft

ROOT = Path(__file__).parent.parent
PACKAGE = ("symm_mem", "kernels", "fused_ops")
EVERYTHING = (*PACKAGE, "bench", "examples", "tests")
NAMED = (*PACKAGE, "bench", "examples")  # where a name stands for one thing
MAX_LINES = 400
MAX_PARAMETERS = 6  # self and cls not counted

# Public signatures as torch has them. No other function takes more.
LIKE_TORCH = {
    "fused_ops/norms.py::fused_all_reduce_layer_norm",
    "fused_ops/norms.py::fused_all_reduce_rms_norm",
    "fused_ops/norms.py::fused_all_reduce_rms_norm_quant",
    "fused_ops/expert_parallel.py::moe_dispatch",
    "fused_ops/experts.py::fused_all_gather_grouped_matmul",
    "fused_ops/functional.py::fused_matmul_reduce_scatter",
    "fused_ops/experts_sums.py::fused_grouped_matmul_all_reduce",
    "fused_ops/experts_sums.py::fused_grouped_matmul_reduce_scatter",
    "fused_ops/experts_sums.py::fused_moe_combine_all_reduce_rms_norm",
    "fused_ops/scaled.py::fused_all_gather_scaled_matmul",
    "fused_ops/scaled.py::fused_scaled_matmul_reduce_scatter",
    "fused_ops/vocabulary.py::cross_entropy_of_sharded_logits",
    "fused_ops/vocabulary.py::fused_linear_cross_entropy",
    "fused_ops/vocabulary.py::fused_linear_log_probs",
    "fused_ops/layers/experts.py::ColumnParallelExperts.__init__",
    "fused_ops/layers/experts.py::RowParallelExperts.__init__",
    "fused_ops/layers/linear.py::ColumnParallelLinear.__init__",
    "fused_ops/layers/linear.py::RowParallelLinear.__init__",
}


def files(tops: tuple[str, ...], *suffixes: str) -> list[Path]:
    return sorted(f for top in tops for f in (ROOT / top).rglob("*") if f.suffix in suffixes)


def python_code(source: str) -> str:
    """``source`` without comments and strings: what is left is code."""
    kept = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            kept.append(token.string)
    return " ".join(kept)


def cuda_code(source: str) -> str:
    """``source`` without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S)


def code(file: Path) -> str:
    return python_code(file.read_text()) if file.suffix == ".py" else cuda_code(file.read_text())


def test_inline_assembly_stands_in_kernels_device() -> None:
    pattern = re.compile(r"\binline_asm_elementwise\b|\basm\s*(volatile)?\s*\(|\b__asm__\b")
    device = ROOT / "kernels" / "device"
    found = [
        str(f.relative_to(ROOT))
        for f in files(PACKAGE, ".py", ".cu", ".cuh")
        if device not in f.parents and pattern.search(f.read_text()) and pattern.search(code(f))
    ]
    assert not found, f"inline assembly outside kernels/device: {found}"


def test_no_multicast() -> None:
    """NVLink multicast can put GPUs that others share out of service."""
    pattern = re.compile(r"multimem|multicast|\bnvls\b", re.IGNORECASE)
    found = [
        f"{f.relative_to(ROOT)}: {match.group()}"
        for f in files(("symm_mem", "kernels", "fused_ops", "examples", "bench"), ".py", ".cu", ".cuh")
        # Copies to two blocks of one GPU's cluster are called so, too.
        if pattern.search(f.read_text())
        and (match := pattern.search(code(f).replace("multicast::cluster", "")))
    ]
    # Assembly is written in strings.
    found += [
        f"{f.relative_to(ROOT)}: multimem"
        for f in files(PACKAGE, ".py", ".cu", ".cuh")
        if re.search(r"multimem\.", f.read_text())
    ]
    assert not found, found


def test_no_file_is_too_long() -> None:
    lengths = {f: f.read_text().count("\n") for f in files(EVERYTHING, ".py", ".cu", ".cuh", ".cpp", ".h")}
    found = {str(f.relative_to(ROOT)): lines for f, lines in lengths.items() if lines > MAX_LINES}
    assert not found, f"more than {MAX_LINES} lines, split them: {found}"


def aliases(source: str) -> list[str]:
    """The names under which ``source`` imports torch's symmetric memory module."""
    names = []
    if "_symmetric_memory" not in source:
        return names
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name == "torch.distributed._symmetric_memory":
                    names.append(a.asname or a.name)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            names += [a.asname or a.name for a in node.names if a.name == "_symmetric_memory"]
    return names


def test_torch_symm_is_the_alias_of_torchs_module() -> None:
    found = {
        str(f.relative_to(ROOT)): names
        for f in files(EVERYTHING, ".py")
        if (names := [n for n in aliases(f.read_text()) if n != "torch_symm"])
    }
    assert not found, found


def test_tests_have_names_of_their_own() -> None:
    """pytest imports test files by their last name alone, and they import helpers so."""
    names = [f.name for f in files(("tests",), ".py")]
    assert not (found := sorted({name for name in names if names.count(name) > 1})), found


def public_names(source: str) -> list[str]:
    """Of the classes and functions that a module defines; each program has its ``main``."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.parse(source).body if isinstance(node, kinds)]
    return [name for name in names if not name.startswith("_") and name != "main"]


def defined_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The files of each name that two of them define, or one of them twice."""
    where: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in public_names(source):
            where.setdefault(name, []).append(path)
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def test_a_name_stands_for_one_thing() -> None:
    sources = {f.relative_to(ROOT).as_posix(): f.read_text() for f in files(NAMED, ".py")}
    assert not (found := defined_twice(sources)), found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    if method and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    return len(names) + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def take_more(source: str) -> list[str]:
    """The functions of more than MAX_PARAMETERS, by qualified name. Device code is launched with what it needs."""
    found = []

    def look(node: ast.AST, inside: tuple[str, ...], *, method: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                on_device = any("triton.jit" in ast.unparse(d) for d in child.decorator_list)
                if not on_device and parameters(child, method=method) > MAX_PARAMETERS:
                    found.append(".".join((*inside, child.name)))
                look(child, (*inside, child.name), method=False)
            elif isinstance(child, ast.ClassDef):
                look(child, (*inside, child.name), method=True)
            else:
                look(child, inside, method=method)

    look(ast.parse(source), (), method=False)
    return found


def test_functions_take_few_parameters() -> None:
    found = {
        f"{f.relative_to(ROOT).as_posix()}::{name}"
        for f in files(NAMED, ".py")
        for name in take_more(f.read_text())
    }
    assert not (new := found - LIKE_TORCH), f"more than {MAX_PARAMETERS} parameters: {new}"
    assert not (mended := LIKE_TORCH - found), f"strike out: {mended}"


def test_the_rules_can_fail() -> None:
    twice = defined_twice({"a.py": "class Plan: ...\ndef f(): ...\ndef main(): ...", "b.py": "def f(): ..."})
    assert twice == {"f": ["a.py", "b.py"]}
    assert not defined_twice(
        {"a.py": "def main(): ...\ndef _f(): ...", "b.py": "def main(): ...\ndef _f(): ..."}
    )
    assert defined_twice({"a.py": "class C: ...\nclass C: ..."}) == {"C": ["a.py", "a.py"]}
    seven = "a, b, c, /, d, *, e, f, g"
    assert take_more(f"def f({seven}): ...") == ["f"]
    assert take_more(f"if True:\n class C:\n  async def f(self, {seven}): ...") == ["C.f"]
    assert take_more("def f(a, b, c, d, e, *args, **more):\n def g(): ...") == ["f"]
    assert take_more(f"def f():\n def g({seven}): ...") == ["f.g"]
    assert not take_more("class C:\n def f(self, a, b, c, d, e, f): ...")
    assert not take_more(f"@triton.jit(do_not_specialize=['a'])\ndef kernel({seven}): ...")
    assert aliases("import torch.distributed._symmetric_memory as symm_mem") == ["symm_mem"]
    assert aliases("from torch.distributed import _symmetric_memory") == ["_symmetric_memory"]
    assert "inline_asm_elementwise" in python_code("x = tl.inline_asm_elementwise('nop')")
    assert "asm" not in python_code('"""asm volatile()"""\nx = 1  # asm(')
    assert "asm" not in cuda_code("// asm volatile\nint x; /* asm( */")


def test_kernels_is_not_a_package() -> None:
    """``kernels/__init__.py`` would shadow another library's package when the checkout is first on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def of_a_new_process(program: str) -> str:
    """What it prints."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_what_imports_load_and_find() -> None:
    """The root package, the ops and the pass, in this order in one process; last, the checkout by another name.

    - The root package loads neither torch nor a floor of weft, also not for its version and the list of its names.
    - The ops do not load the compiler, which takes longer than all of weft.
    - pytest imports the root ``__init__.py`` also as the checkout's folder is called: it has no parts of its own.
    """
    program = f"""
import importlib.util, sys

def refused(module):
    try:
        module.fused_everything
    except AttributeError as error:
        return str(error)

import weft
weft.__version__, dir(weft)
heavy = ("torch", "triton", "numpy", "cuda")
loaded = [m for m in sys.modules if m.split(".")[0] in heavy or m.startswith("weft.")]
assert loaded == ["weft.hooks"], loaded
assert weft.symm_mem is sys.modules["weft.symm_mem"]
assert "weft.fused_ops" not in sys.modules

import weft.fused_ops
from weft import fused_ops
assert not {{"torch._dynamo", "torch._inductor"}} & {{*sys.modules}}
assert "weft.fused_ops.passes" not in sys.modules
assert set(fused_ops.__all__) <= set(dir(fused_ops))
assert fused_ops.Report is fused_ops.passes.records.report.Report
assert fused_ops.compile is fused_ops.passes.backend.compile
print(refused(fused_ops))
from weft.fused_ops import *
assert FusionPass is fused_ops.passes.fusion.FusionPass

assert weft.FusionPass is FusionPass
assert all(getattr(weft, name) is not None for name in weft.__all__)
assert set(weft.__all__) <= set(dir(weft))
del fused_all_gather_matmul
from weft import *
assert fused_all_gather_matmul is fused_ops.fused_all_gather_matmul
print(refused(weft))

spec = importlib.util.spec_from_file_location("checkout", {str(ROOT / "__init__.py")!r})
checkout = importlib.util.module_from_spec(spec)
sys.modules["checkout"] = checkout
spec.loader.exec_module(checkout)
assert checkout.symm_mem is weft.symm_mem
copies = [m for m in sys.modules if m.startswith("checkout.")]
assert not copies, copies
"""
    assert of_a_new_process(program).splitlines() == [
        "module 'weft.fused_ops' has no attribute 'fused_everything'",
        "module 'weft' has no attribute 'fused_everything'",
    ]


def for_type_checkers(file: Path) -> set[str]:
    (block,) = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
    return {a.asname or a.name for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}


def test_type_checkers_see_what_packages_find() -> None:
    assert for_type_checkers(ROOT / "__init__.py") == {*weft.__all__} - {"__version__"}
    names = {"FusionError", "FusionPass", "Report", "compile", "fusion_report"}
    assert for_type_checkers(ROOT / "fused_ops" / "__init__.py") == names
