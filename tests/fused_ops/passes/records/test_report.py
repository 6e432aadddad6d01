"""The report, strictness, the cache key and the log of the pass."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from graphs import AG, RS, c10d, captured, copied, fake_ranks, gather, scatter, traced
from torch import Tensor
from weft.fused_ops.dispatch.profitability import FusionCandidate
from weft.fused_ops.passes import Entry, FusionError, FusionPass, Report
from weft.fused_ops.passes.agreement import outcomes
from weft.fused_ops.passes.graph.subgraphs import WHY
from weft.fused_ops.passes.records.report import VoteCounts


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    with fake_ranks(2) as name:
        yield name


def good(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(gather(x, 1), w)


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return scatter(gather(x * 2, 0).sin(), 0) + scatter(x @ w, 0).sum()


X, W = torch.randn(2, 6, 8), torch.randn(5, 8)


def test_a_copy_of_the_options_fills_the_same_report() -> None:
    """torch.compile takes them as they are, AOTInductor copies them."""
    fusion = FusionPass()
    captured(good, X, W, fusion=deepcopy(fusion.options)["post_grad_custom_post_pass"])
    assert fusion.report().fused == 1


def test_the_source_line_is_the_models() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        y = funcol.all_gather_tensor_autograd(x, 0, dist.distributed_c10d._get_default_group())
        return F.linear(y, w)

    (seen,) = captured(model, X, W)
    assert seen.entries[0].source.startswith("test_report.py:")
    assert "in model: y = funcol.all_gather_tensor_autograd(x, 0, " in seen.entries[0].source


def test_entries_and_text() -> None:
    fusion = FusionPass(collectives=False)
    captured(good, X, W, fusion=fusion)
    captured(mixed, torch.randn(4, 4), torch.randn(4, 4), fusion=fusion)
    report = fusion.report()
    assert [e.graph for e in report.entries] == [0, 1, 1, 1]
    assert [e.fused_into for e in report.entries] == [AG, None, None, RS]
    assert (report.fused, report.left) == (2, 2)
    assert [e.dim for e in report.entries] == [1, None, None, 0]
    assert all(bool(e.reason) != bool(e.fused_into) for e in report.entries)
    lines = report.details().splitlines()
    assert len(lines) == 8
    assert re.match(
        r"graph 0 of good( #\d+)?: all_gather_into_tensor over group '0': "
        "fused into weft::fused_all_gather_matmul, dim 1",
        lines[0],
    )
    assert "left alone: no matrix product takes the gathered tensor, but sin" in lines[1]
    assert [(e.m, e.n, e.k) for e in report.entries] == [(24, 5, 8), *[(None, None, None)] * 2, (4, 4, 4)]
    assert "24 x 8 @ 8 x 5 should save" in lines[0]
    assert report.gain == sum(e.gain for e in report.entries if e.gain is not None) > 0
    assert all(e.form for e in report.entries if e.fused_into)
    assert lines[4] == "2 of 4 collectives fused: 2 with a matmul"
    assert lines[5] == "left alone:"
    assert all(line.startswith("    1  ") for line in lines[6:])


@pytest.mark.parametrize("summed", [False, True])
def test_between_two_collectives(summed: bool) -> None:
    """The reason names the op that has the gather's product, nothing that the pass put before it."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        group = dist.distributed_c10d._get_default_group()
        y = funcol.all_gather_tensor(x, 0, group)
        return funcol.reduce_scatter_tensor(y @ w + y.sin() @ w if summed else y @ w, "sum", 0, group)

    (seen,) = captured(model, torch.randn(4, 8), torch.randn(8, 6))
    assert seen.fused == [None, RS]
    assert "product is fused with the reduction after it, into fused_matmul_reduce_scatter" in seen.reasons


