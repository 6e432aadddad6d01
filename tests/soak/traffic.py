"""What each rank of the soak does: lanes of random calls, checked one by one, with delays.

A lane is a sequence of calls that is the same on every rank, in groups of its own: a thread on CPU ranks, which runs at
the same time as the others. On CUDA one thread deals its calls to two streams, which share the groups, and replays
captured graphs between them.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from calls import OPS, Call, Pool, differs, draw, expected, operands, run
from torch import Tensor
from usage import Usage
from weft import symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap

ROUND = 1000  #: calls between two meetings of all ranks
LATE = {"cpu": 0.004, "cuda": 0.05}  #: chance that a rank is late for a call
CHURN = 0.002  #: chance that memory of the heap is taken and dropped instead
REPLAY = 0.2  #: chance that a captured graph is replayed instead
IN_GRAPH = 8  #: calls of a captured graph
PALETTE = 12  #: different calls on CUDA, where kernels are compiled for each in each group
WATCHED = 256  #: calls on CUDA between two looks at the results
GROW_UNTIL = 0.1  #: of the calls: until then some are large and make workspaces grow


@dataclass(frozen=True)
class Options:
    """``gpus``: on CUDA, how many GPUs the ranks share; None where each has its own."""

    device: str
    calls: int
    seconds: float
    seed: int
    lanes: int
    corrupt: int = -1  #: the number of a call whose result rank 0 changes, to see that it is noticed
    gpus: int | None = None

    def place(self, rank: int) -> torch.device:
        """Where a rank's tensors lie."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank if self.gpus is None else rank % self.gpus)


@dataclass
class Group:
    pg: dist.ProcessGroup
    ranks: tuple[int, ...]


def make_groups(world_size: int, lanes: int) -> list[list[Group]]:
    """For each lane groups of its own that overlap: all ranks, and with three ranks or more two parts of them."""
    made = []
    for lane in range(lanes):
        everybody = tuple(range(world_size))
        parts = [everybody]
        if world_size > 2:
            parts += (
                [everybody[:2], everybody[1:]] if lane % 2 == 0 else [everybody[:-1], (0, world_size - 1)]
            )
        made.append([Group(dist.new_group(list(ranks)), ranks) for ranks in parts])
    return made


@dataclass
class Judge:
    """Compares results. On CUDA it notes a difference on the device, and looks now and then."""

    device: torch.device
    notes: list[tuple[Tensor, str]] = field(default_factory=list)
    checked: int = 0

    def compare(self, what: str, got: list[Tensor], want: list[Tensor]) -> None:
        self.note(what, differs(got, want))
        self.checked += 1

    def note(self, what: str, wrong: Tensor) -> None:
        self.notes.append((wrong, what))
        if self.device.type == "cpu" or len(self.notes) >= WATCHED:
            self.look()

    def look(self) -> None:
        """Raises AssertionError when any result since the last look was wrong."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            symm_mem.check()
        notes, self.notes = self.notes, []
        if notes and torch.stack([wrong for wrong, _ in notes]).any():
            raise AssertionError("wrong result: " + "; ".join(what for wrong, what in notes if wrong))


@dataclass
class Captured:
    """A graph of some calls and of their checks; it counts in ``wrong`` those that came out wrong."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    inputs: Pool  # of its own: exchanged before each replay, while other graphs may run
    wrong: Tensor


