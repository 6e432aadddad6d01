"""Kernels of a graph's calls are compiled while the graph is: its first run finds them all, and compiles nothing.

There is no GPU: the graphs are of fake CUDA tensors, and a call's first run makes its launchers, which load what they
launch, and launches nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import weft
from first_runs import loaded_at_first_run
from graphs import AG, RS, copied, fake_ranks, gather, scatter
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import fused_ops
from weft.fused_ops.dispatch.plan import Plan
from weft.fused_ops.passes import FusionPass, backend
from weft.fused_ops.passes.agreement import fallback_graph
from weft.fused_ops.passes.agreement.guard import GraphGuard, Voters
from weft.fused_ops.passes.kernels_ahead import graph_kernels
from weft.fused_ops.passes.kernels_ahead.graph_kernels import (
    GraphKernels,
    KeptCall,
    KernelsOnTheirWay,
    is_planned,
)
from weft.kernels.all_gather.cuda_kernel import all_gather_program
from weft.kernels.device.jit import program
from weft.kernels.device.jit.ahead import Compilation, ProgramCounts, program_counts

WORLD, ROWS, DIM, HIDDEN = 2, 2048, 1024, 1536
BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="GPUs that are there run the calls themselves"
)


class Machine:
    """Programs are made anew, and NVRTC is quick. ``compiled``: what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.compiled: list[str] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

        def compile_cubin(path: Path, arch: str, defines: dict[str, str | int]) -> bytes:
            assert self.goes_on.wait(30)
            if self.fails:
                raise program.CompileError(f"{path}: no")
            self.compiled.append(f"{path.parent.name}/{path.name} {sorted(defines.items())}")
            return b"cubin"

        monkeypatch.setattr(program, "compile_cubin", compile_cubin)
        monkeypatch.setenv("WEFT_CACHE_DIR", str(cache))
        self.is_another_process()

    def is_another_process(self) -> None:
        program.program_of.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(monkeypatch, tmp_path / "cubins")
    with fake_ranks(WORLD):
        yield made
        made.goes_on.set()
        join_threads()
    made.is_another_process()


def join_threads() -> None:
    """Nothing is on its way any more."""
    for thread in threading.enumerate():
        if thread.name == "weft-compiles":
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are asked whether they run the same, though there are none."""
    monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: None)


def layer(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """And its backward, by hand: there is no autograd for a GPU that is not there."""
    rows = gather(x)
    h = torch.relu(rows @ up)

    def backward(grad: Tensor) -> list[Tensor]:
        whole = gather(grad)
        of_h = (whole @ down.t()) * (h > 0)
        return [grad + scatter(of_h @ up.t()), rows.t() @ of_h, h.t() @ whole]

    return x + scatter(h @ down), backward


def two_layers(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Forward and backward."""
    between, first = layer(x, *weights[:2])
    y, second = layer(between, *weights[2:])
    grad, *of_second = second(y * 2)
    return [y, *first(grad), *of_second]


def traced_on_gpu(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> fx.Graph:
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(s, dtype=dtype, device="cuda") for s in shapes]
        return make_fx(fn)(*given).graph


SHAPES = (ROWS // WORLD, DIM), *((DIM, HIDDEN), (HIDDEN, DIM)) * 2


def passed(graph: fx.Graph, **settings: Any) -> tuple[fx.Graph, FusionPass]:
    fusion, after = FusionPass(**{"agree": False, **settings}), copied(graph)
    fusion(after)
    after.lint()
    return after, fusion


def run_first(graph: fx.Graph) -> int:
    """Makes the launchers of all calls of a graph, as its first run does; how many calls there were."""
    calls = [n for n in graph.nodes if is_planned(n)]
    for node in calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert loaded_at_first_run(node.target, args, kwargs, compiles=True)
    return len(calls)


def settled(fusion: FusionPass) -> ProgramCounts:
    """What was compiled once nothing is on its way any more."""
    join_threads()
    return fusion.report().programs


def test_the_first_run_of_two_layers_compiles_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph = traced_on_gpu(two_layers, *SHAPES)
    after, fusion = passed(graph)
    report = fusion.report()
    assert report.fused == len(report.entries) >= 8, report
    ahead = settled(fusion)
    assert ahead.ahead == len(machine.compiled) == len(set(machine.compiled)) >= 3
    assert run_first(after) == len(report.entries)
    assert fusion.report().programs == ahead
    assert f"kernels: {ahead.ahead} compiled ahead, 0 at calls, 0 from the cache\n" in f"{fusion.report()}\n"
    # Without: all of them at the first run.
    machine.is_another_process()
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "another"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphKernels, "compile", lambda self: None)
        after, fusion = passed(graph)
    run_first(after)
    assert fusion.report().programs == ProgramCounts(at_calls=ahead.ahead)


