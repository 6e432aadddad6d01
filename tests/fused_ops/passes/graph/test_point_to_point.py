"""Sends and receives beside a collective that is fused: each rank has other peers, and the ranks run the same graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import c10d
from ranks import run_ranks
from test_agree import W, X, asked, group, program
from test_ranks_that_differ import compiler, gather, world
from torch import Tensor
from weft.fused_ops import last_plan
from weft.fused_ops.passes.agreement.guard import GraphGuard
from weft.fused_ops.passes.records.report import VoteCounts

__all__ = ["group"]  # the fixture
needs_sends = pytest.mark.skipif(
    not hasattr(c10d, "isend"), reason="this version of torch has no functional sends and receives"
)


def sent(dst: int, kinds: tuple[str, ...] = ("isend",), group: str = "0") -> GraphGuard:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = program(x, w)
        if len(kinds) == 1:
            return c10d.wait_tensor(getattr(c10d, kinds[0])(y, dst, 0, group))
        peers, tags = [dst] * len(kinds), [0] * len(kinds)
        return c10d.batch_p2p_ops(list(kinds), peers, tags, [y.clone() for _ in kinds], group)[-1]

    return asked(fn, X, W)


@needs_sends
def test_the_peer_does_not_count_and_what_is_called_does() -> None:
    batch = ("isend", "irecv")
    assert sent(0).name == sent(1).name != sent(0, ("irecv",)).name
    assert sent(0, batch).name == sent(1, batch).name != sent(0, batch[::-1]).name
    # The backend counts each of them, as gloo does.
    assert [g.count for g in (*sent(0)._groups, *sent(0, batch)._groups)] == [2, 3]


def test_what_goes_through_another_group_is_its_own_affair() -> None:
    others = dist.new_group([0, 1]).group_name

    def also(src: int, name: str, more: bool = False) -> str:
        def fn(x: Tensor, w: Tensor) -> list[Tensor]:
            extra = c10d.wait_tensor(c10d.broadcast(x, src, name))
            return [program(x, w), c10d.wait_tensor(c10d.broadcast(extra, src, name)) if more else extra]

        return asked(fn, X, W).name

    assert also(0, others) == also(1, others) != also(0, others, True)
    assert also(0, "0") != also(1, "0")


def rows(x: Tensor, w: Tensor, got: Tensor, peer: int) -> tuple[Tensor, Tensor]:
    y = gather(x, world()) @ w
    sent = c10d.isend(x.sin(), peer, 0, world().group_name)
    got = c10d.wait_tensor(c10d.irecv(got, peer, 0, world().group_name))
    c10d.wait_tensor(sent)
    return y, got + 1


def exchanging(rank: int, size: int) -> tuple[list[str], VoteCounts, list[Any]]:
    from weft.fused_ops.passes import FusionPass

    used = []
    with compiler(), torch.no_grad(), torch._dynamo.config.patch(enable_p2p_compilation=True):
        fusion = FusionPass(fuse="always")
        mine = torch.compile(rows, options=fusion.options)
        for _ in range(2):
            x, w = torch.randn(3, 8), torch.randn(8, 5)
            got, want = (fn(x, w, torch.zeros(3, 8), 1 - rank) for fn in (mine, rows))
            used.append(last_plan().algorithm)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        report = fusion.report()
        return used, report.questions, [*report.entries, *report.disagreements]


@needs_sends
def test_ranks_that_send_to_each_other_run_fused() -> None:
    for used, questions, why in run_ranks(exchanging, 2):
        assert used == ["host"] * 2, why
        assert questions.fused == questions.count == 2, why
