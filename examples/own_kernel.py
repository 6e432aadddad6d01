"""A Triton kernel of your own that writes to the next rank's tensor, signals it, and waits for the previous rank.

    torchrun --nproc-per-node 2 examples/own_kernel.py     # one rank a GPU; where there are fewer, CPU ranks

CPU ranks run the kernel in Triton's interpreter. The exit status is 1 if a rank has read anything but what the previous
rank wrote.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl
from torch import Tensor
from weft import symm_mem

N, TURNS = 64, 5
#: In the interpreter each is Python: a rank whose neighbour has died would turn for minutes.
TRIES = 100_000 if os.environ.get("TRITON_INTERPRET") == "1" else 10_000_000


@triton.jit
def push_and_wait(
    x,
    tensors,
    signals,
    count,
    late,
    RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    TRIES: tl.constexpr,
):
    i = tl.arange(0, N)
    tl.store(tl.load(tensors + RIGHT).to(tl.pointer_type(tl.float32)) + i, tl.load(x + i))
    tl.debug_barrier()  # the release below covers the stores of all threads
    word = tl.load(signals + RIGHT).to(tl.pointer_type(tl.int32)) + RANK
    tl.atomic_xchg(word, count, sem="release", scope="sys")
    word = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + LEFT
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tries = 0
    while (seen - count < 0) & (tries < TRIES):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tries += 1
    tl.store(late, (seen - count < 0).to(tl.int32))


def push_to_next(x: Tensor, peers: symm_mem.Peers, count: int, tries: int = TRIES) -> bool:
    """Writes ``x`` [N] to the next rank. Returns whether the ``count``-th tensor of the previous rank has come."""
    right, left = (peers.rank + 1) % peers.world_size, (peers.rank - 1) % peers.world_size
    late = torch.full((1,), 7, dtype=torch.int32, device=x.device)
    args = x, peers.table, peers.signal_table, count, late
    push_and_wait[(1,)](*args, RIGHT=right, LEFT=left, RANK=peers.rank, N=x.numel(), TRIES=tries)
    return late.item() == 0


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("own_kernel.py runs on several ranks: torchrun --nproc-per-node 2 examples/own_kernel.py")
    on_gpus = os.environ.get("TRITON_INTERPRET") != "1"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    mine = symm_mem.empty(N, dtype=torch.float32, device=device)
    peers = symm_mem.rendezvous(mine)
    steps, left = torch.arange(N, dtype=torch.float32, device=device), (peers.rank - 1) % peers.world_size
    right = True
    for count in range(1, TURNS + 1):
        came = push_to_next(steps + 1000 * peers.rank + 100 * count, peers, count)
        right &= came and torch.equal(mine, steps + 1000 * left + 100 * count)
        peers.barrier()  # everybody has read, and may write again
    failed = torch.tensor([not right], dtype=torch.int32, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if peers.rank == 0:
        print("FAILED" if failed.item() else "ok")
    dist.destroy_process_group()
    sys.exit(int(failed.item()))


if __name__ == "__main__":
    main()
