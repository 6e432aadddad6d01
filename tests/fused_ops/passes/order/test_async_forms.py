"""All-gathers and reduce-scatters that copy engines take, and what they gather left where it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import traced
from orders import WORLD, gathered, name, scattered
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from weft.fused_ops import FusionPass, Report

aten, c10d, weft_ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.weft
ROWS = 512  # of 256 float32: 512 KiB
pytestmark = pytest.mark.usefixtures("two")


def passed(fn: Callable[..., Any], *shapes: tuple[int, ...], **settings: Any) -> tuple[fx.Graph, Report]:
    graph = traced(fn, *(torch.randn(s) for s in shapes))
    fusion = FusionPass(**{"reorder": True, "agree": False, **settings})
    fusion(graph)
    graph.lint()
    return graph, fusion.report()


def nodes(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.target in [getattr(weft_ops, m).default for m in names]
    ]


def used_by_itself(x: Tensor, w: Tensor) -> Tensor:
    """What no product takes."""
    return x.sin().sum() * gathered(w).cos().sum(0)


def test_a_gather_that_no_product_takes() -> None:
    graph, report = passed(used_by_itself, (8, 8), (ROWS, 256))
    (start,), (wait,) = nodes(graph, "all_gather_start"), nodes(graph, "all_gather_wait")
    assert start.kwargs == wait.kwargs == {"group_size": WORLD, "placed": True}
    assert wait.args[:2] == (start, start.args[0])
    (entry,) = report.entries
    assert entry.fused_into == "weft::all_gather_start" and entry.form == "all_gather by copy engines"


def test_a_reduce_scatter() -> None:
    graph, report = passed(lambda x: scattered(x.sin()).cos(), (WORLD * ROWS, 256))
    (start,), (wait,) = nodes(graph, "reduce_scatter_start"), nodes(graph, "reduce_scatter_wait")
    assert start.args[1] == "sum" and wait.args[:2] == (start, start.args[0])
    assert not nodes(graph, "all_gather_release") and not report.left


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reorder": False, "collectives": False}, "product"),
        ({"collectives": False}, "product"),
        ({"groups": []}, "none of those this pass is for"),
    ],
    ids=str,
)
def test_settings_that_leave_it_alone(settings: dict[str, Any], said: str) -> None:
    graph, report = passed(used_by_itself, (8, 8), (ROWS, 256), **settings)
    assert not nodes(graph, "all_gather_start")
    assert said in str(report.entries[0].reason)


def test_small_parts_stay_with_the_backend() -> None:
    _, report = passed(used_by_itself, (8, 8), (ROWS // 2, 256))
    assert "parts of 262144 bytes are less than 524288" in str(report.entries[0].reason)
    _, report = passed(lambda x: scattered(x.sin()), (WORLD * (ROWS + 1), 257))
    assert "no multiple of 16" in str(report.entries[0].reason)


@pytest.mark.parametrize("setting", ["triton.cudagraphs", "cpp_wrapper"])
def test_settings_of_inductor_that_part_a_start_from_its_wait(setting: str) -> None:
    with inductor_config.patch({setting: True}):
        graph, report = passed(used_by_itself, (8, 8), (ROWS, 256))
    assert (
        not nodes(graph, "all_gather_start")
        and setting.split(".")[0] in str(report.entries[0].reason) + "cpp_wrapper"
    )


def begun_together(*shards: Tensor, writes: bool = False) -> Tensor:
    begun = [c10d.all_gather_into_tensor(s, WORLD, name()) for s in shards]
    if writes:
        shards[-1].zero_()
    return torch.stack([(shards[0] @ c10d.wait_tensor(b).t()).sum() for b in begun])


def test_those_that_start_together_start_one_product_ahead() -> None:
    """As torch starts the gathers of an inference graph."""
    graph, report = passed(begun_together, *[(ROWS, 256)] * 4)
    names = {weft_ops.all_gather_start.default: "start", weft_ops.all_gather_wait.default: "wait"}
    names[aten.mm.default] = "mm"
    order = [names[n.target] for n in graph.nodes if n.target in names]
    assert report.left == 0 and order == ["start", "wait", *["start", "mm", "wait"] * 3, "mm"]
    operands = [str(n.args[0]) for n in nodes(graph, "all_gather_start")]
    assert operands == [n.name for n in graph.nodes if n.op == "placeholder"]


def test_a_start_that_cannot_be_later_is_left_to_the_backend() -> None:
    graph, report = passed(lambda *x: begun_together(*x, writes=True), *[(ROWS, 256)] * 3)
    (left,) = [str(e.reason) for e in report.entries if e.fused_into is None]
    assert "more than 2 of its kind are on their way at once" in left
    assert len(nodes(graph, "all_gather_start")) == 2


def test_what_is_gathered_is_released_after_its_last_reader() -> None:
    """Also where that reads a view; the third of three finds no buffer."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        whole = [gathered(x) for x in (a, b, c)]
        return tuple(w.t()[3].sin() + w.sum() for w in reversed(whole))

    graph, _ = passed(fn, *[(ROWS, 256)] * 3)
    order = {n: i for i, n in enumerate(graph.nodes)}
    waits, releases = nodes(graph, "all_gather_wait"), nodes(graph, "all_gather_release")
    assert [bool(w.kwargs.get("placed")) for w in waits] == [True, True, False]
    for release in releases:
        token, wait = release.args[:2]
        assert wait.args[0] is token
        views = [wait]
        for node in views:
            views += [
                u for u in node.users if u.target in (aten.t.default, aten.permute.default, aten.select.int)
            ]
        readers = {u for view in views for u in view.users} - {release}
        assert order[release] == max(order[r] for r in readers) + 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: gathered(w).detach(),
        lambda w: gathered(w)[:4],
        lambda w: gathered(w).add_(1).sin(),
        lambda w: (gathered(w).view(-1), w.sum()),
    ],
    ids=["returned", "a view is returned", "written", "flat"],
)
def test_what_outlives_the_graph_or_is_written_is_copied(fn: Callable[..., Any]) -> None:
    graph, _ = passed(fn, (ROWS, 256))
    (wait,) = nodes(graph, "all_gather_wait")
    assert not wait.kwargs.get("placed") and not nodes(graph, "all_gather_release")


