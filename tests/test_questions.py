"""docs/questions.md: weft says what the page shows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from opcommon import world
from ranks import run_ranks
from torch._inductor import config as inductor_config
from weft import symm_mem
from weft.fused_ops.about.text import about_text

PAGE = Path(__file__).parent.parent / "docs" / "questions.md"
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TIMEOUT = 0.5  # seconds, as on the page
Text = Callable[[], object]


class Gathers(torch.nn.Module):
    """An all-gather and a matmul, or a graph break between them."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.weight, self.broken = torch.nn.Parameter(torch.randn(64, 48)), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops._c10d_functional, world()
        whole = ops.wait_tensor(ops.all_gather_into_tensor(x, group.size(), group.group_name))
        if self.broken:
            torch._dynamo.graph_break()
        return whole @ self.weight


def said_by(text: Text) -> str:
    """What a call returns or raises."""
    try:
        return str(text())
    except symm_mem.WeftError as e:
        return f"{type(e).__name__}: {e}"


def report(model: torch.nn.Module | None, **settings: Any) -> str:
    fusion = weft.FusionPass(**settings)
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        if model is not None:
            torch.compile(model, options=fusion.options)(torch.randn(256, 64))
    return str(fusion.report())


def from_reports(rank: int, size: int) -> list[str]:
    found = [report(None), report(torch.nn.Linear(64, 8)), report(Gathers(), groups=[])]
    return [*found, report(Gathers(broken=True))]


def gather(rows: int = 256) -> torch.Tensor:
    _, (out,) = weft.fused_all_gather_matmul(
        torch.randn(rows, 64), [torch.randn(64, 48)], 0, world(), return_A=False
    )
    return out


def in_a_child(text: Text) -> str:
    """What a forked process gets, which multiprocessing does not start in ranks."""
    its, mine = os.pipe()
    if (child := os.fork()) == 0:
        os.write(mine, said_by(text).encode())
        os._exit(0)
    os.close(mine)
    os.waitpid(child, 0)
    with os.fdopen(its) as said:
        return said.read()


def from_calls(rank: int, size: int) -> list[str]:
    group = world()
    gather()
    found = [str(weft.last_plan()), str(symm_mem.stats(group)), in_a_child(gather)]
    symm_mem.set_checked(True)
    found.append(said_by(lambda: gather(128 + 128 * rank)))
    symm_mem.set_checked(False)
    symm_mem.reset(group)
    gather()  # the first call after a reset is compared across ranks; a later one waits for its flags
    symm_mem.set_timeout(TIMEOUT, group)
    if rank == 0:
        found += [said_by(gather), said_by(gather), said_by(lambda: symm_mem.reset(group))]
        assert found[-3] == found[-2], "the group is broken until it is reset"
    else:
        time.sleep(4 * TIMEOUT)
    return found


def from_a_process_group(rank: int, size: int, store: str) -> str:
    dist.destroy_process_group()
    dist.init_process_group("weft", init_method=f"file://{store}", rank=rank, world_size=size)
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_reduce(x.double())
    return "\n".join(map(str, weft.process_group().calls()))


def plain(text: str) -> str:
    """Without line breaks; a number is #."""
    return re.sub(r"\d+(\.\d+)?", "#", " ".join(text.split()))


def shows(block: str, text: str) -> bool:
    """Whether a block of the page is in a text; what the page leaves out is "..."."""
    parts = (re.escape(plain(part)) for part in block.split("..."))
    return re.search(r"\s*.*?\s*".join(parts), plain(text)) is not None


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = str(tmp_path_factory.mktemp("group") / "store")
    found = [about_text(measured=False), *run_ranks(from_reports, 2, fresh=True)[0]]
    found += run_ranks(from_calls, 2, fresh=True)[0]
    return "\n\n".join([*found, run_ranks(from_a_process_group, 2, store, fresh=True)[0]])


def test_weft_says_what_the_page_shows(said: str) -> None:
    assert len(BLOCKS) == 12
    missing = [block for block in BLOCKS if not shows(block, said)]
    assert not missing, f"{missing}\nare not in\n{said}"


def test_what_differs_is_noticed() -> None:
    assert shows(
        "waited 0.5 s for rank 1\n    (called at ...); it is",
        "rank 0 waited 2 s for rank 1 (called at a.py:3); it is late",
    )
    assert not shows("waited 0.5 s for a rank", "rank 0 waited 2 s for rank 1")
