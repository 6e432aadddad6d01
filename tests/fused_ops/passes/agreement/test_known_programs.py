"""Random programs over the ranks' agreement: what runs fused on one rank runs fused on all, or a rank is named."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_board import Group, at_once, stores
from weft.fused_ops.passes.agreement.votes import vote_rows
from weft.fused_ops.passes.agreement.votes.board import VoteBoard
from weft.fused_ops.passes.agreement.votes.vote_rows import LEFT, Vote

__all__ = ["stores"]  # the fixture

Part = tuple[int, str]  # collectives, and how they are run: "graph" (which may fuse), "eager", "plain graph"
SOON, NEVER = 3, 1 << 20  # graphs on which ranks agree until they run those that they know without asking


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_rows, "FARTHEST", 6)


class Named(Exception):
    """A rank has left."""


@dataclass
class Stream:
    """What a rank has queued, as on a GPU: it runs after the host, and an op waits for those of the other ranks.

    Without a host that waits for it: whatever meets something else than on another rank is found in the end."""

    queued: list[tuple[int, bool, int]] = field(default_factory=list)

    def run(self, place: int, fused: bool, length: int) -> None:
        self.queued.append((place, fused, length))


@dataclass
class Meeting(Stream):
    """Where the hosts of all ranks meet in each collective: all of them plainly, or all of them fused."""

    size: int = 0
    came: dict[int, list[tuple[bool, int]]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, place: int, fused: bool, length: int) -> None:
        with self.changed:
            here = self.came.setdefault(place, [])
            here.append((fused, length))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(here) == self.size, 20), f"place {place}: {here}"
            assert len(set(here)) == 1, f"place {place}: {here}"


class Slow:
    """The board's words, between whose reads and writes other ranks come to theirs."""

    def __init__(self, words: memoryview, noise: random.Random) -> None:
        self._words, self._noise = words, noise

    def _pause(self) -> None:
        if self._noise.random() < 0.02:
            time.sleep(self._noise.choice([0, 1e-5, 1e-4]))

    def __getitem__(self, at: int | slice) -> Any:
        self._pause()
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._pause()
        self._words[at] = value


def rank_main(group: Group, stream: Stream, program: list[Part], seed: int, patience: float) -> int:
    """Runs a program, whose parts need not be those of the other ranks; gives the number of graphs that ran fused."""
    noise = random.Random(seed)
    where: VoteBoard | None = None  # made with the first graph
    place = begun = fused = 0
    for count, how in program:
        time.sleep(noise.choice([0, 0, 0, 1e-4, 1e-3, 5e-3]))
        runs_fused = False
        if how != "eager":
            where = where or VoteBoard(group)  # type: ignore[arg-type]
            if isinstance(words := where._file.words, memoryview):
                where._file.words = Slow(words, noise)  # type: ignore[assignment]
            fuses = how == "graph"
            signature = (100 if fuses else 200) + count
            runs_fused = fuses and where.known.run(signature, count, begun)
            if not runs_fused:
                answer = where.ask(Vote(begun, count, signature, fuses), patience)
                if answer.why == LEFT:
                    raise Named
                runs_fused = answer.fused
                if runs_fused:
                    where.known.learn(signature)
        if runs_fused:
            stream.run(place, True, count)
            fused += 1
        else:
            for i in range(count):
                begun += 1
                stream.run(place + i, False, 1)
        place += count
    # As the first graph of what comes next would find it.
    if where is not None and where.ask(Vote(begun, 1, 5, False), 10.0).why == LEFT:
        raise Named
    return fused


@st.composite
def programs(draw: st.DrawFn) -> list[list[Part]]:
    """For each rank the same number of collectives: a sequence again and again, which all or one leave at times."""
    size = draw(st.integers(2, 3))
    sequence: list[Part] = [(draw(st.integers(1, 3)), "graph") for _ in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        sequence.insert(draw(st.integers(0, len(sequence))), (draw(st.integers(1, 3)), "plain graph"))
    if draw(st.booleans()):
        sequence.append((1, "eager"))
    result: list[list[Part]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(4, 14))):
        odd = draw(st.sampled_from(["", "", "", "", "all", "one"]))
        changed = _changed(draw, sequence)
        rank = draw(st.integers(0, size - 1))
        for r in range(size):
            result[r] += changed if odd == "all" or (odd == "one" and r == rank) else sequence
    return result


def _changed(draw: st.DrawFn, sequence: list[Part]) -> list[Part]:
    """The same collectives in other graphs, or in none."""
    parts: list[Part] = []
    for count, how in sequence:
        cut = draw(st.integers(1, count))
        for n in (cut, count - cut):
            if n:
                parts.append((n, draw(st.sampled_from([how, how, "graph", "eager", "plain graph"]))))
    return parts


@pytest.mark.parametrize("trusted", [SOON, NEVER], ids=["known", "asked"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(), st.integers(0, 1 << 20))
def test_fused_never_meets_plain_unless_a_rank_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch, trusted: int, parts: list[list[Part]], seed: int
) -> None:
    """Where all ask before each graph nobody is named, and ranks that wait in each other's collectives come out."""
    monkeypatch.setattr(vote_rows, "TRUSTED", trusted)
    store, size = dist.HashStore(), len(parts)
    meeting = Meeting(size=size)
    streams = [Stream() if trusted == SOON else meeting for _ in parts]
    named: list[int] = []
    lock = threading.Lock()

    def run(rank: int) -> int | None:
        try:
            patience = 0.3 if trusted == SOON else 0.05
            return rank_main(Group(rank, size, store), streams[rank], parts[rank], seed + rank, patience)
        except Named:
            with lock:
                named.append(rank)
            return -1

    fused = at_once(*(lambda r=r: run(r) for r in range(size)))  # type: ignore[misc]
    assert None not in fused, "a rank failed"
    if trusted == NEVER:
        assert not named and len(set(fused)) == 1
    elif not named:
        for place in range(max(len(s.queued) for s in streams)):
            assert len({tuple(s.queued[place : place + 1]) for s in streams}) == 1, streams