def test_a_product_that_would_be_transposed_leaves_its_gather() -> None:
    """A weight of FSDP, gathered for a product: as right operand. A shard of the left one is fused."""
    graph, report = passed(lambda x, w: x @ gathered(w).t(), (64, 256), (ROWS, 256))
    assert nodes(graph, "all_gather_start") and "right operand" in str(report.entries[0].detail)
    graph, report = passed(lambda w, x: gathered(w) @ x, (ROWS, 256), (256, 64))
    assert nodes(graph, "fused_all_gather_matmul") and not nodes(graph, "all_gather_start")
    graph, _ = passed(lambda x, w: x @ gathered(w).t(), (64, 256), (ROWS, 256), fuse="always")
    assert nodes(graph, "fused_all_gather_matmul")


def test_groups_of_several_hosts_keep_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    graph, report = passed(used_by_itself, (8, 8), (ROWS, 256))
    assert not nodes(graph, "all_gather_start")
    assert "its ranks are on several hosts" in str(report.entries[0].reason)


def test_parts_of_what_is_gathered_stay_in_place() -> None:
    graph, _ = passed(lambda w: tuple(p.sin().sum() for p in gathered(w).split(100)), (ROWS, 256))
    (wait,), (release,) = nodes(graph, "all_gather_wait"), nodes(graph, "all_gather_release")
    assert wait.kwargs["placed"] and list(graph.nodes).index(release) > list(graph.nodes).index(wait) + 1
