"""A graph of the pass that outlives its group: another number of ranks is refused, as many begin anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graphs import AG, AR, RS, captured, fake_ranks
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.agreement import guard
from weft.fused_ops.passes.agreement.outcomes import RunOutcomes

RANKS, FEWER = 3, 2
ASKED = r"^graph \w{16}: was made for 3 ranks, group '0' has 2: "
CALLED = r"^group_size: is 3, must be 2, the number of ranks of group '0': "


# By its name: of a ProcessGroup Dynamo sees that it is another one, and makes a graph anew.
GROUP = "0"


class Reduced(torch.autograd.Function):
    """Both ways an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", GROUP)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.all_reduce(grad, "sum", GROUP)


def gather(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, GROUP)


def scatter(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, GROUP)


def sequence(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(gather(x) @ a @ b)


def reduced(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return Reduced.apply(x @ a) @ b


def biased(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter(torch.addmm(b.view(-1)[: a.shape[1]], x, a))


def left_alone(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return funcol.all_reduce(x, "product", GROUP)


SHAPES = (6, 8), (8, 6), (6, 4)


def weft_ops(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if getattr(n.target, "namespace", "") == "weft"]


@pytest.mark.parametrize("fn", [sequence, reduced, biased])
def test_what_is_put_in_says_for_how_many_ranks(fn: Callable[..., Tensor]) -> None:
    """In the forward and the backward graph."""
    with fake_ranks(RANKS):
        inputs = [torch.randn(s, requires_grad=True) for s in SHAPES]
        found = captured(fn, *inputs, fusion=FusionPass(agree=False, fuse="always"))
        assert len(found) == 2
        for seen in found:
            assert weft_ops(seen.after), seen.after
            assert [n.kwargs["group_size"] for n in weft_ops(seen.after)] == [RANKS] * len(
                weft_ops(seen.after)
            )
        names = {n.target._schema.name for seen in found for n in weft_ops(seen.after)}
        assert names <= {AG, RS, AR, "weft::fused_matmul_all_reduce"}


def restarted(rank: int, size: int, folder: str) -> None:
    torch._dynamo.reset()
    runs: list[tuple[str, Any, list[Tensor], Tensor]] = []
    with inductor_config.patch(fx_graph_cache=False):
        for agree, words in ((True, ASKED), (False, CALLED)):
            for fn in (sequence, reduced):
                fusion = FusionPass(agree=agree, fuse="always")
                inputs = [torch.randn(s, requires_grad=True) for s in SHAPES]
                compiled = torch.compile(fn, options=fusion.options, fullgraph=True)
                compiled(*inputs).sum().backward()
                assert fusion.report().fused == 2 * (1 + (fn is sequence)), fusion.report()
                runs.append((words, compiled, inputs, compiled(*inputs)))
        fusion = FusionPass()
        alone = torch.compile(left_alone, options=fusion.options, fullgraph=True)
        x = torch.full(SHAPES[0], 1.0 + rank)
        assert torch.equal(alone(x, x, x), torch.full_like(x, math.factorial(size)))
        assert (fusion.report().fused, fusion.report().left) == (0, 1)
    dist.destroy_process_group()
    if rank >= FEWER:
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=FEWER)
    for words, compiled, inputs, y in runs:
        with pytest.raises(ValueError, match=words):
            compiled(*inputs)
        with pytest.raises(ValueError, match=words):
            y.backward(torch.ones_like(y))
    # What the pass has left alone is c10d's, as without it.
    assert torch.equal(alone(x, x, x), torch.full_like(x, math.factorial(FEWER)))
    torch._dynamo.reset()
    inputs = [torch.randn(s) for s in SHAPES]
    torch.compile(sequence, options=FusionPass().options, fullgraph=True)(*inputs)


def test_a_restart_with_fewer_ranks(tmp_path: Path) -> None:
    run_ranks(restarted, RANKS, str(tmp_path), fresh=True)


def late_before(rank: int, size: int, folder: str) -> None:
    """Rank 0 waits once in vain. Of the new group's ranks that says nothing."""
    torch._dynamo.reset()
    counted = RunOutcomes()
    patience, guard.VOTE_DEADLINE = guard.VOTE_DEADLINE, 30.0
    with inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(sequence, options=FusionPass(fuse="always").options, fullgraph=True)
        inputs = [torch.randn(s) for s in SHAPES]
        compiled(*inputs)
    if rank == 0:
        guard.VOTE_DEADLINE = 0.1
    (compiled if rank == 0 else sequence)(*inputs)
    assert counted.questions().fused == 1
    assert len(counted.disagreements()) == (rank == 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    guard.VOTE_DEADLINE = 30.0
    counted.reset()
    compiled(*inputs)
    guard.VOTE_DEADLINE = patience
    assert counted.questions().fused == 1, counted.disagreements()


def test_who_was_late_before_a_restart_is_waited_for(tmp_path: Path) -> None:
    run_ranks(late_before, 2, str(tmp_path), fresh=True)
