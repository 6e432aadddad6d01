"""A picture of both orders: what runs when, in lanes, and memory under it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from orders import TABLE, WORLD, gathered, graph_of
from torch import Tensor
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.order.change import OrderChange, Placed
from weft.fused_ops.passes.order.exposure import Timeline
from weft.fused_ops.passes.order.moves import OrderLimits, reorder

SVG = "{http://www.w3.org/2000/svg}"
LANES = "compute", "NVLink"
pytestmark = pytest.mark.usefixtures("two")


def layers(x: Tensor, w: Tensor) -> Tensor:
    for shard in w.chunk(4):
        x = x[:, :32] @ gathered(shard.to(torch.bfloat16)).float()
    return x


def end_of(drawn: Timeline) -> float:
    return max(end for *_, end in drawn.spans)


def test_lanes_are_what_was_predicted() -> None:
    change = reorder(graph_of(layers), TABLE, OrderLimits(memory=1.0))
    assert not change.kept
    for drawn, exposed, peak in zip(
        change.drawn, (change.before, change.after), (change.peak_before, change.peak_after), strict=True
    ):
        kernels = [s for s in drawn.spans if s[0] == "compute"]
        gathers = [s for s in drawn.spans if s[0] == "NVLink"]
        assert (len(kernels), len(gathers)) == (4, 4)
        for lane in kernels, gathers:
            assert all(a[3] <= b[2] for a, b in pairwise(lane))  # one after the other
        computed = sum(end - begin for _, _, begin, end in kernels)
        assert end_of(drawn) == pytest.approx(computed + exposed)
        assert max(size for _, size in drawn.memory) == peak
        assert [when for when, _ in drawn.memory] == sorted({when for when, _ in drawn.memory})
    assert end_of(change.drawn[1]) < end_of(change.drawn[0])


def test_the_picture_has_a_box_for_each_span() -> None:
    fusion = FusionPass([], reorder=1.0, agree=False)
    fusion(graph_of(layers))
    (change,) = fusion.report().orders
    root = ET.fromstring(change.svg())
    assert sum(len(drawn.spans) for drawn in change.drawn) == 16
    drawn_times = [time for drawn in change.drawn for lane in LANES for time in times(drawn, lane)]
    for drawn, time in zip(boxes(root), drawn_times, strict=True):
        assert drawn == pytest.approx(time, rel=1e-5)
    longest = max(map(end_of, change.drawn))
    plots = [e for e in root.iter(f"{SVG}svg") if "preserveAspectRatio" in e.attrib]
    for plot in plots:
        assert float(plot.attrib["viewBox"].split()[2]) == pytest.approx(longest, rel=1e-5)
    words = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert any(w.startswith("as given: exposed") for w in words)
    assert words.count("compute") == words.count("NVLink") == 3  # one in the legend
    assert change.svg() == change.svg()
    assert "report().orders[i].svg()" in fusion.report().details()


def boxes(root: ET.Element) -> list[tuple[float, float]]:
    """Where those that say something begin and end, in microseconds, as their numbers are in those."""
    found = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    return [(float(b.attrib["x"]), float(b.attrib["x"]) + float(b.attrib["width"])) for b in found]


def times(drawn: Timeline, lane: str) -> list[tuple[float, float]]:
    return [(begin, end) for of, _, begin, end in drawn.spans if of == lane]


def test_bytes_held_are_drawn_over_those_of_the_given_order() -> None:
    change = reorder(graph_of(layers), TABLE, OrderLimits(memory=1.0))
    root = ET.fromstring(change.svg())
    lines = [e.attrib for e in root.iter(f"{SVG}path") if {"H", "V"} <= set(e.attrib["d"])]
    held = [[float(n) for n in re.findall(r"V([\d.]+)", line["d"])] for line in lines if line["d"][-1] != "h"]
    now, given = held[-2:]
    highest = max(change.peak_before, change.peak_after)
    for drawn, line, peak in (
        (change.drawn[1], now, change.peak_after),
        (change.drawn[0], given, change.peak_before),
    ):
        assert [highest - v for v in line] == [*(size for _, size in drawn.memory), 0]
        assert highest - min(line) == peak


def test_the_page_says_what_hides_each_collective() -> None:
    fusion = FusionPass([], reorder=1.0, agree=False)
    fusion(graph_of(layers))
    (change,) = fusion.report().orders
    page = fusion.report().to_html()
    assert (
        page.startswith("<!doctype html>") and "<script" not in page and "http" not in page.split("<svg")[0]
    )
    hidden = [placed for placed in change.placed if placed.hidden_by]
    assert hidden and any(not placed.hidden_by for placed in change.placed)
    spans = {name: (begin, end) for _, name, begin, end in change.drawn[1].spans}
    for placed in change.placed:
        begin, end = spans[placed.node]
        for kernel, us in placed.hidden_by:
            first, last = spans[kernel]
            assert us == pytest.approx(min(end, last) - max(begin, first)) and us > 0
        # What is on its way is either hidden or waited for.
        assert sum(us for _, us in placed.hidden_by) + placed.after == pytest.approx(end - begin)
        assert f"<td>{placed.hidden or 'nothing'}<" in page and f"number>{placed.after:.3g}<" in page
        assert not placed.hidden or f"hidden by {placed.hidden}" in str(placed)
    assert page.count("<form") == 1 and "torch&#x27;s memory" in page


def test_many_kernels_that_hide_one_collective_are_not_all_named() -> None:
    kernels = tuple((f"mm_{i}", 1.0 + i) for i in range(6))
    placed = Placed("gather", "NVLink", 0, 0, 9.0, 0.0, "", "", kernels)
    assert placed.hidden == "mm_5 6 us, mm_4 5 us, mm_3 4 us, mm_2 3 us, 2 more 3 us"


def test_a_graph_without_collectives_that_run_beside_something() -> None:
    fusion = FusionPass([], reorder=True, agree=False)
    fusion(
        graph_of(lambda x, w: torch.ops.weft.one_shot_all_reduce(x @ w, "sum", "0", group_size=WORLD).sin())
    )
    for change in fusion.report().orders:
        ET.fromstring(change.svg())


def test_collectives_of_a_late_transport_begin_after_the_next_kernel() -> None:
    """So a gather that starts before one product hides nothing there, and one before two hides all."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for shard in w.chunk(2):
            x = x @ w @ w @ gathered(shard.to(torch.bfloat16)).float()
        return x

    late = replace(TABLE, late=("NVLink",))
    at_once, queued = (reorder(graph_of(fn), table, OrderLimits(memory=9.0)) for table in (TABLE, late))
    assert at_once.after <= queued.after < queued.before
    for drawn in queued.drawn:
        kernels = [s for s in drawn.spans if s[0] == "compute"]
        for _, _, begin, end in (s for s in drawn.spans if s[0] == "NVLink"):
            assert not any(a < begin < b for _, _, a, b in kernels)
            assert end - begin == pytest.approx(TABLE.latency + 32 * 64 * 2 / 2e3)
        assert end_of(drawn) == pytest.approx(sum(b - a for _, _, a, b in kernels) + sum_of(queued, drawn))


def sum_of(change: OrderChange, drawn: Timeline) -> float:
    return change.before if drawn is change.drawn[0] else change.after
