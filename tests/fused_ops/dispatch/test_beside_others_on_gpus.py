"""Kernels of others that stay on the GPU until a call has ended: weft's end on the SMs that are left, nothing reserved.

As an all-gather of NCCL stays that waits for a rank whose GPU weft has taken (FSDP beside tensor parallelism).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opcommon import BOUND, check, gathered, world
from ranks import run_ranks
from torch import Tensor
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.device.jit.program import Program

pytestmark = pytest.mark.gpu

# A block of 1024 threads leaves the SM no registers for a block of gemm.cuh.
SOURCE = """
#include "ptx/sync.cuh"

struct Params { volatile int* over; unsigned long long nanoseconds; };
extern "C" __global__ void __launch_bounds__(1024) stay(const __grid_constant__ Params p) {
    const unsigned long long begin = weft::nanoseconds();
    do {
        __nanosleep(500);
    } while (*p.over == 0 && weft::nanoseconds() - begin < p.nanoseconds);
}
"""


class Params(ctypes.Structure):
    _fields_ = (("over", ctypes.c_uint64), ("nanoseconds", ctypes.c_uint64))


def beside(rank: int, world_size: int, folder: str, sms: int) -> None:
    symm_mem.set_timeout(2)
    source = Path(folder) / f"stay{rank}.cu"
    source.write_text(SOURCE)
    over = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
    stay = Program(source).function("stay").bound(sms, 1024, Params(over.data_ptr(), 4_000_000_000))
    aside = torch.cuda.Stream()

    def ends(call: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        call(*operands)  # nothing is compiled or exchanged beside the kernel
        assert fused_ops.last_plan().algorithm != "unfused", fused_ops.last_plan()
        torch.cuda.synchronize()
        over.zero_()
        torch.distributed.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
        stay(aside.cuda_stream)
        time.sleep(0.01)  # it is there before the call
        try:
            result, done = call(*operands), torch.cuda.Event()
            done.record()
            done.synchronize()
            assert not aside.query(), f"nothing was beside {fused_ops.last_plan()}"
        finally:
            over.fill_(1)
        torch.cuda.synchronize()
        symm_mem.check(world())
        return result

    def product_of_gathered(shard: Tensor, B: Tensor) -> Tensor:
        return fused_ops.fused_all_gather_matmul(shard, [B], 0, world(), return_A=False)[1][0]

    def scattered(x: Tensor, B: Tensor) -> Tensor:
        return fused_ops.fused_matmul_reduce_scatter(x, B, "sum", 0, world())

    def reduced(x: Tensor, B: Tensor) -> Tensor:
        return fused_ops.fused_matmul_all_reduce(x, B, "sum", world())

    bound = BOUND[torch.bfloat16]
    for m, k, n in [(2048, 4096, 3072), (4096, 1032, 4104), (1044, 2048, 2056)]:
        shard, B = torch.randn(m // world_size, k).bfloat16(), torch.randn(k, n).bfloat16()
        A, x = torch.cat(list(gathered(shard))).double(), torch.randn(m, k).bfloat16()
        parts = [each @ b for each, b in zip(gathered(x.double()), gathered(B.double()), strict=True)]
        total = torch.stack(parts).sum(0)
        with forced("fused"):
            check(
                f"all-gather + matmul {m, k, n}", ends(product_of_gathered, shard, B), A @ B.double(), bound
            )
            own = total.chunk(world_size)[rank]
            check(f"matmul + reduce-scatter {m, k, n}", ends(scattered, x, B), own, bound, parts)
            check(f"matmul + all-reduce {m, k, n}", ends(reduced, x, B), total, bound, parts)
    w = torch.ones(4096).bfloat16()
    for rows in (1, 64, 2048):
        x = torch.randn(rows, 4096).bfloat16()
        want = gathered(x.double()).sum(0)
        got = ends(lambda x: fused_ops.one_shot_all_reduce(x, "sum", world()), x)
        check(f"all-reduce of {rows} rows", got, want, bound, list(gathered(x.double())))
        sums = ends(
            lambda x: fused_ops.fused_all_reduce_rms_norm(x, torch.zeros_like(x), w, 1e-6, world())[1], x
        )
        check(f"all-reduce of {rows} rows, and a norm", sums, want, bound, list(gathered(x.double())))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sms", [24, 64])
def test_a_kernel_that_stays_keeps_nothing_off(world_size: int, sms: int, tmp_path: Path) -> None:
    run_ranks(beside, world_size, str(tmp_path), sms, device="cuda")
