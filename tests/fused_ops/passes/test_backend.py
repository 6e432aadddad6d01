"""The backend "weft" and ``weft.compile``: settings, modes, other passes, the report's file."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from graphs import AG, fake_ranks, gather
from metadata import write_metadata
from opcommon import BOUND, check
from opcommon import gather as gather_all
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from weft.fused_ops.passes import FusionPass, backend
from weft.fused_ops.passes.records.report_file import VARIABLE

SLOT = "post_grad_custom_post_pass"


class Counting(CustomGraphPass):
    """Counts the graphs that it sees, and what stands in them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += [str(node.target) for node in graph.nodes]

    def uuid(self) -> str:
        return "counting"


class Second(Counting):
    pass


def model(x: Tensor, w: Tensor) -> Tensor:
    return gather(x) @ w


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pass of another test, nothing from the environment or a cache, and two ranks that do not communicate."""
    monkeypatch.setattr(backend, "_made", {})
    for name in ("WEFT_PASS", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    with fake_ranks(2), inductor_config.patch(fx_graph_cache=False):
        yield


def run(compiled: Callable[..., Any], rows: int = 4) -> None:
    compiled(torch.randn(rows, 8), torch.randn(8, 6))


def test_by_one_word() -> None:
    run(torch.compile(model, backend=backend.weft_backend))
    report = weft.passes.fusion_report()
    assert [e.fused_into for e in report.entries] == [AG]
    assert report.runs.graphs == 1


def test_by_weft_compile_in_each_form() -> None:
    run(weft.compile(model))

    @weft.compile(fullgraph=True)
    def decorated(x: Tensor, w: Tensor) -> Tensor:
        return model(x, w)

    run(decorated)
    linear = torch.nn.Linear(8, 6)
    assert weft.compile(linear)(torch.randn(3, 8)).shape == (3, 6)
    assert [e.fused_into for e in weft.passes.fusion_report().entries] == [AG, AG]


def test_module_compile() -> None:
    class Gathers(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return model(x, w)

    module = Gathers()
    module.compile(backend=backend.weft_backend, dynamic=True)
    run(module, 4)
    run(module, 10)
    assert [e.fused_into for e in weft.passes.fusion_report().entries] == [AG]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_mode_beside_options(by_name: bool) -> None:
    """torch refuses both at once. The mode's options hold, and those that are given over them."""
    seen: dict[str, Any] = {}

    class Reads(Counting):
        def __call__(self, graph: fx.Graph) -> None:
            names = ("max_autotune", "coordinate_descent_tuning", "epilogue_fusion")
            seen.update({name: getattr(inductor_config, name) for name in names})

    given = {"coordinate_descent_tuning": False, SLOT: Reads()}
    mode = "max-autotune-no-cudagraphs"
    if by_name:
        with inductor_config.patch({SLOT: given[SLOT]}):
            run(torch.compile(model, backend=backend.weft_backend, mode=mode))
        assert seen["max_autotune"] and seen["coordinate_descent_tuning"]
    else:
        run(weft.compile(model, mode=mode, options=given))
        assert seen["max_autotune"] and not seen["coordinate_descent_tuning"]
    assert [e.fused_into for e in weft.passes.fusion_report().entries] == [AG]


