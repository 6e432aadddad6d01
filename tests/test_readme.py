"""What README.md and the other pages say: examples run, names are those of the code, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from opcommon import BOUND, check, gathered, world
from ranks import run_ranks
from torch._inductor import config as inductor_config

ROOT = Path(__file__).parent.parent
DOCS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
TUTORIAL = [page for page in DOCS if page.startswith("docs/tutorial/")]  # test_tutorial.py runs its examples
OTHERS = ["CONTRIBUTING.md", "tests/faults/README.md", "kernels/README.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = ["README.md", *DOCS, *OTHERS]
PAGES += ["bench/NOTES.md", "bench/FORMS.md"]
QUICKSTART = ROOT / "examples" / "quickstart.py"
BF16 = BOUND[torch.bfloat16]


def text(page: str) -> str:
    return (ROOT / page).read_text()


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def test_each_example_has_a_test() -> None:
    assert {p: len(examples(p)) for p in PAGES if p not in TUTORIAL and examples(p)} == {
        "README.md": 2,
        "docs/concepts.md": 1,
        "docs/index.md": 1,
        "docs/operations.md": 1,
        "docs/ops.md": 2,  # the second one: test_layers_gradients.py
        "docs/pass.md": 3,
        "docs/registered-tensors.md": 1,
    }


def runs_quickstart(rank: int, size: int) -> str:
    """In a process that is a rank already."""
    said: list[str] = []
    names: dict[str, Any] = {"print": said.append}
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(torch.cuda, "device_count", return_value=0),
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(size)}),
    ):
        exec(QUICKSTART.read_text(), names)
    x, h = gathered(names["x"]).flatten(0, 1).double(), names["h"].double()
    check("h", names["h"], x @ names["w_up"].double(), BOUND[torch.float32])
    parts = list(gathered(h.relu() @ names["w_down"].double()))
    rows = [part.chunk(size)[rank] for part in parts]
    check("y", names["y"], torch.stack(rows).sum(0), BOUND[torch.float32], rows)
    return said[0]


def test_the_quickstart_is_right() -> None:
    said = run_ranks(runs_quickstart, 2)
    for rank, line in enumerate(said):
        assert line.startswith(f"rank {rank}: [128, 64] -> [256, 96] -> [128, 64], Plan(algorithm='host'"), (
            line
        )


def test_the_quickstart_is_the_one_that_is_printed() -> None:
    """test_packaging.py runs it under torchrun."""
    assert QUICKSTART.read_text() == examples("README.md")[0]


def calls(rank: int, size: int, example: str) -> None:
    m, k, n, dtype = 6, 64, 48, torch.bfloat16
    x, w_up = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype) / 8
    w_down, g = torch.randn(n, k, dtype=dtype) / 8, torch.randn(m, n, dtype=dtype)
    names: dict[str, Any] = {"x": x, "w_up": w_up, "w_down": w_down, "g": g}
    names.update(group=world(), relu=torch.relu)
    exec(example, names)
    up = gathered(x).flatten(0, 1).double() @ w_up.double()
    check("h", names["h"], up, BF16)
    parts = list(gathered(torch.relu(names["h"]).double() @ w_down.double()))
    check("y", names["y"], sum(parts)[rank * m : (rank + 1) * m], BF16, [p[rank * m :][:m] for p in parts])
    if "z" in names:
        parts = list(gathered((torch.relu(g) @ w_down).double()))
        check("z", names["z"], sum(parts), BF16, parts)


@pytest.mark.parametrize("page", ["docs/ops.md", "docs/index.md"])
def test_the_ops(page: str) -> None:
    run_ranks(calls, 2, examples(page)[0])


def writes_to_a_peer(rank: int, size: int, example: str) -> None:
    data = torch.randn(1024).bfloat16()
    names: dict[str, Any] = {"torch": torch, "group": world(), "data": data}
    exec(example, names)
    assert torch.equal(names["mine"], gathered(data)[rank - 1])


def test_the_heap() -> None:
    run_ranks(writes_to_a_peer, 3, examples("docs/concepts.md")[0])


def registers(rank: int, size: int, example: str) -> None:
    block = torch.randn(4, 8)
    names: dict[str, Any] = {"kv_cache": torch.zeros(4, 8), "hidden": torch.zeros(3), "group": world()}
    names.update(left=(rank - 1) % size, right=(rank + 1) % size, block=block)
    exec(example, names)
    assert torch.equal(names["kv_cache"], gathered(block)[rank - 1])


def test_registered_tensors() -> None:
    run_ranks(registers, 3, examples("docs/registered-tensors.md")[0])


def reduces_by_name(rank: int, size: int, example: str, folder: Path) -> list[str]:
    said: list[str] = []
    x = torch.full((3,), float(rank + 1))
    dist.destroy_process_group()
    dist.init_process_group = partial(
        dist.init_process_group, init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    exec(example, {"x": x, "print": lambda *lines, sep: said.extend(map(str, lines))})
    assert x.tolist() == [3.0] * 3
    return said


def test_the_process_group(tmp_path: Path) -> None:
    for said in run_ranks(reduces_by_name, 2, examples("docs/operations.md")[0], tmp_path, fresh=True):
        assert said == ["all_reduce: 1 call by weft"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 48) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops._c10d_functional, world()
        whole = ops.all_gather_into_tensor(x, group.size(), group.group_name)
        return ops.wait_tensor(whole) @ self.weight


def compiles(rank: int, size: int, example: str) -> str:
    said: list[str] = []
    model, x = Model(), torch.randn(256, 64)
    names: dict[str, Any] = {"torch": torch, "model": model, "x": x, "print": lambda t: said.append(str(t))}
    # The pass sees nothing of a graph that is taken from a cache.
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        exec(example, names)
        check("result", names["model"](x), gathered(x).flatten(0, 1).double() @ model.weight.double(), 1e-6)
    torch._dynamo.reset()
    dist.barrier()
    return said[0]


def compiles_beside(rank: int, size: int, example: str, beside: str) -> tuple[int, int]:
    names: dict[str, Any] = {
        "torch": torch,
        "model": Model(),
        "x": torch.randn(256, 64),
        "print": lambda t: None,
    }
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        exec(example, names)
        names["fusion"].clear()
        names["model"] = Model()
        exec(beside, names)
        names["model"](names["x"])
    torch._dynamo.reset()
    dist.barrier()
    return names["fusion"].report().fused, names["nodes"].count


def test_the_pass_beside_another() -> None:
    example, _, beside = examples("docs/pass.md")
    for fused, count in run_ranks(compiles_beside, 2, example, beside, fresh=True):
        assert fused == 1 and count > 0


def test_the_pass() -> None:
    example, by_one_word, _ = examples("docs/pass.md")
    said = [line for each in (example, by_one_word) for line in run_ranks(compiles, 2, each, fresh=True)]
    assert examples("README.md")[1] == example, "the README shows the example that was run"
    for line in said:
        assert "all_gather_into_tensor" in line and "fused_all_gather_matmul" in line, line


def sources(*folders: str) -> str:
    return "\n".join(p.read_text() for folder in folders for p in sorted((ROOT / folder).rglob("*.py")))


def test_every_variable_stands_in_the_table() -> None:
    """Those of tests alone stand in CONTRIBUTING.md."""
    columns = re.findall(r"^\| (`WEFT_[^|]*) \|", text("docs/operations.md"), re.MULTILINE)
    table = {name for column in columns for name in re.findall(r"`(WEFT_\w+)(?:=1)?`", column)}
    in_use = set(re.findall(r"\"(WEFT_[A-Z_]+)\"", sources("symm_mem", "kernels", "fused_ops", "tests/fuzz")))
    in_use -= set(re.findall(r"WEFT_TEST_\w+", text("CONTRIBUTING.md")))
    assert table == in_use, table ^ in_use


def run_python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
    )


def test_the_tables_and_pictures_are_those_of_the_files() -> None:
    said = run_python("bench/run.py", "pages", "--check")
    assert said.returncode == 0, said.stdout + said.stderr


def test_every_file_of_results_is_named() -> None:
    """By a page, or by a comment that rests on it."""
    every = [text(page) for page in PAGES] + [sources("symm_mem", "kernels", "fused_ops", "tests")]
    names = {name for each in every for name in re.findall(r"[\w.*-]+(?:\.(?:txt|json)|-\*)", each)}
    files = [f.name for f in sorted((ROOT / "bench" / "results").iterdir())]
    assert not [f for f in files if not any(fnmatch(f, name) for name in names)]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_a_target(page: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", text("Makefile"), re.MULTILINE))
    commands = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text(page), re.MULTILINE))
    assert commands <= targets, commands - targets


def test_the_first_two_commands_stand_in_the_readme() -> None:
    assert set(re.findall(r"^make (\w+)", text("README.md"), re.MULTILINE)) == {"demo", "test"}


@pytest.mark.parametrize("page", PAGES)
def test_every_program_it_names_is_there(page: str) -> None:
    programs = re.findall(
        r"(?:python3?|torchrun)(?: -m pytest)?(?: --?[\w-]+(?: \d+)?)* ([\w/]+\.py)", text(page)
    )
    given = {"quickstart.py", *(f"{Path(p).stem}.py" for p in TUTORIAL)}  # what a reader makes of the example
    assert not [name for name in programs if name not in given and not (ROOT / name).is_file()]


def missing(page: str) -> list[str]:
    """Files, folders and patterns in backquotes of which there is none, from the root or from the page's folder."""
    bases = (ROOT, (ROOT / page).parent)
    folders = {p.name for base in bases for p in base.iterdir() if p.is_dir()}
    names = re.findall(rf"`((?:{'|'.join(map(re.escape, folders))})/[\w./*-]*)`", text(page))
    return [name for name in names if not any(any(base.glob(name.rstrip("/"))) for base in bases)]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_it_names_is_there(page: str) -> None:
    assert not missing(page)


