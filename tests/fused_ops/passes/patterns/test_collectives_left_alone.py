"""Collectives that are never fused, and why. The graph must not change at all."""

from __future__ import annotations

import torch
from graphs import applied, c10d, fake_ranks, traced
from left import GROUP, W8, X2, ag, check_left, two_ranks
from torch import Tensor
from torch._inductor import config as inductor_config
from weft.fused_ops.passes import FusionPass

__all__ = ["two_ranks"]


def test_another_all_reduce_of_something_else() -> None:
    def fn(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x.sin(), "product", GROUP[0]))

    check_left(fn, "it reduces by 'product'", X2)


def test_coalesced() -> None:
    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        gathered = c10d.all_gather_into_tensor_coalesced([x, x], 2, GROUP[0])
        return [c10d.wait_tensor(gathered[0]) @ w]

    check_left(fn, "of which number 1: nobody waits for it", X2, W8)


def test_nobody_waits() -> None:
    check_left(lambda x, w: c10d.all_gather_into_tensor(x @ w, 2, GROUP[0]), "nobody waits", X2, W8)


def test_into_given_memory() -> None:
    def fn(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, 2, GROUP[0], out=out)) @ w

    check_left(fn, "it writes into out_1 (placeholder), which others may use", X2, W8, torch.randn(12, 8))


def test_used_without_waiting() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        pending = c10d.all_gather_into_tensor(x, 2, GROUP[0])
        return c10d.wait_tensor(pending) @ w, pending + 1

    check_left(fn, "used without waiting, by add", X2, W8)


def test_for_another_number_of_ranks() -> None:
    check_left(lambda x, w: ag(x, 4) @ w, "for 4 ranks, the group has 2", X2, W8)


def test_an_unknown_group() -> None:
    graph = traced(lambda x, w: ag(x) @ w, X2, W8)
    (node,) = [n for n in graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    node.args = (*node.args[:2], "nobody")
    assert "no process group is named 'nobody'" in applied(graph).reasons


def test_a_group_that_the_pass_is_not_for() -> None:
    check_left(
        lambda x, w: ag(x) @ w, "none of those this pass is for", X2, W8, fusion=FusionPass(groups=["other"])
    )


def test_a_group_of_one_rank() -> None:
    torch.distributed.destroy_process_group()
    with fake_ranks(1) as group:
        GROUP[:] = [group]
        check_left(lambda x, w: ag(x, 1) @ w, "has one rank", X2, W8)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())


def test_where_inductor_may_reorder_collectives() -> None:
    with inductor_config.patch(
        reorder_for_compute_comm_overlap=True,
        reorder_for_compute_comm_overlap_passes=["sink_waits_iterative"],
    ):
        check_left(lambda x, w: ag(x) @ w, "sink_waits_iterative_unsafe_collectives_reorder is True", X2, W8)
    with inductor_config.patch({"aten_distributed_optimizations.enable_overlap_scheduling": True}):
        check_left(lambda x, w: ag(x) @ w, "enable_overlap_scheduling is True", X2, W8)