def test_settings_by_arguments_options_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PASS", "agree=0, fuse=always")
    run(weft.compile(model, agree="capture"))
    run(torch.compile(model, backend=backend.weft_backend, options={"weft.strict": True}))
    made = [(p.strict, p.fuse, p.agree) for p in backend._made.values()]
    assert made == [(False, "always", "capture"), (True, "always", False)]
    monkeypatch.setenv("WEFT_PASS", "agree=no")
    with pytest.raises(
        ValueError, match=r"WEFT_PASS: agree: is 'no', must be True, .*; True and False are 1 and 0 there"
    ):
        weft.compile(model)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ("strict=1,regather=0,", {"strict": True, "regather": False}),
        ("collectives=auto,sequence_parallel=1", {"collectives": "auto", "sequence_parallel": True}),
        ("reorder=1, loss_parallel=1 ,", {"reorder": True, "loss_parallel": True}),
        ("reorder=1.0,loss_parallel=4096", {"reorder": 1.0, "loss_parallel": 4096}),
    ],
)
def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, read: dict[str, Any]) -> None:
    monkeypatch.setenv("WEFT_PASS", text)
    found = backend._environment()
    assert found == read and [*map(type, found.values())] == [*map(type, read.values())]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fuze=always", "WEFT_PASS: has 'fuze=always', must have setting=value of strict, fuse, agree, "),
        ("groups=tp", "WEFT_PASS: has 'groups=tp', must have "),
        ("strict", "WEFT_PASS: has 'strict', must have "),
        ("strict=", "WEFT_PASS: has 'strict=', must have "),
        ("strict=yes", "WEFT_PASS: strict: is 'yes', must be True or False;"),
        ("fuse=1", "WEFT_PASS: fuse: is True, must be 'auto' or 'always';"),
        ("reorder=nan", "WEFT_PASS: reorder: is nan, must be 0 or more;"),
        ("buckets=1", "WEFT_PASS: has 'buckets=1', must have "),
        ("loss_parallel=all", "WEFT_PASS: loss_parallel: is 'all', must be True or False, or the bytes of "),
    ],
)
def test_what_the_environment_may_not_have(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("WEFT_PASS", text)
    with pytest.raises(ValueError, match=message):
        weft.compile(model)


def test_an_order_by_environment_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """True is no byte more, 1.0 twice the memory: two passes."""
    monkeypatch.setenv("WEFT_PASS", "reorder=1")
    run(weft.compile(model))
    run(torch.compile(model, backend=backend.weft_backend, options={"weft.reorder": 1.0}))
    run(weft.compile(model, reorder=False))
    assert [p.reorder for p in backend._made.values()] == [0.0, 1.0, None]
    orders = weft.passes.fusion_report().orders
    assert [o.kept for o in orders] == ["no collective overlaps with anything"] * 2  # it is fused
    assert "order kept: no collective overlaps with anything" in weft.passes.fusion_report().details()


def test_equal_settings_compile_once() -> None:
    run(weft.compile(model))
    run(weft.compile(model))
    assert weft.passes.fusion_report().runs.graphs == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"groop": []}, TypeError, "groop: is no setting, must be one of groups, strict"),
        ({"fusion": "auto"}, TypeError, "fusion: is 'auto', must be a FusionPass"),
        ({"fuse": "sometimes"}, ValueError, "fuse: is 'sometimes'"),
        (
            {"options": {"weft.groop": 1}},
            ValueError,
            r"options: has 'weft.groop', must have one of weft\.groups",
        ),
        ({"options": {"max_autotuner": True}}, ValueError, "options: has 'max_autotuner'"),
        ({"mode": "fastest"}, RuntimeError, "Unrecognized mode=fastest"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        weft.compile(model, **arguments)


def test_a_pass_and_settings_of_another() -> None:
    fusion = FusionPass()
    with pytest.raises(TypeError, match="strict: is given with fusion"):
        weft.compile(model, fusion=fusion, strict=True)
    run(weft.compile(model, fusion=fusion))
    assert [e.fused_into for e in fusion.report().entries] == [AG]
    assert not weft.passes.fusion_report().entries


@pytest.mark.parametrize("where", ["options", "config"])
def test_the_pass_that_was_there_runs_first(where: str) -> None:
    mine = Counting()
    if where == "options":
        run(weft.compile(model, options={SLOT: mine}))
    else:
        with inductor_config.patch({SLOT: mine}), warnings.catch_warnings():
            warnings.filterwarnings("error", "Counting")
            run(torch.compile(model, backend=backend.weft_backend))
    assert [e.fused_into for e in weft.passes.fusion_report().entries] == [AG]
    assert mine.seen and not any("weft" in target for target in mine.seen)


def test_a_fusion_pass_that_was_there_is_the_one() -> None:
    fusion = FusionPass(agree=False)
    run(weft.compile(model, options={SLOT: fusion}))
    assert [e.fused_into for e in fusion.report().entries] == [AG]
    assert not weft.passes.fusion_report().entries


def test_who_is_dropped_is_named() -> None:
    fusion, mine = FusionPass(), Counting()
    with inductor_config.patch({SLOT: mine}):
        with pytest.warns(
            UserWarning, match="Counting will not run in models .* replace what torch._inductor"
        ):
            fusion.options  # noqa: B018
        with pytest.warns(UserWarning, match="Counting will not run"):
            fusion.options_with(Second())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".* will not run")
            fusion.options_with(mine)
        assert "torch._inductor.config has Counting in its place" in fusion.report().details()
    with inductor_config.patch({SLOT: fusion}), warnings.catch_warnings():
        warnings.filterwarnings("error", ".* will not run")
        fusion.options  # noqa: B018


PROGRAM = """
import collector, os, sys
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
from compiler import leave_out_measurements
leave_out_measurements()
rank, report = 0, sys.argv[1]
if os.fork() == 0:
    rank = 1
else:
    _, status = os.wait()
    assert status == 0 and not os.path.exists(report)
dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
def model(x, w):
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w
torch.compile(model, backend="weft", fullgraph=True)(torch.randn(4, 8), torch.randn(8, 6))
dist.destroy_process_group()
assert "weft" in torch._dynamo.list_backends()
"""


def test_the_entry_point_and_the_file(tmp_path: Path) -> None:
    """A program that never names weft but as a backend; its report is rank 0's, or each rank's own."""
    paths = write_metadata(tmp_path), Path(__file__).parents[2], *filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(map(str, paths))
    written = tmp_path / "report"
    every = {"PYTHONPATH": path, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", VARIABLE: str(written)}
    command = [sys.executable, "-c", PROGRAM, str(written)]
    result = subprocess.run(
        command, env={**os.environ, **every}, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    text = written.read_text()
    assert "fused into weft::fused_all_gather_matmul" in text
    assert text.count("1 of 1 collectives fused") == 1
    assert not list(tmp_path.glob("report.*"))  # nothing half-written is left


def test_each_rank_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "of-{rank}.txt"))
    fusion = FusionPass()
    run(torch.compile(model, options=fusion.options))
    assert "fused into" in (tmp_path / "of-0.txt").read_text()


def on_ranks(rank: int, world: int) -> int:
    """Dynamic shapes and a backward, against the float64 product of all shards."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend.weft_backend, dynamic=True, fullgraph=True)
    with inductor_config.patch(fx_graph_cache=False):
        for rows in (3, 7, 5):
            x, w = torch.randn(rows, 17, requires_grad=True), torch.randn(17, 11, requires_grad=True)
            y = compiled(x, w)
            check("y", y, torch.cat(gather_all(x)) @ w.detach().double(), BOUND[torch.float32])
            y.sum().backward()
            assert w.grad is not None
            want = torch.cat(gather_all(x)).sum(0)[:, None].expand(17, 11)
            check("gradient of w", w.grad, want, BOUND[torch.float32])
    return weft.passes.fusion_report().fused


def test_between_ranks() -> None:
    assert all(fused >= 2 for fused in run_ranks(on_ranks, 2))
