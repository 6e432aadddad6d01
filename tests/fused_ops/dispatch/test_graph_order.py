"""Replays of graphs beside eager calls, without a GPU: what is launched when is known, and what comes after what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import Gpu
from weft.fused_ops.dispatch import plan, stream_order
from weft.fused_ops.dispatch.call_lines import GraphLine
from weft.symm_mem import call_cache
from weft.symm_mem.backends import cuda_state

GPU = torch.device("cuda", 0)
Op = Callable[[dict[int, set[str]], str], None]


class Event:
    """For streams and for graphs. In a capture what it does is noted, and done at each replay."""

    def __init__(self, gpu: Timeline) -> None:
        self.gpu, self.behind, self.captured = gpu, set[str](), set[str]()

    def record(self, stream: Any) -> None:
        handle = getattr(stream, "handle", stream)
        if handle not in self.gpu.graphs:
            self.behind = set(self.gpu.tails[handle])
            return
        self.gpu.program.append(lambda tails, _: setattr(self, "captured", set(tails[handle])))

    def wait(self, stream: Any) -> None:
        handle = getattr(stream, "handle", stream)
        if handle not in self.gpu.graphs:
            self.gpu.tails[handle] |= self.behind
            return
        self.gpu.program.append(lambda tails, _: tails[handle].update(self.captured))

    def wait_in_graph(self, stream: int) -> None:
        self.gpu.waits += 1
        self.gpu.program.append(lambda tails, _: tails[stream].update(self.behind))

    def record_in_graph(self, stream: int, node: set[str] | None = None) -> set[str]:
        made: set[str] = set() if node is None else node
        if node is None:
            self.gpu.nodes.append((self, made))
        self.gpu.program.append(lambda tails, _: made.update(tails[stream]))
        return made


class Timeline(Gpu):
    """``tails``: by stream, what has ended when its next work begins. ``early``: calls that began before the last one
    that was launched before them had ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tails = {stream: set[str]() for stream in range(6)}
        self.program: list[Op] = []
        self.nodes: list[tuple[Event, set[str]]] = []  # that record an event
        self.waits = 0  # nodes that wait for one
        self.last: str | None = None
        self.early: list[str] = []
        self.count = 0

    def stream(self, stream: int, device: int) -> Any:
        return SimpleNamespace(handle=stream)

    def event(self) -> Any:
        return Event(self)

    def graph_event(self) -> Any:
        return Event(self)

    def launch(self, what: Any) -> None:
        stream = self.now
        if stream in self.graphs:
            self.program.append(lambda tails, replay: self.begins(tails, stream, f"{what} of {replay}"))
        else:
            self.begins(self.tails, stream, what)

    def begins(self, tails: dict[int, set[str]], stream: int, what: str) -> None:
        if self.last is not None and self.last not in tails[stream]:
            self.early.append(f"{what} before {self.last}")
        tails[stream].add(what)
        self.last = what

    def call(self, stream: int) -> None:
        self.now, self.count = stream, self.count + 1
        with stream_order.in_stream_order(GPU):
            self.launch(f"call {self.count}")

    def capture(self, streams: list[int]) -> Callable[[int], None]:
        """Returns what replays calls on these streams, on a stream."""
        self.count += 1
        self.graphs = dict.fromkeys((4, 5), ("ACTIVE", self.count))
        self.program, self.nodes = [], []
        for stream in streams:
            self.call(stream)
        self.graphs = {}
        program, nodes = self.program, self.nodes

        def replay(on: int) -> None:
            self.count += 1
            tails = {stream: set(self.tails[on]) for stream in (4, 5)}
            for _, made in nodes:
                made.clear()
            for op in program:
                op(tails, f"replay {self.count}")
            for event, made in nodes:
                event.behind = set(made)
            self.tails[on] |= tails[4] | tails[5]

        return replay


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    gpu = Timeline()
    monkeypatch.setattr(cuda_state, "state", gpu)
    call_cache.invalidate_calls()
    plan.num_sms.cache_clear()
    yield gpu
    plan.num_sms.cache_clear()


def at_random(gpu: Timeline, seed: int) -> None:
    """Calls, captures and replays on four streams. Capturing waits for all work, as torch.cuda.graph does."""
    draw = random.Random(seed)
    replays: list[Callable[[int], None]] = []
    for _ in range(40):
        what = draw.random()
        if what < 0.1 or (what > 0.6 and not replays):
            everything = set().union(*gpu.tails.values())
            gpu.tails = {stream: set(everything) for stream in gpu.tails}
            replays.append(gpu.capture([draw.choice((4, 5)) for _ in range(draw.randint(1, 4))]))
        elif what > 0.6:
            draw.choice(replays)(draw.randrange(4))
        else:
            gpu.call(draw.randrange(4))


@pytest.mark.parametrize("seed", range(60))
def test_each_call_begins_when_the_one_launched_before_it_has_ended(gpu: Timeline, seed: int) -> None:
    at_random(gpu, seed)
    assert not gpu.early


@pytest.mark.parametrize("step", ["wait", "end", "enter_graph", "end_in_graph"])
def test_no_step_can_be_left_out(gpu: Timeline, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real = GraphLine.wait

    def no_wait(line: GraphLine, stream: int) -> bool:
        before = {on: set(tail) for on, tail in gpu.tails.items()}
        first = real(line, stream)
        gpu.tails.update(before)
        return first

    monkeypatch.setattr(GraphLine, step, no_wait if step == "wait" else lambda line, stream: None)
    for seed in range(20):
        at_random(gpu, seed)
    assert gpu.early


def test_a_graph_holds_one_node_that_waits_and_one_that_records(gpu: Timeline) -> None:
    gpu.capture([4, 4, 5, 4])
    assert gpu.waits == len(gpu.nodes) == 1