def test_between_two_collectives_on_the_right() -> None:
    """The pass takes the one matrix out of a stack before the op."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        group = dist.distributed_c10d._get_default_group()
        b = funcol.all_gather_tensor(w, 0, group)
        return funcol.reduce_scatter_tensor(torch.bmm(x[None], b[None]), "sum", 1, group)

    (seen,) = captured(model, torch.randn(4, 8), torch.randn(4, 6))
    assert RS in seen.fused, seen.reasons
    assert "select" not in seen.reasons, seen.reasons
    assert "joins" not in seen.reasons


def test_a_graph_without_collectives_counts() -> None:
    fusion = FusionPass()
    captured(torch.sin, X, fusion=fusion)
    captured(good, X, W, fusion=fusion)
    assert [e.graph for e in fusion.report().entries] == [1]


def test_clear() -> None:
    fusion = FusionPass()
    captured(good, X, W, fusion=fusion)
    before = fusion.report()
    fusion.clear()
    assert len(before.entries) == 1
    assert fusion.report().entries == ()
    assert fusion.report().details().startswith("no collectives were seen: the pass has not run")
    captured(good, X, W, fusion=fusion)
    assert fusion.report().entries[0].graph == 0


def test_a_pass_reports_what_its_own_time_has_seen() -> None:
    """A graph that comes from a cache belongs to no pass: each pass counts from when it was made or cleared."""
    first = FusionPass()
    outcomes.note("g", "0", 1, "it is late")
    outcomes.count_vote("g", False, 0.5)
    second = FusionPass()
    assert second.report().disagreements == () and second.report().questions.count == 0
    outcomes.note("h", "0", 1, "it is late")
    outcomes.note("g", "0", 1, "it is late")
    outcomes.count_vote("g", True, 0.25)
    second.clear()
    assert second.report().disagreements == () and second.report().questions.count == 0
    assert [(d.graph, d.runs) for d in first.report().disagreements] == [("g", 2), ("h", 1)]
    assert first.report().questions == VoteCounts(2, 1, 0.75)
    assert str(VoteCounts(2, 1, 0.75)) == "votes: 2 runs asked the other ranks, 375.00 ms each"
    told = "votes: 1 run asked the other ranks, 500.00 ms each; 2 did not, as all ranks know the graph"
    assert str(VoteCounts(3, 3, 0.5, 2)) == told


def test_a_graph_that_runs_known_after_a_reset_has_run_fused() -> None:
    fusion = FusionPass()
    captured(good, X, W, fusion=fusion)
    (entry,) = fusion.report().entries
    outcomes.count_vote(entry.signature, True, 0.0)
    for known in (True, False):
        fusion._outcomes.reset()
        if known:
            outcomes.count_vote(entry.signature, True, 0.0, known=True)
        outcomes.note(entry.signature, "0", 1, "it is late")
        assert [e.unfused for e in fusion.report().entries] == [not known]


def test_threads_that_run_graphs_are_all_counted() -> None:
    fusion, threads, runs = FusionPass(), 4, 500

    def run() -> None:
        for i in range(runs):
            outcomes.count_vote("g", i % 2 == 0, 0.5)
            outcomes.note("g", "0", 1, f"reason {i % 3}")
            if i % 50 == 0:
                FusionPass().clear()  # as another thread compiles

    together = [threading.Thread(target=run) for _ in range(threads)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(60)
    report = fusion.report()
    assert report.questions == VoteCounts(threads * runs, threads * runs // 2, threads * runs / 2)
    assert sum(d.runs for d in report.disagreements) == threads * runs and len(report.disagreements) == 3


def test_strict_raises_with_the_graphs_report() -> None:
    fusion = FusionPass(strict=True, collectives=False)
    captured(good, X, W, fusion=fusion)
    graph = traced(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")).sin(), X)
    with pytest.raises(
        FusionError, match=r"1 of 1 collectives were not fused\n.*no matrix product takes"
    ) as caught:
        fusion(copied(graph))
    assert [e.graph for e in caught.value.report.entries] == [1]
    assert len(fusion.report().entries) == 2


def test_strict_stops_the_compilation() -> None:
    fusion = FusionPass(strict=True, collectives=False)
    fn = torch.compile(lambda x: gather(x, 0).sin(), options=fusion.options)
    with pytest.raises(Exception, match="no matrix product takes the gathered tensor"):
        fn(torch.randn(4, 4))


def test_only_the_given_groups(group: str) -> None:
    for groups in ([group], [dist.distributed_c10d._get_default_group()]):
        fusion = FusionPass(groups=groups)
        assert captured(good, X, W, fusion=fusion)[0].fused == [AG]
    fusion = FusionPass(groups=[])
    assert captured(good, X, W, fusion=fusion)[0].fused == [None]


def test_what_is_not_profitable_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def why_not_profitable(candidate: FusionCandidate) -> str:
        asked.append(candidate)
        return "it is too small"

    monkeypatch.setattr("weft.fused_ops.dispatch.profitability.why_not_profitable", why_not_profitable)
    (entry,) = captured(good, X, W)[0].entries
    assert (entry.fused_into, entry.reason) == (None, "it is too small")
    assert "product" in entry.form
    assert asked == [FusionCandidate("all_gather_matmul", 24, 5, 8, 2, torch.float32, "cpu")]
    assert captured(good, X, W, fusion=FusionPass(fuse="always"))[0].fused == [AG]


def test_one_line_a_graph_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.passes"):
        (seen,) = captured(good, X, W)
    assert [r.getMessage() for r in caplog.records if r.name == "weft.passes"] == [
        f"graph 0: 1 of 1 collectives fused, should save {seen.entries[0].gain:.3g} us"
    ]


def test_the_first_that_is_left_alone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.passes"):
        captured(mixed, torch.randn(4, 4), torch.randn(4, 4))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "weft.passes"]
    assert line.startswith("graph 0: 1 of 3 collectives fused")
    assert "left alone: no matrix product takes the gathered tensor, but sin" in line


LOGGED = """
import collector
import torch
from graphs import c10d, fake_ranks, traced
from weft.fused_ops.passes import FusionPass
with fake_ranks(2):
    gathered = lambda x, w: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")) @ w
    for _ in range(2):
        FusionPass()(traced(gathered, torch.randn(6, 8), torch.randn(8, 5)))
