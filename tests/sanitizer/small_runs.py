"""What a rank runs under a tool: each op in each of its kernels, on tiny odd sizes, compared with exact results.

    small_runs.py RANK WORLD_SIZE PORT [--broken | --cpu]

The reference is computed on the CPU, so that the GPU runs little but weft's kernels. Numbers are small integers:
results are exact in every dtype. ``--cpu``: on CPU ranks, to try this file out.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
)
from weft.fused_ops.plan import forced

USES = 3  # of a workspace: both halves, one of them again
DTYPES = (torch.bfloat16, torch.float32)
CPU = "--cpu" in sys.argv
BIGGEST = 512 << 10  # bytes: from here on three ranks and more reduce in two trips


def numbers(seed: int, rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def put(x: torch.Tensor) -> torch.Tensor:
    """x where the op shall run, with the same strides."""
    return x if CPU else x.cuda()


def fused() -> None:
    """The last call took a kernel."""
    assert last_plan().algorithm != "unfused", last_plan()


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.cpu(), want.to(got.dtype)), f"{what}: wrong result"


def all_gather_matmul(rank: int, size: int, seed: int) -> None:
    # A tile more or less than a chunk, columns that no tile divides, both layouts of B, two Bs on one gathered A.
    for m, k, n, dtype in [(64, 64, 64, DTYPES[0]), (129, 72, 136, DTYPES[0]), (100, 36, 68, DTYPES[1])]:
        shards = [numbers(seed, r, dtype, m, k) for r in range(size)]
        Bs = [numbers(seed + 1, rank, dtype, n, k).t(), numbers(seed + 2, rank, dtype, k, n)]
        for count, return_A in [(1, False), (2, True)]:
            on_gpu = [put(B) for B in Bs[:count]]
            A, outs = fused_all_gather_matmul(
                put(shards[rank]), on_gpu, 0, dist.group.WORLD, return_A=return_A
            )
            fused()
            whole = torch.cat(shards)
            if A is not None:
                same("gathered A", A, whole)
            for B, out in zip(Bs, outs, strict=False):
                same("all-gather + matmul", out, whole.float() @ B.float())


def matmul_reduce_scatter(rank: int, size: int, seed: int) -> None:
    for m, k, n, dtype, reduce_op in [
        (64, 64, 64, DTYPES[0], "sum"),
        (67, 72, 136, DTYPES[0], "sum"),
        (65, 36, 68, DTYPES[1], "avg"),
    ]:
        for dim in (0, 1):
            shape = (size * m, 2, k) if dim == 0 else (2, size * m, k)
            As = [numbers(seed, r, dtype, *shape) for r in range(size)]
            Bs = [numbers(seed + 1, r, dtype, n, k).t() for r in range(size)]
            out = fused_matmul_reduce_scatter(put(As[rank]), put(Bs[rank]), reduce_op, dim, dist.group.WORLD)
            fused()
            total = sum(a.float() @ b.float() for a, b in zip(As, Bs, strict=True))
            part = total.chunk(size, dim)[rank] / (size if reduce_op == "avg" else 1)
            if reduce_op == "sum" or size & (size - 1) == 0:  # else the average is not exact
                same("matmul + reduce-scatter", out, part)


def all_reduce(rank: int, size: int, seed: int) -> None:
    for dtype in (*DTYPES, torch.float16):
        for count in (1, 7, 1000, 4099, BIGGEST // dtype.itemsize + 3):
            xs = [numbers(seed, r, dtype, count + 1)[1:] for r in range(size)]
            on_gpu = put(numbers(seed, rank, dtype, count + 1))[1:]  # at an address that no vector fits
            for x in (on_gpu, on_gpu.clone()):
                out = one_shot_all_reduce(x, "sum", dist.group.WORLD)
                fused()
                same("all-reduce", out, sum(part.float() for part in xs))


@triton.jit
def past_the_end(x, n):
    tl.store(x + n, 1.0)


def main() -> None:
    rank, size, port = (int(text) for text in sys.argv[1:4])
    if not CPU:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    # No NCCL: its kernels are not ours, and the ops only need the store.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with forced("fused"):
        for use in range(USES):
            for run in (all_gather_matmul, matmul_reduce_scatter, all_reduce):
                run(rank, size, 10 * use)
    if not CPU:
        torch.cuda.synchronize()
    symm_mem.check()
    if "--broken" in sys.argv:
        x = torch.zeros(1024, device="cuda")
        past_the_end[(1,)](x, 1024)
        torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {rank}: every result was right")


if __name__ == "__main__":
    main()
