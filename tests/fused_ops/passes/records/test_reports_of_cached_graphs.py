"""A graph that Inductor takes from one of its caches has its entries of the report with it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from compiler import whole_inductor
from graphs import c10d, fake_ranks, gather, scatter
from ranks import run_ranks
from test_called_graphs import layer_inside
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code
from weft.fused_ops.passes import FusionPass, Report, backend
from weft.fused_ops.passes.records.report_file import VARIABLE


def both(x: Tensor, w: Tensor) -> Tensor:
    """Forward and backward, and what is left alone beside what is fused. Of products alone: no C++ to be compiled."""
    constant = w.detach()
    product = c10d.wait_tensor(c10d.all_reduce(constant, "product", "0"))
    return scatter(gather(x) @ w @ constant) @ product


def left_alone(x: Tensor, w: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.detach(), "product", "0")) @ w


region = torch.compiler.nested_compile_region(layer_inside)


def calling(x: Tensor, w: Tensor) -> Tensor:
    """A graph that calls another one. Those with branches Inductor keeps in no cache."""
    return region(x.detach(), w.detach(), w.detach().cos()) * w.sum()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def reported(fn: Callable[..., Tensor], **options: Any) -> FusionPass:
    torch._dynamo.reset()
    fusion = FusionPass(**options)
    torch.compile(fn, options=fusion.options, fullgraph=True)(*inputs()).sum().backward()
    return fusion


def same(report: Report, expected: Report) -> bool:
    return (report.entries, report.orders) == (expected.entries, expected.orders)


@pytest.mark.parametrize(
    ("fn", "options"),
    [(both, {"agree": False, "reorder": True}), (left_alone, {}), (calling, {})],
    ids=["both, reordered", "left alone", "calling"],
)
def test_a_second_compilation_reports_what_the_first_did(
    fn: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    with fake_ranks(2), fresh_cache():
        first = reported(fn, **options).report()
        assert first.entries and first.runs.graphs and not first.runs.loaded
        fusion = reported(fn, **options)
        assert same(fusion.report(), first)
        assert not fusion.report().runs.graphs
        assert fusion.report().runs.loaded == len({e.graph for e in first.entries})
        # After others it counts on, and once for each time it is loaded.
        torch._dynamo.reset()
        torch.compile(fn, options=fusion.options, fullgraph=True)(*inputs()).sum().backward()
        count = len(first.entries)
        graphs = [e.graph for e in fusion.report().entries]
        assert len(graphs) == 2 * count
        assert graphs[count:] == [g + fusion.report().runs.loaded // 2 for g in graphs[:count]]
        fusion.clear()
        assert not fusion.report().entries and not fusion.report().runs.loaded


LITE = {"fallback_by_default": True, "reorder_for_peak_memory": False}


@pytest.mark.parametrize("config", [{"cpp_wrapper": True}, LITE], ids=["C++ wrapper", "lite mode"])
def test_code_that_is_left_alone_tells_of_it_when_it_is_loaded(config: dict[str, Any]) -> None:
    """And does nothing for it when it runs."""
    with fake_ranks(2), fresh_cache(), whole_inductor(), inductor_config.patch(config):
        first, codes = run_and_get_code(reported, left_alone)
        second = reported(left_alone).report()
        assert same(second, first.report()) and second.left == 1
        assert second.runs.loaded == 1 and not second.runs.graphs
    assert sum(code.count("weft_graph_loaded(") for code in codes) == 1
    assert not any("weft.record" in code for code in codes)


def test_without_a_cache_graphs_hold_no_record() -> None:
    with fake_ranks(2), fresh_cache(), inductor_config.patch(force_disable_caches=True):
        first, second = reported(left_alone), reported(left_alone)
    assert same(second.report(), first.report())
    assert (second.report().runs.graphs, second.report().runs.loaded) == (2, 0)


def test_a_cached_graph_is_in_the_log_the_file_and_the_report_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = tmp_path / "report"
    with fake_ranks(2), fresh_cache():
        first = reported(both)
        monkeypatch.setenv(VARIABLE, str(written))
        monkeypatch.setattr(backend, "_made", {})
        torch._dynamo.reset()
        with caplog.at_level(logging.INFO, "weft.passes"):
            weft.compile(both, fullgraph=True)(*inputs()).sum().backward()
        report = weft.passes.fusion_report()
        assert same(report, first.report()) and report.runs.loaded
        assert [r.message.split(",")[0] for r in caplog.records if r.name == "weft.passes"] == [
            "graph 0: 2 of 3 collectives fused",
            "graph 1: 2 of 2 collectives fused",
        ]
        assert report.details().splitlines()[0] in written.read_text()


def on_ranks(rank: int, world: int, folder: str) -> tuple[Report, Report]:
    """Rank 1 compiles when rank 0 has; then both take their graphs from the cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    end = time.monotonic() + 20
    while rank and not any(Path(folder, "fxgraph").rglob("*")) and time.monotonic() < end:
        time.sleep(0.05)
    found = []
    for _ in range(2):
        counters.clear()
        report = reported(both).report()
        assert report.questions.fused == report.questions.count == 2, report.disagreements
        found.append(report)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    return found[0], found[1]


def test_ranks_that_share_a_cache(tmp_path: Path) -> None:
    cold = run_ranks(on_ranks, 2, str(tmp_path), fresh=True)
    warm = run_ranks(on_ranks, 2, str(tmp_path), fresh=True)
    (first, _), (other, _) = cold
    assert first.runs.graphs == 2 and other.runs.loaded
    assert (first.fused, first.left) == (4, 1)
    for report in (*cold[0], *cold[1], *warm[0], *warm[1]):
        assert same(report, first)
    assert [r.runs.graphs for ranks in warm for r in ranks] == [0] * 4
