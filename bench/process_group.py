"""Eager all-reduces and DDP over the process group "weft", and over NCCL alone (between CPU ranks gloo).

torchrun --nproc-per-node 2 bench/process_group.py
torchrun --nproc-per-node 2 bench/process_group.py --sizes 2048,1048576 --width 256

Each line has microseconds of dist.all_reduce in place: of the host, which launches a round without waiting; of the
device, eager, after a sleep that lets the host run ahead; and in a CUDA graph. The last lines have those of a training
step of a small model in DDP. The median of the rounds, the slowest rank's; every sum is compared with what it must be.
Between CPU ranks one clock measures all. NCCL (gloo) comes first, as without weft, and again beside weft's group.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from statistics import median

import machine
import torch
import torch.distributed as dist
import weft
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CALLS, ROUNDS, STEPS = 20, 15, 5
AHEAD = 20_000_000  # cycles that the device sleeps: longer than the host needs for a round
Run = Callable[[], object]


def _slowest(times: list[float], device: torch.device) -> float:
    worst = torch.tensor(median(times), dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _timed(run: Run, calls: int, device: torch.device) -> tuple[float, float]:
    """Microseconds of one of so many calls that ``run`` makes: (host, device)."""
    hosts, devices = [], []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        run()
        hosts.append((time.perf_counter() - start) * 1e6 / calls)
        if device.type == "cuda":
            end.record()
            end.synchronize()
            devices.append(begin.elapsed_time(end) * 1e3 / calls)
    return _slowest(hosts[2:], device), _slowest((devices or hosts)[2:], device)


def _captured(run: Run) -> Run:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _all_reduces(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[list[float], bool]:
    """Of one size: (microseconds of host, device and graph, whether the sums are right)."""
    dtype, size = torch.bfloat16 if device.type == "cuda" else torch.float32, group.size()
    x = torch.full((nbytes // dtype.itemsize,), float(group.rank() + 1), dtype=dtype, device=device)
    dist.all_reduce(x, group=group)
    right = bool((x == size * (size + 1) / 2).all())
    x.zero_()

    def run() -> None:
        for _ in range(CALLS):
            dist.all_reduce(x, group=group)

    times = list(_timed(run, CALLS, device))
    if device.type == "cuda":
        times.append(_timed(_captured(run), CALLS, device)[1])
    return times, right


def _training(width: int, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x: Tensor = torch.randn(64, width, device=device)

    def run() -> None:
        for _ in range(STEPS):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return list(_timed(run, STEPS, device))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = ",".join(str(2048 << (2 * i)) for i in range(8)) + f",{64 << 20},{128 << 20}"
    parser.add_argument("--sizes", default=sizes, help="bytes, by commas")
    parser.add_argument("--width", type=int, default=1024, help="of the layers of the model in DDP")
    given = parser.parse_args()
    device = machine.join_ranks()
    on_gpus = device.type == "cuda"
    own = "nccl" if on_gpus else "gloo"
    rank, wrong = dist.get_rank(), 0
    every = [int(nbytes) for nbytes in given.sizes.split(",")]
    columns = ("host us", "device us", "graph us") if on_gpus else ("us", "")
    if rank == 0:
        command = shlex.join(["bench/process_group.py", *sys.argv[1:]])
        print(command, machine.described(device.type, dist.get_world_size()))
        print(f"{'bytes':>10} {'group':<12}", *(f"{column:>10}" for column in columns))

    def compare(groups: dict[str, dist.ProcessGroup]) -> None:
        nonlocal wrong
        for nbytes in every:
            for name, group in groups.items():
                times, right = _all_reduces(nbytes, group, device)
                wrong += not right
                if rank == 0:
                    shown = times if on_gpus else times[:1]
                    print(f"{nbytes:10} {name:<12}", *(f"{t:10.1f}" for t in shown), "" if right else "WRONG")
        for name, group in groups.items():
            times = _training(given.width, group, device)
            if rank == 0:
                shown = times if on_gpus else times[:1]
                print(f"{'DDP step':>10} {name:<12}", *(f"{t:10.1f}" for t in shown))

    groups = {own: dist.new_group(backend=own)}
    compare(groups)  # as without weft: later all groups' calls are looked at
    groups = {f"{own} beside": groups[own], "weft": dist.new_group(backend="weft")}
    compare(groups)
    if rank == 0:
        print(*weft.process_group(groups["weft"]).calls(), sep="\n")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
