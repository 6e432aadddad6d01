"""A picture of both orders: what runs when, in lanes, and memory under it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from graphs import fake_ranks
from orders import TABLE, WORLD, gathered, graph_of
from torch import Tensor
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.order.change import OrderChange
from weft.fused_ops.passes.order.moves import OrderLimits, reorder
from weft.fused_ops.passes.order.picture import DrawnOrder

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    with fake_ranks(WORLD) as known:
        yield known


def layers(x: Tensor, w: Tensor) -> Tensor:
    for shard in w.chunk(4):
        x = x[:, :32] @ gathered(shard.to(torch.bfloat16)).float()
    return x


def test_lanes_are_what_was_predicted() -> None:
    change = reorder(graph_of(layers), TABLE, OrderLimits(memory=1.0))
    assert not change.kept
    for drawn, exposed, peak in zip(
        change.drawn,
        (change.before, change.after),
        (change.peak_before, change.peak_after),
        strict=True,
    ):
        kernels = [s for s in drawn.spans if s[0] == "compute"]
        gathers = [s for s in drawn.spans if s[0] == "NVLink"]
        assert (len(kernels), len(gathers)) == (4, 4)
        for lane in kernels, gathers:
            assert all(a[3] <= b[2] for a, b in pairwise(lane))  # one after the other
        computed = sum(end - begin for _, _, begin, end in kernels)
        assert drawn.end == pytest.approx(computed + exposed)
        assert max(size for _, size in drawn.memory) == peak
        assert [when for when, _ in drawn.memory] == sorted({when for when, _ in drawn.memory})
    assert change.drawn[1].end < change.drawn[0].end


def test_the_picture_has_a_box_for_each_span() -> None:
    fusion = FusionPass([], reorder=1.0, agree=False)
    fusion(graph_of(layers))
    (change,) = fusion.report().orders
    root = ET.fromstring(change.svg())
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == sum(len(drawn.spans) for drawn in change.drawn) == 16
    words = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert any(w.startswith("as given: exposed") for w in words)
    assert words.count("compute") == words.count("NVLink") == words.count("memory") == 2
    assert len(list(root.iter(f"{SVG}path"))) == 2
    assert change.svg() == change.svg()
    assert "report().orders[i].svg()" in fusion.report().details()
    width = float(root.attrib["viewBox"].split()[2])
    assert all(
        0 <= float(b.attrib["x"]) <= float(b.attrib["x"]) + float(b.attrib["width"]) <= width for b in boxes
    )


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
        assert drawn.end == pytest.approx(sum(b - a for _, _, a, b in kernels) + sum_of(queued, drawn))


def sum_of(change: OrderChange, drawn: DrawnOrder) -> float:
    return change.before if drawn is change.drawn[0] else change.after
