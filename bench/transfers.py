"""put and get between registered tensors, NCCL's send and recv, and torch's symmetric memory, between two ranks.

torchrun --nproc-per-node 2 bench/transfers.py
torchrun --nproc-per-node 2 bench/transfers.py --sizes 4096,1048576 --plain

Each line has microseconds of a transfer, the median of the rounds and the slower rank's, in a CUDA graph of many (with
--plain in eager calls after a sleep that lets the host run ahead): one way from rank 0 to rank 1, or both ways at
once. All contenders may be repeated without a barrier: the receiver knows when the data are there, the sender when they
may be overwritten. "put x2" writes to two tensors in turn; "copy" is the copy engine alone, which tells nobody. Every
contender's data are compared. Between CPU ranks one clock measures all, and gloo stands for NCCL.

The first lines have milliseconds of ``register`` of new segments, and microseconds of the host for those that it knows.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import machine
import torch
import torch.distributed as dist
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap

ROUNDS = 9
EAGER, GRAPH = 30_000_000, 1_000_000  # cycles that the device sleeps: longer than the host needs for a round
Run = Callable[[], object]


class Pair:
    """Two ranks, what one sends and where the other's arrives."""

    def __init__(self, nbytes: int, both: bool, device: torch.device) -> None:
        self.rank, self.both = dist.get_rank(), both
        self.peer = 1 - self.rank
        self.sends, self.receives = both or self.rank == 0, both or self.rank == 1
        self.source = torch.empty(nbytes // 4, device=device).fill_(self.rank + 1.0)
        self.target = torch.zeros(nbytes // 4, device=device)
        self.device = device


def _put(pair: Pair) -> Run:
    (x,) = symm_mem.register([pair.target])

    def run() -> None:
        if pair.receives:
            x.signal(pair.peer)
        if pair.sends:
            x.put(pair.source, pair.peer)
        if pair.receives:
            x.wait(pair.peer)

    return run


def _put_in_turn(pair: Pair) -> Run:
    """Two tensors, each let while the other one is written."""
    halves = symm_mem.register([pair.target, pair.target.clone()])
    turn = 0

    def run() -> None:
        nonlocal turn
        x, turn = halves[turn % 2], turn + 1
        if pair.receives and turn == 1:
            for half in halves:
                half.signal(pair.peer)
        if pair.sends:
            x.put(pair.source, pair.peer)
        if pair.receives:
            x.wait(pair.peer)
            x.signal(pair.peer)

    return run


def _get(pair: Pair) -> Run:
    (x,) = symm_mem.register([pair.source])

    def run() -> None:
        if pair.sends:
            x.signal(pair.peer)
        if pair.receives:
            x.get(pair.target, pair.peer)
        if pair.sends:
            x.wait(pair.peer)

    return run


def _forced(make: Callable[[Pair], Run], threshold: int) -> Callable[[Pair], Run]:
    """By SMs alone, or by copy engines alone."""

    def made(pair: Pair) -> Run:
        run = make(pair)

        def forced() -> None:
            engine: Any = get_heap(None, pair.device).registrations.engine
            before, engine.copy_engine_from = engine.copy_engine_from, threshold
            run()
            engine.copy_engine_from = before

        return forced

    return made


def _native(pair: Pair) -> Run:
    def run() -> None:
        ops = []
        if pair.sends:
            ops.append(dist.P2POp(dist.isend, pair.source, pair.peer))
        if pair.receives:
            ops.append(dist.P2POp(dist.irecv, pair.target, pair.peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return run


def _torch_symm(pair: Pair) -> Run:
    import torch.distributed._symmetric_memory as torch_symm

    memory = torch_symm.empty(pair.target.numel(), dtype=pair.target.dtype, device=pair.device)
    memory.zero_()
    handle = torch_symm.rendezvous(memory, dist.group.WORLD)  # type: ignore[arg-type]
    there = handle.get_buffer(pair.peer, memory.shape, memory.dtype)
    pair.target = memory

    def run() -> None:
        if pair.receives:
            handle.put_signal(pair.peer, 0)
        if pair.sends:
            handle.wait_signal(pair.peer, 0)
            there.copy_(pair.source)
            handle.put_signal(pair.peer, 1)
        if pair.receives:
            handle.wait_signal(pair.peer, 1)

    return run


def _copy(pair: Pair) -> Run:
    (x,) = symm_mem.register([pair.target])
    there = x.tensors[pair.peer]
    assert there is not None
    pair.keep = x  # type: ignore[attr-defined]

    def run() -> None:
        if pair.sends:
            there.copy_(pair.source)

    return run


def _contenders(device: torch.device) -> dict[str, Callable[[Pair], Run]]:
    if device.type == "cpu":
        return {"put": _put, "get": _get, "gloo": _native}
    return {
        "put": _put,
        "get": _get,
        "put x2": _put_in_turn,
        "put sm": _forced(_put, 1 << 62),
        "put ce": _forced(_put, 0),
        "get sm": _forced(_get, 1 << 62),
        "get ce": _forced(_get, 0),
        "nccl": _native,
        "torch symm": _torch_symm,
        "copy": _copy,
    }


def timed_calls(run: Run, calls: int, device: torch.device, ahead: int) -> float:
    """Microseconds of one of the ``calls`` that ``run`` makes, after a sleep of ``ahead`` cycles."""
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        if device.type == "cpu":
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6 / calls)
            continue
        torch.cuda.synchronize()
        dist.barrier()  # on the device
        torch.cuda._sleep(ahead)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    worst = torch.tensor(median(times[2:]), dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _measure(make: Callable[[Pair], Run], pair: Pair, plain: bool) -> tuple[float, bool]:
    run = make(pair)
    for _ in range(3):
        run()
    if pair.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    right = not pair.receives or bool((pair.target == pair.peer + 1).all())
    pair.target.zero_()
    calls = 20 if pair.source.numel() <= 1 << 24 else 6

    def many() -> None:
        for _ in range(calls):
            run()

    if pair.device.type == "cpu" or plain:
        return timed_calls(many, calls, pair.device, EAGER), right
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    took = timed_calls(graph.replay, calls, pair.device, GRAPH)
    return took, right and (not pair.receives or bool((pair.target == pair.peer + 1).all()))


def _registrations(device: torch.device, show: Callable[[str], None]) -> None:
    tensors = [
        torch.zeros(8 << 20, device=device) for _ in range(12)
    ]  # 32 MiB, each a segment of its own on CUDA
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
    show(f"register: first {times[0]:.2f} ms, then {median(times[1:]):.2f} ms; a hit {hit:.1f} us")
    show(str(symm_mem.stats(None, device)))
    symm_mem.unregister(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sizes", default=",".join(str(4096 << (2 * i)) for i in range(9)), help="bytes, by commas"
    )
    parser.add_argument("--plain", action="store_true", help="eager calls instead of a CUDA graph")
    parser.add_argument("--only", default="", help="contenders, by commas")
    given = parser.parse_args()
    device = machine.join_ranks()
    symm_mem.set_timeout(20)

    def show(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    show(f"{shlex.join(['bench/transfers.py', *sys.argv[1:]])} {machine.described(device.type, 2)}")
    _registrations(device, show)
    wanted = given.only.split(",") if given.only else list(_contenders(device))
    contenders = {name: make for name, make in _contenders(device).items() if name in wanted}
    show(f"{'bytes':>10} {'ways':>4} " + " ".join(f"{name:>10}" for name in contenders) + "   us")
    wrong = 0
    for nbytes in map(int, given.sizes.split(",")):
        for both in (False, True):
            cells = []
            for make in contenders.values():
                try:
                    took, right = _measure(make, Pair(nbytes, both, device), given.plain)
                    wrong += not right
                    cells.append(f"{took:9.1f}{' ' if right else '!'}")
                except (RuntimeError, AttributeError) as e:
                    cells.append(f"{type(e).__name__[:9]:>10}")
                    show(f"{type(e).__name__}: {str(e).splitlines()[0]}")
            show(f"{nbytes:10} {1 + both:4} " + " ".join(cells))
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