def test_the_report_has_the_plans(machine: Machine) -> None:
    after, fusion = passed(traced_on_gpu(two_layers, *SHAPES))
    calls = [n for n in after.nodes if is_planned(n)]
    for entry in fusion.report().entries:
        assert entry.plan is not None and entry.plan.algorithm in ("push", "one_shot")
        assert entry.plan.predicted_us is not None
        assert f"by {entry.plan.algorithm} in {entry.plan.predicted_us:.3g} us" in str(entry)
    first = next(n for n in calls if n.target._schema.name == AG)
    given = fx.map_arg((first.args, first.kwargs), lambda n: n.meta["val"])
    assert fusion.report().entries[0].plan == fused_ops.plan(first.target, *given[0], **given[1])
    assert {e.fused_into for e in fusion.report().entries} == {AG, RS}
    assert "by push in 1234 us" in str(fusion.report().entries[0].planned(Plan("push", predicted_us=1234.4)))


class Alone(GraphGuard):
    """It asks nobody. ``there``: what was compiled when it would."""

    there = ProgramCounts()

    def _look_up_groups(self) -> dict[str, Voters]:
        return {}

    def _agreed(self, signature: int, voters: Mapping[str, Voters]) -> bool:
        self.there, self._unasked = program_counts(), False
        return True


def reloaded(graph: fx.Graph) -> Alone:
    """The guard of a graph as the generated module makes it."""
    (question,) = graph.find_nodes(op="call_function", target=torch.ops.weft.agree.default)
    return Alone(str(question.args[0]))