class Lane:
    """A sequence of calls, the same on every rank."""

    def __init__(self, options: Options, number: int, rank: int, groups: list[Group], pool: Pool) -> None:
        self.options, self.number, self.rank, self.groups, self.pool = options, number, rank, groups, pool
        self.shared = random.Random(f"{options.seed} {number}")
        self.own = random.Random(f"{options.seed} {number} {rank}")
        self.judge = Judge(options.place(rank))
        self.made = 0  # calls of this lane, also those of groups without this rank
        self.churned = self.replayed = self.late = 0
        cuda = options.device == "cuda"
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()] if cuda else [None]
        ops = [OPS[i % len(OPS)] for i in range(PALETTE if cuda else 0)]
        self.palette = [draw(self.shared, "cuda", op) for op in ops]
        self.graphs: list[Captured] = []

    def on(self, stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def prepare(self) -> None:
        """CUDA: every call of the palette in every group on every stream, so that all is made; then the graphs."""
        if not self.palette:
            return
        torch.cuda.synchronize()  # the pool is filled
        for stream in self.streams:
            with self.on(stream):
                for group in self.groups:
                    for call in self.palette:
                        self.call(call, group)
            self.judge.look()
        for stream in self.streams:
            assert stream is not None
            self.graphs += [self.capture(stream) for _ in range(2)]

    def capture(self, stream: torch.cuda.Stream) -> Captured:
        chosen = [
            (self.shared.choice(self.palette), self.shared.choice(self.groups)) for _ in range(IN_GRAPH)
        ]
        inputs = Pool(self.options.seed + 1, self.judge.device)
        made = Captured(
            torch.cuda.CUDAGraph(),
            stream,
            inputs,
            torch.zeros((), dtype=torch.int64, device=self.judge.device),
        )
        torch.cuda.synchronize()
        with torch.cuda.graph(made.graph, stream=stream):
            for call, group in chosen:
                if self.rank in group.ranks:
                    me = group.ranks.index(self.rank)
                    a, bs = operands(call, inputs, len(group.ranks))
                    made.wrong += differs(run(call, a, bs, me, group.pg), expected(call, a, bs, me))
        return made

    def go(self, count: int) -> None:
        """The next ``count`` calls."""
        end = self.made + count
        while self.made < end:
            self.step()
        self.judge.look()

    def step(self) -> None:
        shared, group = self.shared, self.shared.choice(self.groups)
        stream = shared.choice(self.streams)
        kind = shared.random()
        big = kind > 0.98 and self.made < GROW_UNTIL * self.options.calls / self.options.lanes
        if self.palette:
            call = dataclasses.replace(shared.choice(self.palette), starts=(shared.random(), shared.random()))
        else:
            call = draw(shared, "cpu", "all_reduce" if big else shared.choice(OPS), big)
        with self.on(stream):
            if self.own.random() < LATE[self.options.device]:
                self.delay()
            if kind < CHURN:
                self.churn(group, shared.randint(1, 2000))
            elif self.graphs and kind < CHURN + REPLAY:
                self.replay(shared.choice(self.graphs), shared.randrange(1 << 20))
            else:
                self.call(call, group)

    def delay(self) -> None:
        self.late += 1
        if self.judge.device.type == "cuda":
            torch.cuda._sleep(self.own.randrange(2_000_000))
        else:
            time.sleep(self.own.uniform(0, 0.005))

    def call(self, call: Call, group: Group) -> None:
        number, self.made = self.made, self.made + 1
        if self.rank not in group.ranks:
            return
        me = group.ranks.index(self.rank)
        a, bs = operands(call, self.pool, len(group.ranks))
        got = run(call, a, bs, me, group.pg)
        if number == self.options.corrupt and self.rank == 0:
            got[0][(0,) * got[0].dim()] += 1
        what = f"call {number} of lane {self.number} on rank {self.rank}, group {group.ranks}: {call}"
        self.judge.compare(what, got, expected(call, a, bs, me))

    def replay(self, captured: Captured, shift: int) -> None:
        with torch.cuda.stream(captured.stream):
            for dtype, inputs in captured.inputs.by_dtype.items():
                fresh = self.pool.by_dtype[dtype]
                inputs[shift:].copy_(fresh[: len(fresh) - shift])
                inputs[:shift].copy_(fresh[len(fresh) - shift :])
            captured.graph.replay()
            self.judge.note(f"a replayed graph of lane {self.number} on rank {self.rank}", captured.wrong > 0)
        self.made += IN_GRAPH
        self.judge.checked += IN_GRAPH
        self.replayed += 1

    def churn(self, group: Group, count: int) -> None:
        """Memory that is taken, written to by the neighbour, read and dropped: it must be used again."""
        self.made += 1
        if self.rank not in group.ranks:
            return
        size, me = len(group.ranks), group.ranks.index(self.rank)
        mine = symm_mem.empty(count, dtype=torch.float32, group=group.pg, device=self.judge.device)
        peers = symm_mem.rendezvous(mine)
        peers.tensors[(me + 1) % size].fill_(float(me))
        peers.barrier()
        want = torch.full_like(mine, float((me - 1) % size))
        self.judge.compare(f"memory of {count} elements on rank {self.rank}", [mine.clone()], [want])
        self.churned += 1


class Traffic:
    """All lanes of one rank."""

    def __init__(self, options: Options, rank: int, world_size: int) -> None:
        self.options, self.rank = options, rank
        self.cuda = options.device == "cuda"
        pool = Pool(options.seed, options.place(rank))
        lanes = make_groups(world_size, 1 if self.cuda else options.lanes)
        self.lanes = [Lane(options, i, rank, groups, pool) for i, groups in enumerate(lanes)]
        self.control = dist.new_group(backend="gloo")
        self.here = (
            sum(options.place(r) == options.place(rank) for r in range(world_size)) if self.cuda else 1
        )

    def heaps(self) -> list[Heap]:
        device = self.lanes[0].judge.device
        mine = [g.pg for lane in self.lanes for g in lane.groups if self.rank in g.ranks]
        return [get_heap(pg, device) for pg in mine]

    def together(self, count: int) -> None:
        """``count`` calls of every lane, at the same time."""
        if len(self.lanes) == 1:
            self.lanes[0].go(count)
            return
        failures: list[BaseException] = []

        def go(lane: Lane) -> None:
            try:
                lane.go(count)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=go, args=(lane,)) for lane in self.lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def goes_on(self, start: float) -> bool:
        """Whether there is time for more: rank 0 decides."""
        more = torch.tensor(int(time.monotonic() - start < self.options.seconds), device="cpu")
        dist.broadcast(more, 0, group=self.control)
        return bool(more)

    def run(self) -> dict[str, object]:
        """All of it; what was done and what this rank holds.

        Raises:
            AssertionError: a result is wrong, or this process holds more than it did after the first third.
        """
        with forced("fused") if self.cuda else nullcontext():
            start = time.monotonic()
            for lane in self.lanes:
                lane.prepare()
            if self.rank == 0:
                print(f"prepared in {time.monotonic() - start:.0f} s", flush=True)
            usages: list[Usage] = []
            start = told = time.monotonic()
            while (made := sum(lane.made for lane in self.lanes)) < self.options.calls and self.goes_on(
                start
            ):
                left = -(-(self.options.calls - made) // len(self.lanes))
                self.together(min(ROUND // len(self.lanes), left))
                dist.barrier(group=self.control)
                if made >= GROW_UNTIL * self.options.calls:
                    usages.append(Usage.measure(self.heaps(), self.here))
                if self.rank == 0 and time.monotonic() - told > 30:
                    told = time.monotonic()
                    print(f"{made} calls in {told - start:.0f} s; {usages[-1] if usages else ''}", flush=True)
            seconds = time.monotonic() - start
        # The first measurements still see caches fill: a leak shows between the first third and the end.
        run_on_all = usages[len(usages) // 3] if usages else None
        if run_on_all is not None and (grown := usages[-1].grown(run_on_all)):
            raise AssertionError(f"rank {self.rank} holds more: {'; '.join(grown)}")
        return {
            "rank": self.rank,
            "calls": sum(lane.made for lane in self.lanes),
            "checked": sum(lane.judge.checked for lane in self.lanes),
            "replayed": sum(lane.replayed for lane in self.lanes),
            "churned": sum(lane.churned for lane in self.lanes),
            "late": sum(lane.late for lane in self.lanes),
            "seconds": seconds,
            "before": str(run_on_all),
            "after": str(usages[-1]) if usages else "None",
        }