"""


def test_torch_logs_knows_weft() -> None:
    """As the name of a package, which torch looks for before weft is imported."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", LOGGED],
        env={**env, "TORCH_LOGS": "weft"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("graph 0: 1 of 1 collectives fused, should save") == 2, run.stdout
    assert not logging.getLogger("weft.passes").isEnabledFor(logging.INFO), "it is not asked for here"


def test_what_was_left_alone_before_its_graph_was_put_back_keeps_its_reason() -> None:
    fusion = FusionPass()
    told = ("all_gather_into_tensor", "all_gather_into_tensor", "0")
    entries = [
        Entry(0, *told, dim=0, fused_into=AG),
        Entry(0, *told, reason="nobody waits for it"),
        Entry(1, *told, dim=0, fused_into=AG),
    ]
    for number in range(2):
        fusion._seen.begin()
        fusion._seen.enter(number, [e for e in entries if e.graph == number])
    fusion._seen.put_back(0, WHY)
    assert [e.reason for e in fusion.report().entries] == [WHY, "nobody waits for it", ""]
    assert [e.fused_into for e in fusion.report().entries] == [None, None, AG]


def test_report_is_data() -> None:
    entry = Entry(3, "all_gather_into_tensor", "all_gather_into_tensor", "tp", 1, AG, detail="1 product")
    report = Report([entry, Entry(3, "x", "all_reduce", None, reason="because")])
    assert str(entry) == (
        "graph 3: all_gather_into_tensor over group 'tp': fused into weft::fused_all_gather_matmul, dim 1, 1 product"
    )
    assert str(report.entries[1]) == "graph 3: x (all_reduce): left alone: because"
    assert (report.fused, report.left) == (1, 1)
    with pytest.raises(FrozenInstanceError):
        report.entries = ()  # type: ignore[misc]
    assert report == Report([entry, report.entries[1]])