def test_the_first_run_waits_for_what_is_on_its_way(
    machine: Machine, asked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it asks: a rank that still compiles would be late."""
    after, fusion = passed(traced_on_gpu(two_layers, *SHAPES), agree=True)
    count = settled(fusion).ahead
    machine.is_another_process()
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "another"))
    machine.goes_on.clear()
    before, guard = program_counts(), reloaded(after)
    assert program_counts() == before
    threading.Timer(0.3, machine.goes_on.set).start()
    assert guard.fused() and guard.there - before == ProgramCounts(ahead=count)
    assert guard._kernels is None and guard.fused()


def test_a_graph_from_the_cache_has_its_kernels_compiled(
    machine: Machine, asked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    after, fusion = passed(traced_on_gpu(two_layers, *SHAPES), agree=True)
    count = settled(fusion).ahead
    assert count >= 3
    for kept in (True, False):  # the cubins, beside the graph
        machine.is_another_process()
        fusion.clear()
        if not kept:
            monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "another"))
        guard = reloaded(after)
        assert guard._kernels is not None
        guard._kernels.wait(60)
        expected = ProgramCounts(kept=count) if kept else ProgramCounts(ahead=count)
        assert settled(fusion) == expected
        run_first(after)
        assert fusion.report().programs == expected


def test_what_is_kept_says_nothing_of_a_rank(machine: Machine) -> None:
    """A graph that one rank compiled may be loaded by another one, whose programs are others."""
    graph = traced_on_gpu(two_layers, *SHAPES)
    kernels = GraphKernels(passed(graph)[0])
    kept, mine = kernels.calls, {str(p) for p in kernels._programs}
    assert kept and "cuda:0" not in str(kept)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    other = GraphKernels(passed(graph)[0])
    assert other.calls == kept
    theirs = {str(p) for p in other._programs}
    assert any("'RANK': 1" in p for p in theirs) and theirs != mine


def test_the_report_of_all_models_counts_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = FusionPass()
    monkeypatch.setattr(backend, "_made", {"": fusion})
    passed(traced_on_gpu(two_layers, *SHAPES))
    counted = settled(fusion)
    assert counted.ahead >= 3 and weft.passes.fusion_report().programs == counted


def test_the_report_says_what_calls_share_of_the_heap(machine: Machine) -> None:
    """Calls of one kind have one workspace, of what the largest needs, however many graphs there are."""
    fusion = FusionPass(agree=False)
    assert fusion.report().heap.calls == 0
    for rows in (ROWS, 4 * ROWS):
        fusion(copied(traced_on_gpu(two_layers, (rows // WORLD, DIM), *SHAPES[1:])))
    fusion(copied(traced_on_gpu(lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD) + 1, (ROWS, DIM))))
    report, most = fusion.report(), {}
    plans = [e.plan for e in report.entries if e.plan is not None]
    for plan in plans:
        most[plan.workspace] = max(plan.workspace_bytes, most.get(plan.workspace, 0))
    assert most.keys() >= {"matmul", "all_reduce"}
    apart = sum(plan.workspace_bytes for plan in plans)
    assert report.heap == (len(plans), sum(most.values()), apart) and apart > 3 * report.heap.shared
    assert f"that {len(plans)} calls share" in report.details()


def test_nothing_is_compiled_for_what_stays_unfused(machine: Machine) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.relu(gather(x)) + 1

    after, fusion = passed(traced_on_gpu(fn, (ROWS, DIM)), collectives=False)
    assert fusion.report().fused == 0 and not any(map(is_planned, after.nodes))
    few = traced_on_gpu(lambda x, w: gather(x) @ w, (1, 3), (3, 5), dtype=torch.float32)
    _, always = passed(few, fuse="always")
    assert "runs unfused: " in str(always.report().entries[0]), always.report()
    assert settled(fusion) == ProgramCounts() and not machine.compiled


def test_ops_that_the_program_calls_itself(machine: Machine) -> None:
    op = torch.ops.weft.one_shot_all_reduce
    after, fusion = passed(traced_on_gpu(lambda x: op(torch.relu(x), "sum", "0"), (ROWS, DIM)))
    assert settled(fusion) == ProgramCounts(ahead=1) and not fusion.report().entries
    assert run_first(after) == 1 and fusion.report().programs.at_calls == 0


def test_cpu_graphs_are_not_planned(machine: Machine) -> None:
    """It would cost the pass a quarter of its time, for what is known."""
    x, w = torch.randn(6, 8), torch.randn(8, 6)
    with FakeTensorMode() as mode:
        graph = make_fx(lambda x, w: gather(x) @ w)(mode.from_tensor(x), mode.from_tensor(w)).graph
    after, fusion = passed(graph)
    (entry,) = fusion.report().entries
    assert entry.fused_into == AG and entry.plan is None and GraphKernels(after).calls == []
    assert settled(fusion) == ProgramCounts()


def test_what_cannot_be_compiled_is_said_and_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.fails = True
    with caplog.at_level(logging.WARNING, "weft.ops"):
        after, fusion = passed(traced_on_gpu(two_layers, *SHAPES))
        counted = settled(fusion)
    assert counted == ProgramCounts(failed=counted.failed) and counted.failed >= 3
    assert "could not be compiled ahead of its first call" in caplog.text and "kernel.cu" in caplog.text
    with pytest.raises(program.CompileError):
        run_first(after)
    machine.fails = False
    run_first(after)
    assert fusion.report().programs.at_calls == counted.failed


def test_a_call_that_cannot_be_planned_leaves_the_graph_as_it_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(graph_kernels, "choice_of_call", refuse)
    _, fusion = passed(traced_on_gpu(two_layers, *SHAPES))
    assert fusion.report().left == 0 and all(e.plan is None for e in fusion.report().entries)
    assert KernelsOnTheirWay([KeptCall("fused_all_gather_matmul", [], {})]).wait(1) is None
    assert settled(fusion) == ProgramCounts()


def test_the_first_run_waits_no_longer_than_it_may(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    after, fusion = passed(traced_on_gpu(lambda x, w: gather(x) @ w, *SHAPES[:2]))
    settled(fusion)
    machine.is_another_process()
    calls = [KeptCall.of(n) for n in after.nodes if is_planned(n)]
    machine.goes_on.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", "/dev/null/none")
        kernels = KernelsOnTheirWay(calls)
        kernels.wait(0.01)
        assert "1 kernels of a graph are still being compiled" in caplog.text
        machine.goes_on.set()
        settled(fusion)


def test_one_program_is_compiled_once_for_all_who_wait(machine: Machine) -> None:
    machine.goes_on.clear()
    before, one = program_counts(), all_gather_program(2, 0)
    first, second = Compilation([one, one]), Compilation([one, all_gather_program(2, 1)])
    assert (first.count, second.count) == (1, 2)
    assert not first.wait(0.01)
    machine.goes_on.set()
    assert first.wait(30) and second.wait(30)
    assert program_counts() - before == ProgramCounts(ahead=2)
