"""``fusion_report(model)``: the graphs of one model of several in a process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import weft
from graphs import AG, c10d, fake_ranks, gather
from ranks import run_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from weft.fused_ops.passes import FusionPass, Report, backend

report_of = weft.passes.fusion_report


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pass of another test, nothing from the environment or a cache."""
    monkeypatch.setattr(backend, "_made", {})
    monkeypatch.delenv("WEFT_PASS", raising=False)
    torch._dynamo.reset()
    with fake_ranks(2), inductor_config.patch(force_disable_caches=True):
        yield


class Gathers(nn.Module):
    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 6))

    def forward(self, x: Tensor) -> Tensor:
        return gather(x) @ self.weight


class Reduces(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x.detach().sin(), "product", "0"))


class Breaks(Gathers):
    """Two graphs, in the second of which nothing is fused."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return c10d.wait_tensor(c10d.all_reduce(y.detach(), "product", "0"))


def gathers(x: Tensor, w: Tensor) -> Tensor:
    return gather(x) @ w


def reduces(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.cos(), "product", "0"))


def became(report: Report) -> list[str | None]:
    return [e.fused_into for e in report.entries]


def compiled(model: Any, how: str, **settings: Any) -> Any:
    """In each way; the settings by the names that all of them take."""
    if how == "weft.compile":
        return weft.compile(model, **settings)
    if how == "torch.compile":
        return torch.compile(model, backend=backend.weft_backend, **settings)
    model.compile(backend=backend.weft_backend, **settings)
    return model


@pytest.mark.parametrize("how", ["weft.compile", "torch.compile", "in place"])
def test_two_modules(how: str) -> None:
    plain = Breaks(), Reduces()
    first, second = (compiled(m, how) for m in plain)
    first(torch.randn(4, 8))
    second(torch.randn(4, 8))
    for model in (first, plain[0]):
        assert became(report_of(model)) == [AG, None]
        assert report_of(model).runs.graphs == 2
    for model in (second, plain[1]):
        assert became(report_of(model)) == [None] and report_of(model).runs.graphs == 1
    assert became(report_of()) == [AG, None, None] and report_of().runs.graphs == 3
    of = [re.sub(r" #\d+", "", line.split(":")[0]) for line in report_of().details().splitlines()[:3]]
    assert of == ["graph 0 of Breaks", "graph 1 of Breaks", "graph 2 of Reduces"]
    assert "Reduces: graph 2" in re.sub(r" #\d+", "", str(report_of()))
    assert "Breaks" not in str(report_of(first)) and "Breaks" not in report_of(first).details()


def test_two_functions_and_settings() -> None:
    first, second = weft.compile(gathers, fuse="always"), weft.compile(reduces)
    first(torch.randn(4, 8), torch.randn(8, 6))
    second(torch.randn(4, 8))
    assert [became(report_of(fn)) for fn in (first, gathers)] == [[AG]] * 2
    assert [became(report_of(fn)) for fn in (second, reduces)] == [[None]] * 2


@pytest.mark.parametrize("how", ["weft.compile", "torch.compile", "in place"])
def test_what_is_compiled_later_is_of_its_model(how: str) -> None:
    """Recompilations, and a backward of static sizes, which is compiled when it first runs, out of any call."""
    first, second = compiled(Gathers(), how, dynamic=False), compiled(Gathers(), how, dynamic=False)
    x = torch.randn(4, 8, requires_grad=True)
    y = first(x)
    z = second(x.detach().double().float().requires_grad_(False))
    before = report_of(first).runs.graphs
    y.sum().backward()
    assert report_of(first).runs.graphs == before + 1
    assert len(report_of(first).entries) == 2 and len(report_of(second).entries) == 1
    z.sum().backward()
    graphs = report_of(second).runs.graphs
    second.double()(torch.randn(4, 8, dtype=torch.float64))
    assert report_of(second).runs.graphs > graphs
    assert report_of(first).runs.graphs == before + 1


@pytest.mark.parametrize("cached", [False, True])
def test_recompilations_are_told(cached: bool) -> None:
    """A forward and a backward count once."""
    with inductor_config.patch(force_disable_caches=not cached), fresh_cache():
        for _ in range(1 + cached):
            torch._dynamo.reset()
            backend._made.clear()
            model, other = weft.compile(Gathers(), dynamic=False), weft.compile(reduces)
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
            assert report_of(model).runs.again == 0 and "compiled again" not in str(report_of(model))
            for rows in (6, 10):
                model(torch.randn(rows, 8, requires_grad=True)).sum().backward()
            other(torch.randn(3))
            assert (report_of(model).runs.again, report_of(other).runs.again, report_of().runs.again) == (
                2,
                0,
                2,
            )
            said = "torch compiled again 2 times: TORCH_LOGS=recompiles says why"
            assert said in str(report_of(model)).splitlines()
        assert report_of(model).runs.loaded == 6 * cached
        again = weft.compile(model, fuse="always")
        again(torch.randn(4, 8, requires_grad=True))
        assert report_of(again).runs.again == 2, "another pass sees it for the first time"


def test_models_that_share_graphs() -> None:
    """One model twice, and a second of its class: Dynamo compiles once."""
    model, other = Gathers(), Gathers()
    once, again, like = weft.compile(model), weft.compile(model), weft.compile(other)
    for each in (once, again, like):
        each(torch.randn(4, 8))
    assert report_of().runs.graphs == 1
    assert [became(report_of(each)) for each in (once, again, like, model, other)] == [[AG]] * 5


def test_a_model_whose_layers_are_compiled_each() -> None:
    model = nn.Sequential(Gathers(), Reduces())
    for layer in model:
        layer.compile(backend=backend.weft_backend)
    model(torch.randn(4, 8))
    assert [became(report_of(each)) for each in (model, *model)] == [[AG, None], [AG], [None]]


def test_a_model_that_comes_from_the_cache() -> None:
    with inductor_config.patch(force_disable_caches=False), fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            backend._made.clear()
            first, second = weft.compile(Gathers()), weft.compile(Reduces())
            first(torch.randn(4, 8, requires_grad=True)).sum().backward()
            second(torch.randn(4, 8))
            assert became(report_of(second)) == [None]
            assert became(report_of(first))[0] == AG and len(report_of(first).entries) == 2
        assert (report_of(first).runs.loaded, report_of(first).runs.graphs) == (2, 0)


def test_what_was_not_compiled_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return x

    own = weft.compile(reduces, fusion=FusionPass())
    own(torch.randn(3))
    for each, name in ((model, "model"), (own, "reduces"), (weft.compile(nn.Linear(3, 3)), "Linear")):
        with pytest.raises(
            ValueError, match=f"model: is {name}.*, for which weft has compiled nothing; must be"
        ):
            report_of(each)
    with pytest.raises(TypeError, match="model: is 3, must be a module or a function"):
        report_of(3)


def on_ranks(rank: int, world: int) -> tuple[tuple[int, int, int], ...]:
    """Ranks agree on the first model and not on the second."""
    torch._dynamo.reset()
    first, second = weft.compile(gathers), weft.compile(gathers_otherwise, fuse="always")
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with inductor_config.patch(fx_graph_cache=False):
        for _ in range(2):
            first(x, w)
        second(x, w, rank)
    found = report_of(first), report_of(second), report_of()
    return tuple((r.questions.count, r.questions.fused, len(r.disagreements)) for r in found)


def gathers_otherwise(x: Tensor, w: Tensor, rank: int) -> Tensor:
    y = gather(x)
    y = y.sin() @ w if rank else y @ w
    z = gather(x.cos())
    return y + (z @ w if rank else z.sin() @ w)


def test_votes_are_of_the_model_whose_graph_asked() -> None:
    for first, second, both in run_ranks(on_ranks, 2, fresh=True):
        assert first == (2, 2, 0)
        assert second[1] == 0 and second[0] == second[2]
        assert both == tuple(a + b for a, b in zip(first, second, strict=True))
