"""CUDA graphs count their collectives where they are replayed, so that ranks which capture otherwise agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opcommon import BOUND, check
from ranks import run_ranks
from test_pass_on_gpus import layer, layer_inputs, sizes
from test_ranks_that_differ import compiler
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from weft.fused_ops.dispatch import plan
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement.votes.begun import begun, count_replays


class Captured:
    """As torch.cuda.CUDAGraph, but that what is captured runs there, too."""

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self, pool: object = None) -> None:
        assert pool is None or isinstance(pool, str)

    def capture_end(self) -> None:
        if self.replays < 0:
            raise RuntimeError("capturing failed")

    def replay(self) -> None:
        self.replays += 1


def counts(rank: int, size: int) -> None:
    class Graph(Captured):
        pass

    def capture(graph: Captured, run: Callable[[], object]) -> None:
        graph.capture_begin(pool="a pool")
        run()
        graph.capture_end()

    world, other = dist.group.WORLD, dist.new_group()
    assert world is not None
    x = torch.ones(3)
    uncounted, graph = Graph(), Graph()
    capture(uncounted, lambda: dist.all_reduce(x))  # before anything counts
    count_replays(Graph)
    first = begun(world), begun(other)
    capture(graph, lambda: [dist.all_reduce(x), dist.all_reduce(x, group=other), dist.all_reduce(x)])
    assert (begun(world), begun(other)) == first
    for _ in range(3):
        graph.replay()
        uncounted.replay()
    assert (begun(world), begun(other)) == (first[0] + 6, first[1] + 3)
    assert (graph.replays, uncounted.replays) == (3, 3)
    capture(graph, lambda: dist.all_reduce(x, group=other))  # once more: it holds something else
    graph.replay()
    assert (begun(world), begun(other)) == (first[0] + 6, first[1] + 4)
    voted = Graph()
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        voted.capture_begin()
        seen = [begun(world)]
        dist.all_reduce(x)
        seen.append(begun(world))
        dist.all_reduce(x, group=other)
        voted.capture_end()
    assert seen == [first[0] + 6, first[0] + 7] and begun(world) == first[0] + 7, "as votes have been told"
    assert begun(other) == first[1] + 4
    voted.replay()
    assert (begun(world), begun(other)) == (first[0] + 7, first[1] + 5)
    broken = Graph()
    broken.replays = -1
    with pytest.raises(RuntimeError, match="capturing failed"):
        capture(broken, lambda: dist.all_reduce(x))
    assert begun(world) == first[0] + 7
    dist.all_reduce(x)
    assert begun(world) == first[0] + 8
    dist.destroy_process_group(other)


def test_collectives_count_where_they_are_replayed() -> None:
    run_ranks(counts, 2, fresh=True)


def captured_apart(rank: int, size: int) -> tuple[list[bool], Report]:
    """NCCL's collectives in CUDA graphs: rank 1 captures them once more, and runs one eagerly where rank 0 replays."""
    with compiler(), torch.no_grad(), plan.forced("fused"):
        fusion = FusionPass(fuse="always")
        fusion.clear()
        compiled = torch.compile(layer, options=fusion.options, dynamic=False)
        x, graphs = torch.ones(64, device="cuda"), []
        dist.all_reduce(x)
        for _ in range(1 + rank):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
                dist.all_reduce(x)
        fused = []
        for step in range(6):
            if rank == 0 or step % 2:
                graphs[-1].replay()
            else:
                dist.all_reduce(x)
            given = layer_inputs(size)
            plan.ran(plan.Plan("none"))
            got = compiled(*given)
            fused.append(plan.last_plan().algorithm != "none")
            check("result", got, layer(*(t.double() for t in given)), 3 * BOUND[torch.bfloat16])
        assert x.tolist() == [2.0**7] * 64
        torch.cuda.synchronize()
        del graphs
        return fused, fusion.report()


@pytest.mark.gpu(own=True)  # shared GPUs' collectives are not captured
def test_ranks_that_capture_otherwise_agree() -> None:
    for fused, report in run_ranks(captured_apart, 2, device="cuda"):
        assert all(fused)
        assert report.disagreements == ()


def recorded_by_one(rank: int, size: int) -> Report:
    with (
        compiler(),
        torch.no_grad(),
        plan.forced("fused"),
        inductor_config.patch("triton.cudagraphs", rank == 1),
    ):
        fusion = FusionPass(fuse="always")
        fusion.clear()
        compiled = torch.compile(layer, options=fusion.options, dynamic=False)
        given = layer_inputs(size)
        check("result", compiled(*given), layer(*(t.double() for t in given)), 3 * BOUND[torch.bfloat16])
        return fusion.report()


def test_a_rank_that_records_alone_has_another_graph() -> None:
    for rank, report in enumerate(run_ranks(recorded_by_one, 2)):
        (told,) = report.disagreements
        assert told.reason.startswith(
            f"rank {1 - rank} runs another graph: collective 0 is all_gather_into_tensor"
        )
        there, here = told.reason.split(" there, ")
        assert ("in a CUDA graph" in there, "in a CUDA graph" in here) == (rank == 0, rank == 1)


class Layers(nn.Module):
    """Three graphs."""

    def __init__(self) -> None:
        super().__init__()
        _, dim, hidden = sizes()
        self.up = nn.Parameter(torch.randn(3, dim, hidden).div(dim**0.5).bfloat16())
        self.down = nn.Parameter(torch.randn(3, hidden, dim).div(hidden**0.5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = layer(x, self.up[i], self.down[i])
            torch._dynamo.graph_break()
        return x


def recorded_apart(rank: int, size: int) -> tuple[list[str], Report]:
    """Rank 1 runs and records graphs while rank 0 replays them."""
    options: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": True}
    with compiler(), torch.no_grad(), plan.forced("fused"), inductor_config.patch(options):
        torch.manual_seed(3)
        fusion = FusionPass(fuse="always")
        fusion.clear()
        model = Layers()
        compiled = torch.compile(model, options={**options, **fusion.options}, dynamic=False)
        algorithms = []
        for step in range(9):
            if step == 4 and rank == 1:
                torch.compiler.reset()  # it runs once more, then records, then replays
            x = torch.randn(sizes()[0] // size, sizes()[1]).bfloat16()
            want = x.double()
            for up, down in zip(model.up.double(), model.down.double(), strict=True):
                want = layer(want, up, down)
            plan.ran(plan.Plan("none"))
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
            algorithms.append(plan.last_plan().algorithm)
            check("result", got, want, 9 * BOUND[torch.bfloat16])
        torch.cuda.synchronize()
        return algorithms, fusion.report()


@pytest.mark.gpu
def test_ranks_that_record_otherwise_meet_in_the_same_workspaces() -> None:
    found = run_ranks(recorded_apart, 2, device="cuda")
    for rank, (algorithms, report) in enumerate(found):
        ran = [algorithm != "none" for algorithm in algorithms]  # a replay makes no call
        assert ran == [True, True, False, False, rank == 1, rank == 1, False, False, False]
        assert report.disagreements == ()
        assert report.questions.fused == report.questions.count
