"""Where Inductor does not write the question's code: nothing is fused, and ranks that wait for an answer get one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiler import whole_inductor
from graphs import by_inductors_passes
from ranks import run_ranks
from test_ranks_that_differ import compiler, gather, world
from torch import Tensor
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass, Report
from weft.fused_ops.passes.agreement import guard
from weft.symm_mem import WeftError


def program(x: Tensor, w: Tensor) -> Tensor:
    return gather(x, world()) @ w


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = gather(x, world())
    torch._dynamo.graph_break()
    return y @ w


def differing(rank: int, size: int, options: list[dict[str, Any]], break_one: bool) -> tuple[Report, float]:
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    with compiler(), torch.no_grad():
        fusion = FusionPass(fuse="always")
        fn = broken if break_one and rank == 0 else program
        mine = torch.compile(fn, options={**fusion.options, **options[rank]})
        dist.barrier()
        begin = time.monotonic()
        for _ in range(2):
            torch.testing.assert_close(mine(x, w), program(x, w), rtol=1e-4, atol=1e-4)
        return fusion.report(), time.monotonic() - begin


LITE = {"fallback_by_default": True, "reorder_for_peak_memory": False}


def test_lite_mode_fuses_nothing_and_tells_the_other_ranks() -> None:
    (one, _), (other, _) = run_ranks(differing, 2, [LITE, LITE], True)
    assert one.fused == other.fused == 0
    assert all("with fallback_by_default (lite mode) Inductor runs" in e.reason for e in other.entries)
    assert one.questions.count == other.questions.count == 2
    (lite, _), (fused, seconds) = run_ranks(differing, 2, [LITE, {}], False)
    assert lite.entries[0].fused_into is None and fused.entries[0].fused_into is not None
    assert (lite.fused, fused.fused) == (0, 0)  # what could be fused ran unfused
    assert (fused.questions.count, fused.questions.fused) == (2, 0)
    assert all(d.peer == 0 and "left alone there" in d.reason for d in fused.disagreements), fused
    assert seconds < 25  # rank 0 is not waited for


@pytest.mark.parametrize("kind", ["all_gathers", "reduce_scatters", "all_reduces"])
def test_graphs_in_which_inductor_makes_buckets_are_left_alone(kind: str) -> None:
    """One that was kept as it was has none, and would meet the other rank's buckets."""
    buckets = {f"bucket_{kind}_fx": "all"}
    (one, _), (other, _) = run_ranks(differing, 2, [buckets, buckets], True)
    assert one.fused == other.fused == 0
    assert f"torch._inductor.config.bucket_{kind}_fx is 'all'" in other.entries[0].reason
    # Who votes nevertheless is told so, and runs unfused.
    (left, _), (fused, seconds) = run_ranks(differing, 2, [buckets, {}], False)
    assert (left.fused, fused.questions.fused) == (0, 0)
    assert seconds < 25


def interpreted(rank: int, size: int) -> str:
    """A backend that runs what the pass has left, node by node."""
    from torch._functorch.aot_autograd import make_boxed_func

    fusion = FusionPass()
    with compiler(), inductor_config.patch(fusion.options), torch.no_grad():
        mine = torch.compile(program, backend=by_inductors_passes(lambda gm: make_boxed_func(gm.forward)))
        with pytest.raises(
            WeftError, match="the ranks are not asked whether they run the same graph"
        ) as error:
            mine(torch.randn(3, 8), torch.randn(8, 5))
        return str(error.value)


def test_a_fused_graph_that_is_interpreted_is_refused_by_name() -> None:
    for text in run_ranks(interpreted, 2):
        assert text.startswith("weft::agree: a graph in which collectives were fused is run without")


WRAPPERS = [pytest.param({"cpp_wrapper": True}, marks=pytest.mark.slow), {"fx_wrapper": True}]


def reduced(rank: int, size: int, options: list[dict[str, Any]]) -> Report:
    """Without what Inductor would write a loop for: the FX wrapper takes Triton's kernels only."""
    from torch.distributed._functional_collectives import all_reduce

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(x @ w, "sum", world())

    x, w = torch.randn(3, 8), torch.randn(8, 5)
    with compiler(), whole_inductor(), torch.no_grad():
        fusion = FusionPass(fuse="always")
        guard.VOTE_DEADLINE = 150.0  # C++ takes long to compile
        mine = torch.compile(fn, options={**fusion.options, **options[rank]})
        for _ in range(3):
            torch.testing.assert_close(mine(x, w), fn(x, w), rtol=1e-4, atol=1e-4)
        return fusion.report()


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=["cpp", "fx"])
def test_code_that_is_not_python_on_one_rank_tells_the_others(wrapper: dict[str, Any]) -> None:
    other, fused = run_ranks(reduced, 2, [wrapper, {}])
    assert other.entries[0].fused_into is None and fused.entries[0].fused_into is not None
    assert (other.fused, fused.fused) == (0, 0)  # what could be fused ran unfused
    assert (other.questions.count, fused.questions.count, fused.questions.fused) == (3, 3, 0)
    assert {(d.peer, d.runs) for d in fused.disagreements} == {(0, 3)}  # it was waited for in none