def test_a_path_that_is_not_there_is_found() -> None:
    here, folder, gone = "bench/run.py", "symm_mem/heap/", "bench/results/h300-*.json"
    with patch.object(
        sys.modules[__name__], "text", lambda page: f"`{here}` `{folder}` `{gone}` `bench/x.py`"
    ):
        assert missing("README.md") == [gone, "bench/x.py"]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text(page))
    for name, anchor in links:
        if name.startswith("https:"):
            continue
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.is_file(), name
        assert not anchor or anchor in anchors(there), f"{name}#{anchor}"


def test_the_readme_links_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", text("README.md")))
    assert {*DOCS, *OTHERS} <= linked


def test_the_protocol_has_every_section_that_code_names() -> None:
    """As ``docs/protocol.md#credits``, or several: ``docs/protocol.md#deadlines, #reset``."""
    named = {
        (str(file.relative_to(ROOT)), anchor)
        for folder in ("symm_mem", "kernels", "fused_ops")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cu", ".cuh")
        for links in re.findall(r"docs/protocol\.md((?:#[\w-]+(?:,\s+(?://\s+)?(?=#))?)+)", file.read_text())
        for anchor in re.findall(r"#([\w-]+)", links)
    }
    assert len(named) > 20
    there = anchors(ROOT / "docs" / "protocol.md")
    assert not [link for link in named if link[1] not in there]
