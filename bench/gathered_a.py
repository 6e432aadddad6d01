"""All-gather + matmul with the gathered A and without it, beside what is unfused and the matmul alone.

torchrun --nproc-per-node 2 bench/gathered_a.py
torchrun --nproc-per-node 2 bench/gathered_a.py --m-sizes 1024,8192 --mode eager

Products of Llama 8B blocks, those of the forward and those of the backward. Microseconds of a call, medians of rounds
in turn, the slowest rank's. A must be bit for bit what was gathered. After them sums of products + reduce-scatter, as
in the backward: of factors where they lie, and of factors that are put side by side for it; and matmul +
reduce-scatter with a bias and a residual, or with the residual added by torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from statistics import median

import machine
import torch
import torch.distributed as dist
from timer import Schedule, Series, order, over_ranks, rounds_of, same_head_start
from torch import Tensor
from weft.fused_ops import fused_all_gather_matmul

# K, and the columns of the whole Bs.
GATHERS = {
    "qkv": (4096, (6144,)),
    "q, k, v": (4096, (4096, 1024, 1024)),
    "up, gate": (4096, (14336, 14336)),
    "of o": (4096, (4096,)),
    "of down": (4096, (14336,)),
}
# Of the whole layer, K of each product, and the columns.
SUMS = {"of q, k, v": ((4096, 1024, 1024), 4096), "of up, gate": ((14336, 14336), 4096)}
TERMS = {"o": (4096, 4096), "down": (14336, 4096)}  # K and columns of the whole product
SETS = 2


def in_turn(
    calls: dict[str, Callable[[int], Sequence[Tensor]]], mode: str, device: torch.device
) -> list[float]:
    series = [Series(call, SETS, Schedule(calls=10), mode, device) for call in calls.values()]
    same_head_start(series, device)
    rounds: list[list[float]] = [[] for _ in series]
    for number in range(2 * rounds_of(len(series))):
        for i in order(len(series), number):
            rounds[i].append(series[i].time())
    return [median(over_ranks(each, device)) for each in rounds]


def gathers(m: int, k: int, ns: tuple[int, ...], mode: str, device: torch.device) -> list[float]:
    size, dtype = dist.get_world_size(), torch.bfloat16
    shards = [torch.randn(m // size, k, device=device, dtype=dtype) for _ in range(SETS)]
    weights = [
        [torch.randn(n // size, k, device=device, dtype=dtype).t() / k**0.5 for n in ns] for _ in range(SETS)
    ]
    whole = torch.empty(m, k, device=device, dtype=dtype)
    dist.all_gather_into_tensor(whole, shards[0])
    A, _ = fused_all_gather_matmul(shards[0], weights[0], 0, None)
    if A is None or not torch.equal(A, whole):
        raise RuntimeError("A is not what was gathered")

    def unfused(i: int) -> Sequence[Tensor]:
        dist.all_gather_into_tensor(whole, shards[i])
        return product(i)

    def product(i: int) -> Sequence[Tensor]:
        return [whole @ w for w in weights[i]]

    def fused(return_A: bool) -> Callable[[int], Sequence[Tensor]]:
        return lambda i: fused_all_gather_matmul(shards[i], weights[i], 0, None, return_A=return_A)[1]

    calls = {"without A": fused(False), "with A": fused(True), "unfused": unfused, "matmul": product}
    return in_turn(calls, mode, device)


def sums(m: int, ks: tuple[int, ...], n: int, mode: str, device: torch.device) -> list[float]:
    size, dtype = dist.get_world_size(), torch.bfloat16
    group = dist.distributed_c10d._get_default_group().group_name
    sets = [
        [
            x
            for k in ks
            for x in (
                torch.randn(m, k // size, device=device, dtype=dtype),
                torch.randn(k // size, n, device=device, dtype=dtype) / sum(ks) ** 0.5,
            )
        ]
        for _ in range(SETS)
    ]
    op = torch.ops.weft.fused_matmul_reduce_scatter

    def as_they_lie(i: int) -> Sequence[Tensor]:
        A, B, *more = sets[i]
        return [op(A, B, "sum", 0, group, more=more)]

    def stacked(i: int) -> Sequence[Tensor]:
        A, B = torch.cat(sets[i][::2], 1), torch.cat(sets[i][1::2])
        return [op(A, B, "sum", 0, group)]

    torch.testing.assert_close(as_they_lie(0)[0], stacked(0)[0], rtol=2e-2, atol=2e-2)
    return in_turn({"as they lie": as_they_lie, "stacked": stacked}, mode, device)


def terms(m: int, k: int, n: int, mode: str, device: torch.device) -> list[float]:
    size, dtype = dist.get_world_size(), torch.bfloat16
    group = dist.distributed_c10d._get_default_group().group_name

    def random(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device=device, dtype=dtype) for _ in range(SETS)]

    As, Bs = random(m, k // size), [b.t() / k**0.5 for b in random(n, k // size)]
    biases, residuals = random(n), random(m // size, n)
    op = torch.ops.weft.fused_matmul_reduce_scatter

    def scattered(i: int, **named: Tensor) -> Tensor:
        return op(As[i], Bs[i], "sum", 0, group, **named)  # type: ignore[no-any-return]

    got, bare = scattered(0, residual=residuals[0], bias=biases[0]), scattered(0)
    torch.testing.assert_close(got, bare + residuals[0] + biases[0], rtol=2e-2, atol=4e-2)
    return in_turn(
        {
            "bare": lambda i: [scattered(i)],
            "bias": lambda i: [scattered(i, bias=biases[i])],
            "residual": lambda i: [scattered(i, residual=residuals[i])],
            "added by torch": lambda i: [scattered(i) + residuals[i]],
        },
        mode,
        device,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--m-sizes", default="1024,2048,4096,8192", help="rows of all ranks, by commas")
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph")
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(shlex.join(["bench/gathered_a.py", *sys.argv[1:]]), machine.described("cuda", dist.get_world_size()))
    sizes = [int(m) for m in given.m_sizes.split(",")]
    say(f"{'M':>6} {'products':10}{'without A':>11}{'with A':>9}{'unfused':>9}{'matmul':>9}{'A costs':>9}")
    for m in sizes:
        for name, (k, ns) in GATHERS.items():
            without, with_A, unfused, product = gathers(m, k, ns, given.mode, device)
            say(
                f"{m:6} {name:10}{without:11.1f}{with_A:9.1f}{unfused:9.1f}{product:9.1f}"
                f"{with_A / without - 1:9.1%}"
            )
    say(f"{'M':>6} {'sum of':12}{'as they lie':>13}{'stacked':>9}")
    for m in sizes:
        for name, (ks, n) in SUMS.items():
            as_they_lie, stacked = sums(m, ks, n, given.mode, device)
            say(f"{m:6} {name:12}{as_they_lie:13.1f}{stacked:9.1f}")
    say(f"{'M':>6} {'scattered':10}{'bare':>9}{'bias':>9}{'residual':>10}{'added by torch':>16}")
    for m in sizes:
        for name, (k, n) in TERMS.items():
            bare, bias, residual, by_torch = terms(m, k, n, given.mode, device)
            say(f"{m:6} {name:10}{bare:9.1f}{bias:9.1f}{residual:10.1f}{by_torch:16.1f}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
