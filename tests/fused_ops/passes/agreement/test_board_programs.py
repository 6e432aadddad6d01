"""Random programs over the ranks' agreement: what runs fused on one rank runs fused on all."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_board import Group, at_once, stores
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.vote import Vote

__all__ = ["stores"]  # the fixture


@dataclass
class Meeting:
    """Where the ranks of a simulated program run a collective: all of them plainly, or all of them fused."""

    size: int
    came: dict[int, list[tuple[bool, int]]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, place: int, fused: bool, length: int) -> None:
        with self.changed:
            here = self.came.setdefault(place, [])
            here.append((fused, length))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(here) == self.size, 20), f"place {place}: {here}"
            assert len(set(here)) == 1, f"place {place}: {here}"


Part = tuple[int, str]  # collectives, and how they are run: "graph" (which may fuse), "eager", "plain graph"


def rank_main(group: Group, meeting: Meeting, program: list[Part], seed: int) -> int:
    """Runs a program, whose parts need not be those of the other ranks; gives the number of graphs that ran fused."""
    noise = random.Random(seed)
    where: VoteBoard | None = None  # made with the first graph
    place = begun = fused = 0
    for count, how in program:
        time.sleep(noise.choice([0, 0, 1e-4, 1e-3]))
        runs_fused = False
        if how != "eager":
            where = where or VoteBoard(group)  # type: ignore[arg-type]
            asked = Vote(where.turns, begun, count, 100 + count, how == "graph")
            runs_fused = where.ask(asked, lambda: 0.15).fused
        if runs_fused:
            meeting.run(place, True, count)
            fused += 1
        else:
            for i in range(count):
                begun += 1
                meeting.run(place + i, False, 1)
        place += count
    return fused


@st.composite
def programs(draw: st.DrawFn) -> list[list[Part]]:
    """For each rank the same number of collectives, cut into parts: often alike, sometimes not."""
    size = draw(st.integers(2, 3))
    result: list[list[Part]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 8))):
        total = draw(st.integers(1, 4))
        alike = draw(st.integers(0, 2)) > 0
        cut = _cut(draw, total)
        for parts in result:
            parts.extend(cut if alike else _cut(draw, total))
    return result


def _cut(draw: st.DrawFn, total: int) -> list[Part]:
    parts: list[Part] = []
    while total:
        count = draw(st.integers(1, total))
        parts.append(
            (count, draw(st.sampled_from(["graph", "graph", "graph", "graph", "plain graph", "eager"])))
        )
        total -= count
    return parts


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 1 << 20))
def test_fused_never_meets_plain(parts: list[list[Part]], seed: int) -> None:
    store, meeting = dist.HashStore(), Meeting(len(parts))
    fused = at_once(
        *(
            lambda r=r: rank_main(Group(r, len(parts), store), meeting, parts[r], seed + r)  # type: ignore[misc]
            for r in range(len(parts))
        )
    )
    assert None not in fused, "a rank failed"
    assert len(set(fused)) == 1
