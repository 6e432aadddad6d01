"""What README.md and the other pages say: examples run, names are those of the code, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import BOUND, check, gathered, world
from ranks import run_ranks
from torch._inductor import config as inductor_config

ROOT = Path(__file__).parent.parent
PASS_PAGE = "fused_ops/passes/README.md"
PAGES = ["README.md", "CONTRIBUTING.md", "fused_ops/README.md", PASS_PAGE, "tests/faults/README.md"]
PAGES += ["kernels/README.md", "bench/NOTES.md", "bench/TRIED.md", "bench/HISTORY.md", "bench/H100.md"]
PAGES += ["docs/protocol.md"]
TEXT = (ROOT / "README.md").read_text()


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


EXAMPLES = examples("README.md")
BF16 = BOUND[torch.bfloat16]


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
    parts = list(gathered((torch.relu(g) @ w_down).double()))
    check("z", names["z"], sum(parts), BF16, parts)


def test_the_ops() -> None:
    run_ranks(calls, 2, EXAMPLES[0])


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


def test_the_pass() -> None:
    said = run_ranks(compiles, 2, EXAMPLES[1], fresh=True)
    assert len(EXAMPLES) == 2, "each example has a test"
    assert examples(PASS_PAGE) == EXAMPLES[1:], "the pass's page shows the example that was run"
    for text in said:
        assert "all_gather_into_tensor" in text and "fused_all_gather_matmul" in text, text


def sources(*folders: str) -> str:
    return "\n".join(p.read_text() for folder in folders for p in sorted((ROOT / folder).rglob("*.py")))


def test_every_variable_stands_in_the_table() -> None:
    """Those of tests alone stand in CONTRIBUTING.md."""
    table = set(re.findall(r"^\| `(WEFT_\w+)(?:=1)?` \|", TEXT, re.MULTILINE))
    in_use = set(re.findall(r"\"(WEFT_[A-Z_]+)\"", sources("symm_mem", "kernels", "fused_ops", "tests/fuzz")))
    assert table == in_use, table ^ in_use


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_a_target(page: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", (ROOT / page).read_text(), re.MULTILINE))
    assert commands <= targets, commands - targets


@pytest.mark.parametrize("page", PAGES)
def test_every_file_it_names_is_there(page: str) -> None:
    """From the root, or from the page's folder."""
    bases = (ROOT, (ROOT / page).parent)
    folders = {p.name for base in bases for p in base.iterdir() if p.is_dir()}
    names = re.findall(
        rf"`((?:{'|'.join(map(re.escape, folders))})/[\w./-]+\.\w+)`", (ROOT / page).read_text()
    )
    assert names
    assert not [name for name in names if not any((base / name).is_file() for base in bases)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", (ROOT / page).read_text())
    for name, anchor in links:
        if name.startswith("https:"):
            continue
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.is_file(), name
        assert not anchor or anchor in anchors(there), f"{name}#{anchor}"


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
