"""Compiled graphs in CUDA graphs: what asks before each run is fused, what is captured and cannot ask is not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from opcommon import BOUND, check
from ranks import run_ranks
from test_pass_on_gpus import layer, layer_inputs
from test_ranks_that_differ import compiler
from torch import Tensor
from weft.fused_ops import Plan, last_plan
from weft.fused_ops.dispatch import plan
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement import guard
from weft.fused_ops.passes.agreement.votes.begun import begun

STEPS = 6


def without_a_gpu(rank: int, size: int, agree: bool | str, captures: list[bool]) -> tuple[list[bool], Report]:
    """Runs of which those that are said to be captured have to be right, too; whether each was fused."""
    fused = []
    before = guard._capturing
    try:
        with compiler(), torch.no_grad(), plan.forced("fused"):
            fusion = FusionPass(fuse="always", agree=agree)
            fusion.clear()
            compiled = torch.compile(layer, options=fusion.options, dynamic=False)
            for captured in captures:
                guard._capturing = lambda captured=captured: captured
                given = layer_inputs(size)
                plan.ran(Plan("none"))
                got = compiled(*given)
                fused.append(last_plan().algorithm != "none")
                check("result", got, layer(*(t.double() for t in given)), 3 * BOUND[torch.bfloat16])
            return fused, fusion.report()
    finally:
        guard._capturing = before


def test_a_captured_run_is_unfused_and_the_report_says_why() -> None:
    captures = [False, True, False, True, True, True, False]
    for rank, (fused, report) in enumerate(run_ranks(without_a_gpu, 2, True, captures)):
        assert fused == [not c for c in captures]
        (told,) = report.disagreements
        assert (told.runs, told.peer) == (4, rank)
        assert "a CUDA graph is being captured, whose replays cannot ask" in told.reason
        assert (report.questions.count, report.questions.fused) == (7, 3)


def connected(rank: int, size: int) -> tuple[list[bool], Report, int]:
    """As on a backend that has to be connected before a CUDA graph can be captured."""
    from torch.distributed.distributed_c10d import _get_default_group

    before = begun(_get_default_group())
    with mock.patch.object(guard, "_CONNECT_AT_FIRST", {"gloo": "cpu"}):
        fused, report = without_a_gpu(rank, size, True, [False, False, True, False])
    return fused, report, begun(_get_default_group()) - before


def test_what_is_captured_unfused_finds_its_backend_connected() -> None:
    for fused, report, collectives in run_ranks(connected, 2, fresh=True):
        assert fused == [True, True, False, True]
        assert report.questions.fused == 3
        references, unfused = 4 * 2, 2
        assert collectives == references + unfused + 1, "one at the first agreement"


def test_a_rank_that_captures_alone_stops_the_others_at_once() -> None:
    for rank, (fused, report) in enumerate(run_ranks(one_captures, 2)):
        assert fused == [True, False, True]
        (told,) = report.disagreements
        assert ("is being captured" if rank == 0 else "rank 0 runs this graph unfused") in told.reason
        assert report.questions.seconds < 0.5 * guard.VOTE_DEADLINE


def one_captures(rank: int, size: int) -> tuple[list[bool], Report]:
    return without_a_gpu(rank, size, True, [False, rank == 0, False])


def test_who_knows_better_gets_it_fused() -> None:
    for fused, report in run_ranks(without_a_gpu, 2, "capture", [False, True]):
        assert fused == [True, True]
        assert report.disagreements == ()


def partitioned(rank: int, size: int) -> tuple[str, Report]:
    """The code that Inductor writes for CUDA graphs, were the CPU's kernels such as it captures; and runs of it."""
    from torch._inductor import config as inductor_config
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.utils import run_and_get_code

    options: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": True}
    before = Scheduler.should_partition
    Scheduler.should_partition = lambda self, node: None
    try:
        with compiler(), torch.no_grad(), inductor_config.patch(options):
            fusion = FusionPass(fuse="always")
            fusion.clear()
            compiled = torch.compile(layer, options={**options, **fusion.options}, dynamic=False)
            _, (code,) = run_and_get_code(compiled, *layer_inputs(size))
            for _ in range(2):
                given = layer_inputs(size)
                want = layer(*(t.double() for t in given))
                check("result", compiled(*given), want, 3 * BOUND[torch.bfloat16])
            return code, fusion.report()
    finally:
        Scheduler.should_partition = before


def test_the_question_stands_outside_of_inductors_cuda_graphs() -> None:
    for code, report in run_ranks(partitioned, 2):
        captured, replays = code[code.index("def partition_0(") :].split("class Runner:")
        assert captured.count("torch.ops.weft.") >= 2
        assert "weft_guard" not in captured
        assert replays.index("if weft_turn is None:") < replays.index("self.partitions[0](")
        assert (report.fused, report.questions.count, report.questions.fused) == (2, 3, 3)


def replayed(rank: int, size: int, agree: bool | str) -> tuple[str, list[str]]:
    """A user's own CUDA graph of a compiled one, replayed with other inputs."""
    with compiler(), torch.no_grad(), plan.forced("fused"):
        fusion = FusionPass(fuse="always", agree=agree)
        fusion.clear()
        compiled = torch.compile(layer, options=fusion.options, dynamic=False)
        static = layer_inputs(size)
        for _ in range(3):
            compiled(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        plan.ran(Plan("none"))
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = compiled(*static)
        algorithm = last_plan().algorithm
        for _ in range(STEPS):
            given = layer_inputs(size)
            for mine, new in zip(static, given, strict=True):
                mine.copy_(new)
            graph.replay()
            check("result", out, layer(*(t.double() for t in given)), 3 * BOUND[torch.bfloat16])
        torch.cuda.synchronize()
        told = [d.reason for d in fusion.report().disagreements]
        del graph
        return algorithm, told


@pytest.mark.gpu
# Unfused collectives are captured, too, which shared GPUs' are not.
@pytest.mark.parametrize("agree", [pytest.param(True, marks=pytest.mark.gpu(own=True)), "capture"])
def test_a_graph_that_the_user_captures(agree: bool | str) -> None:
    for algorithm, told in run_ranks(replayed, 2, agree, device="cuda"):
        if agree is True:
            assert algorithm == "none"
            assert [t.startswith("a CUDA graph is being captured") for t in told] == [True]
        else:
            assert algorithm in ("push", "one_shot"), algorithm
            assert told == []


def reduced_overhead(rank: int, size: int, partition: bool) -> tuple[int, int, int, str]:
    from torch._inductor import config as inductor_config

    options: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": partition}
    with compiler(), torch.no_grad(), plan.forced("fused"), inductor_config.patch(options):
        fusion = FusionPass(fuse="always")
        fusion.clear()
        compiled = torch.compile(layer, options={**options, **fusion.options}, dynamic=False)
        for _ in range(STEPS):
            given: list[Tensor] = layer_inputs(size)
            want = layer(*(t.double() for t in given))
            torch.compiler.cudagraph_mark_step_begin()
            check("result", compiled(*given), want, 3 * BOUND[torch.bfloat16])
        report = fusion.report()
        return report.fused, report.questions.count, report.questions.fused, report.details()


@pytest.mark.gpu
@pytest.mark.parametrize("partition", [True, False], ids=["partitions", "whole"])
def test_the_cuda_graphs_of_inductor(partition: bool) -> None:
    for fused, asked, agreed, report in run_ranks(reduced_overhead, 2, partition, device="cuda"):
        if partition:
            assert (fused, asked, agreed) == (2, STEPS, STEPS), report
        else:
            assert (fused, agreed) == (0, 0)
            assert "the graph is captured whole" in report
