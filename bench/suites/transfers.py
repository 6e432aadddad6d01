"""Transfers between registered tensors."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accuracy import Expected
from measure import timed
from parts import Bench
from suite import Run, Suite, numbers, words
from timer import Call, Schedule
from torch import Tensor
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap


class Pair:
    """Two ranks, what one sends and where the other's arrives."""

    def __init__(self, nbytes: int, both: bool, device: torch.device) -> None:
        self.rank, self.both = dist.get_rank(), both
        self.peer = 1 - self.rank
        self.sends, self.receives = both or self.rank == 0, both or self.rank == 1
        self.source = torch.empty(nbytes // 4, device=device).fill_(self.rank + 1.0)
        self.target = torch.zeros(nbytes // 4, device=device)
        self.device = device


Transfer = Callable[[], Tensor]
"""One transfer of each direction; where it arrives."""


def _put(pair: Pair) -> Transfer:
    (x,) = symm_mem.register([pair.target])

    def run() -> Tensor:
        if pair.receives:
            x.signal(pair.peer)
        if pair.sends:
            x.put(pair.source, pair.peer)
        if pair.receives:
            x.wait(pair.peer)
        return pair.target

    return run


def _put_in_turn(pair: Pair) -> Transfer:
    """Two tensors, each let while the other one is written."""
    targets = [pair.target, pair.target.clone()]
    halves = symm_mem.register(targets)
    turn = 0

    def run() -> Tensor:
        nonlocal turn
        x, target, turn = halves[turn % 2], targets[turn % 2], turn + 1
        if pair.receives and turn == 1:
            for half in halves:
                half.signal(pair.peer)
        if pair.sends:
            x.put(pair.source, pair.peer)
        if pair.receives:
            x.wait(pair.peer)
            x.signal(pair.peer)
        return target

    return run


def _get(pair: Pair) -> Transfer:
    (x,) = symm_mem.register([pair.source])

    def run() -> Tensor:
        if pair.sends:
            x.signal(pair.peer)
        if pair.receives:
            x.get(pair.target, pair.peer)
        if pair.sends:
            x.wait(pair.peer)
        return pair.target

    return run


def _by(make: Callable[[Pair], Transfer], threshold: int) -> Callable[[Pair], Transfer]:
    """By SMs alone, or by copy engines alone."""

    def made(pair: Pair) -> Transfer:
        run = make(pair)

        def chosen() -> Tensor:
            engine: Any = get_heap(None, pair.device).registrations.engine
            before, engine.copy_engine_from = engine.copy_engine_from, threshold
            arrived = run()
            engine.copy_engine_from = before
            return arrived

        return chosen

    return made


def _native(pair: Pair) -> Transfer:
    def run() -> Tensor:
        ops = []
        if pair.sends:
            ops.append(dist.P2POp(dist.isend, pair.source, pair.peer))
        if pair.receives:
            ops.append(dist.P2POp(dist.irecv, pair.target, pair.peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return pair.target

    return run


def _torch_symm(pair: Pair) -> Transfer:
    import torch.distributed._symmetric_memory as torch_symm

    memory = torch_symm.empty(pair.target.numel(), dtype=pair.target.dtype, device=pair.device)
    memory.zero_()
    handle = torch_symm.rendezvous(memory, dist.group.WORLD)  # type: ignore[arg-type]
    there = handle.get_buffer(pair.peer, memory.shape, memory.dtype)

    def run() -> Tensor:
        if pair.receives:
            handle.put_signal(pair.peer, 0)
        if pair.sends:
            handle.wait_signal(pair.peer, 0)
            there.copy_(pair.source)
            handle.put_signal(pair.peer, 1)
        if pair.receives:
            handle.wait_signal(pair.peer, 1)
        return memory

    return run


def _copy(pair: Pair) -> Transfer:
    (x,) = symm_mem.register([pair.target])

    def run() -> Tensor:
        there = x.tensors[pair.peer]
        assert there is not None
        if pair.sends:
            there.copy_(pair.source)
        return pair.target

    return run


def _contenders(device: str) -> dict[str, Callable[[Pair], Transfer]]:
    if device == "cpu":
        return {"put": _put, "get": _get, "gloo": _native}
    return {
        "put": _put,
        "get": _get,
        "put x2": _put_in_turn,
        "put sm": _by(_put, 1 << 62),
        "put ce": _by(_put, 0),
        "get sm": _by(_get, 1 << 62),
        "get ce": _by(_get, 0),
        "nccl": _native,
        "torch symm": _torch_symm,
        "copy": _copy,
    }


class Transfers(Suite):
    """put and get between registered tensors, NCCL's send and recv, and torch's symmetric memory, between two ranks.

    Each line has microseconds of a transfer, the median of the rounds and the slower rank's, in a CUDA graph of many
    (with --plain in eager calls): one way from rank 0 to rank 1, or both ways at once. All contenders may be repeated
    without a barrier: the receiver knows when the data are there, the sender when they may be overwritten. "put x2"
    writes to two tensors in turn; "copy" is the copy engine alone, which tells nobody. Between CPU ranks gloo stands
    for NCCL. The first lines have milliseconds of ``register`` of new segments, and microseconds of the host for those
    that it knows.
    """

    ranks = 2

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        sizes = tuple(4096 << (2 * i) for i in range(9))
        parser.add_argument("--sizes", type=numbers, default=sizes, help="bytes, by commas")
        parser.add_argument("--plain", action="store_true", help="eager calls instead of a CUDA graph")
        parser.add_argument("--only", type=words, default=(), help="contenders, by commas")

    def rows(self, given: argparse.Namespace) -> list[tuple[int, bool]]:
        known = _contenders(given.device)
        if unknown := [name for name in given.only if name not in known]:
            raise ValueError(f"--only: {unknown} is not among {list(known)}")
        given.only = given.only or tuple(known)
        return [(nbytes, both) for nbytes in given.sizes for both in (False, True)]

    def begin(self, run: Run) -> None:
        symm_mem.set_timeout(20)
        # 32 MiB, each a segment of its own on CUDA
        tensors = [torch.zeros(8 << 20, device=run.device) for _ in range(12)]
        kept, times = [], []
        for tensor in tensors:
            dist.barrier()
            start = time.perf_counter()
            kept += symm_mem.register([tensor])
            times.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        for _ in range(1000):
            symm_mem.register([tensors[0]])
        hit = (time.perf_counter() - start) * 1e3
        run.say(f"register: first {times[0]:.2f} ms, then {median(times[1:]):.2f} ms; a hit {hit:.1f} us")
        run.say(symm_mem.stats(None, run.device))
        symm_mem.unregister(kept)
        run.say(f"{'bytes':>10} {'ways':>4} " + "".join(f"{n:>11}" for n in run.given.only) + "   us")

    def measure(self, row: tuple[int, bool], run: Run) -> None:
        nbytes, both = row
        calls: dict[str, Call] = {}
        expected = {}
        for name in run.given.only:
            pair = Pair(nbytes, both, run.device)
            calls[name] = _call(_contenders(run.device.type)[name], pair)
            if pair.receives:
                sent = torch.full_like(pair.target, pair.peer + 1.0).double()
                expected[name] = [Expected(sent, torch.zeros_like(sent))]
        plan = Schedule(20 if nbytes <= 1 << 26 else 6)
        found = timed(Bench(calls, expected, 1), plan, "eager" if run.given.plain else run.mode, run.device)
        run.wrong |= any("wrong result" in problem for problem in found.problems)
        run.say(f"{nbytes:10} {1 + both:4} {found.cells(run.given.only, 11)}", *found.problems)


def _call(make: Callable[[Pair], Transfer], pair: Pair) -> Call:
    """Made when it is called first, where what it lacks is noticed."""
    made: list[Transfer] = []

    def call(_: int) -> list[Tensor]:
        if not made:
            made.append(make(pair))
        arrived = made[0]()
        return [arrived] if pair.receives else []

    return call


SUITE = Transfers()
