"""Which collectives count where ranks compare how far they are, and ranks that have counted otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from opcommon import world
from ranks import on_ranks
from test_ranks_that_differ import check, compiler, layer
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement.votes.board import vote_board


@on_ranks(2)
def test_what_a_fused_graph_leaves_to_the_backend_does_not_count(rank: int, size: int) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return all_reduce(x @ w, "sum", world()), all_reduce(x, "product", world())

    x, w = torch.randn(3, 8), torch.randn(8, 5)
    with compiler(), torch.no_grad():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(fn, options=fusion.options)
        counted = [vote_board(world()).begun()]
        for _ in range(3):
            for got, want in zip(mine(x, w), fn(x.double(), w.double()), strict=True):
                assert (got.double() - want).norm() <= 1e-6 * want.norm()
            counted.append(vote_board(world()).begun() - counted[0])
        report = fusion.report()
    assert (report.fused, report.left, report.questions.fused) == (1, 1, 3)
    assert counted[1:] == [2, 4, 6]  # those of fn itself


@pytest.mark.gpu(2)
@on_ranks(2, device="cuda")
def test_what_one_rank_alone_has_captured(rank: int, size: int) -> None:
    """A CUDA graph's collectives are counted where they are captured, however often it is replayed."""
    x = torch.ones(4)
    dist.all_reduce(x, group=world())
    torch.cuda.synchronize()
    if rank == 1:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _ in range(3):
                dist.all_reduce(x, group=world())
    with compiler():
        fusion = FusionPass(fuse="always")
        mine = torch.compile(layer, options=fusion.options)
        for _ in range(3):
            check(mine)
        questions = fusion.report().questions
    assert (questions.count, questions.fused) == (6, 6)
    assert questions.seconds < 20
