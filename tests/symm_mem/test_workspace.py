"""What a workspace keeps of what launchers have made for its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_ranks
from weft.symm_mem import call_cache
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

MOST = 4096


def keeps(rank: int, size: int, graph: Any) -> tuple[int, bool, bool]:
    workspace = Workspace(get_heap(), Layout(size, 4, 1024), "site", graph=graph)
    for i in range(MOST):
        workspace.keep(i, "made")
    before = call_cache.cached_calls
    workspace.keep(MOST, "the last one")
    assert workspace.prepared[MOST] == "the last one"
    assert call_cache.cached_calls is not before, "what rests on the forgotten ones is forgotten, too"
    return len(workspace.prepared), 0 in workspace.prepared, MOST in workspace.prepared


@pytest.mark.parametrize("graph", [None, SimpleNamespace(is_gone=None)], ids=["eager", "captured"])
def test_there_is_an_end_to_what_is_kept(graph: Any) -> None:
    """But for a captured graph, which runs what was made for it."""
    wanted = (1, False, True) if graph is None else (MOST + 1, True, True)
    assert run_ranks(keeps, 2, graph, fresh=True) == [wanted] * 2
