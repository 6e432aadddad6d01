"""What a rank runs under a tool: each op in each of its kernels, on tiny odd sizes, compared with exact results.

    small_runs.py RANK WORLD_SIZE PORT [--broken | --cpu] [--gpus=GPUS]

The reference is computed on the CPU, so that the GPU runs little but weft's kernels. Numbers are small integers:
results are exact in every dtype. ``--cpu``: on CPU ranks, to try this file out. ``--gpus``: the ranks share so many.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from exact import CPU, DTYPES, fused, numbers, put, same
from expert_runs import experts, sent_to_experts
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.all_reduces import choose_sum_on_cuda
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.ops.all_reduce import AllReduceCall, run_by_choice
from weft.kernels.all_reduce.configs import AllReduceConfig, all_reduce_layout
from weft.kernels.device.collective import launch, rounds
from weft.symm_mem.heap.registry import get_heap

sys.path.insert(0, str(Path(__file__).parents[1]))
from algorithms import EVERY

USES = 3  # of a workspace: both buffers, one of them again
# What larger inputs take; here on small ones.
CONFIGS = (AllReduceConfig("two_shot"), AllReduceConfig("two_shot", blocks=2, threads=64))


def all_gather_matmul(rank: int, size: int, seed: int) -> None:
    # A tile more or less than a chunk, columns that no tile divides, both layouts of B, and both at once; several Bs on
    # one gathered A; shards side by side, and rows that lie apart.
    both = (True, False)
    for m, k, n, dtype, layouts, return_A, dim, apart in [
        (64, 64, 64, DTYPES[0], both[:1], False, 0, 0),
        (129, 72, 136, DTYPES[0], both[1:], True, 0, 8),
        (129, 72, 136, DTYPES[0], both[:1] * 2, False, 0, 8),
        (65, 72, 40, DTYPES[0], both, True, 0, 0),
        (100, 36, 68, DTYPES[1], both[:1], False, 0, 0),
        (70, 36, 36, DTYPES[1], both, True, 0, 0),
        (129, 72, 136, DTYPES[0], both[:1], True, 1, 8),
        (65, 136, 64, DTYPES[0], both[1:], False, 1, 0),
    ]:
        wider = [numbers(seed, r, dtype, m, k + apart) for r in range(size)]
        whole = torch.cat([shard[:, :k] for shard in wider], dim)
        deep = whole.shape[1]
        Bs = [
            numbers(seed + i, rank, dtype, n, deep).t()
            if transposed
            else numbers(seed + i, rank, dtype, deep, n)
            for i, transposed in enumerate(layouts, start=1)
        ]
        on_gpu, shard = [put(B) for B in Bs], put(wider[rank])[:, :k]
        A, outs = fused_ops.fused_all_gather_matmul(shard, on_gpu, dim, dist.group.WORLD, return_A=return_A)
        fused()
        if A is not None:
            same("gathered A", A, whole)
        for B, out in zip(Bs, outs, strict=True):
            same("all-gather + matmul", out, whole.float() @ B.float())


def matmul_reduce_scatter(rank: int, size: int, seed: int) -> None:
    for m, k, n, dtype, transposed, reduce_op in [
        (64, 64, 64, DTYPES[0], True, "sum"),
        (67, 72, 136, DTYPES[0], False, "sum"),
        (65, 36, 68, DTYPES[1], True, "avg"),
    ]:
        for dim in (0, 1, 2):
            shape = ((size * m, 2, k), (2, size * m, k), (2, m, k))[dim]
            columns = size * n if dim == 2 else n
            As = [numbers(seed, r, dtype, *shape) for r in range(size)]
            Bs = [
                numbers(seed + 1, r, dtype, columns, k).t()
                if transposed
                else numbers(seed + 1, r, dtype, k, columns)
                for r in range(size)
            ]
            a, b = put(As[rank]), put(Bs[rank])
            out = fused_ops.fused_matmul_reduce_scatter(a, b, reduce_op, dim, dist.group.WORLD)
            fused()
            total = sum(a.float() @ b.float() for a, b in zip(As, Bs, strict=True))
            part = total.chunk(size, dim)[rank] / (size if reduce_op == "avg" else 1)
            bias, residual = numbers(seed + 2, rank, dtype, n), numbers(seed + 3, rank, dtype, *part.shape)
            terms = {"bias": put(bias), "residual": put(residual)}
            more = fused_ops.fused_matmul_reduce_scatter(a, b, reduce_op, dim, dist.group.WORLD, **terms)
            fused()
            if reduce_op == "sum" or size & (size - 1) == 0:  # else the average is not exact
                same("matmul + reduce-scatter", out, part)
                same("with bias and residual", more, part + bias.float() + residual.float())
            if reduce_op == "avg":
                continue
            # A second product, of a few columns more.
            of_all = [(numbers(seed + 4, r, dtype, *shape[:-1], 8), columns) for r in range(size)]
            pairs = [
                (
                    a,
                    numbers(seed + 5, r, dtype, n, 8).t()
                    if transposed
                    else numbers(seed + 5, r, dtype, 8, n),
                )
                for r, (a, n) in enumerate(of_all)
            ]
            group = dist.distributed_c10d._get_default_group().group_name
            op = torch.ops.weft.fused_matmul_reduce_scatter
            both = op(a, b, reduce_op, dim, group, more=[put(x) for x in pairs[rank]])
            fused()
            second = sum(a.float() @ b.float() for a, b in pairs).chunk(size, dim)[rank]
            same("a sum of products", both, part + second)


def scaled_matmuls(rank: int, size: int, seed: int) -> None:
    """Of fp8: scales of each kind, of which those of rows and blocks travel; promoted and not; what is returned."""
    fp8, group = torch.float8_e4m3fn, dist.group.WORLD
    for m, k, n, kind, fast in [
        (64, 64, 64, "tensor", True),
        (129, 272, 144, "rows", False),
        (132, 272, 144, "rows", True),
        (129, 272, 144, "blocks", False),
    ]:
        blocks = -(-k // 128)
        As, b = (
            [numbers(seed, r, torch.float32, size * m, k) for r in range(size)],
            numbers(seed, 9, torch.float32, n, k),
        )
        if kind == "tensor":
            scales, of_b = [torch.full((), 2.0)] * size, torch.full((), 3.0)
            wide, wide_b = As, b * 6
        elif kind == "rows":
            scales, of_b = (
                [2 + numbers(seed + 1, r, torch.float32, size * m, 1) for r in range(size)],
                2 + b[:, :1].t(),
            )
            wide, wide_b = [a * s for a, s in zip(As, scales, strict=True)], b * of_b.t()
        else:
            scales = [2 + numbers(seed + 1, r, torch.float32, blocks, size * m).t() for r in range(size)]
            of_b = 2 + numbers(seed + 2, 0, torch.float32, blocks, -(-n // 128))
            wide = [a * s.repeat_interleave(128, 1)[:, :k] for a, s in zip(As, scales, strict=True)]
            wide_b = b * of_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n].t()
        matrix, a_scale = put(b.to(fp8)).t(), scales[rank] if kind == "tensor" else scales[rank][:m]
        for return_A in (False, True):
            A, (out,) = fused_ops.fused_all_gather_scaled_matmul(
                *(put(As[rank][:m].to(fp8)), [matrix], put(a_scale), [put(of_b)], 0, group),
                *(None, None, [torch.float32], [fast]),
                return_A=return_A,
            )
            fused()
            same(f"scaled all-gather + matmul, {kind}", out, torch.cat([a[:m] for a in wide]) @ wide_b.t())
            if A is not None:
                same("gathered fp8", A.float(), torch.cat([a[:m] for a in As]))
        given = put(As[rank].to(fp8)), matrix, put(scales[rank]), put(of_b), "sum", 0, group
        part = fused_ops.fused_scaled_matmul_reduce_scatter(
            *given, out_dtype=torch.float16, use_fast_accum=fast
        )
        fused()
        total = sum(a @ wide_b.t() for a in wide).chunk(size)[rank]
        same(f"scaled matmul + reduce-scatter, {kind}", part, total.half())


def all_reduce(rank: int, size: int, seed: int) -> None:
    group = symm_mem.resolve_group()
    for dtype in (*DTYPES, torch.float16):
        for config in (None, *CONFIGS):
            for count in (1, 1000, 20_011, 20_736):  # the last one is whole vectors between 2, 3 or 4 ranks
                xs = [numbers(seed, r, dtype, count + 1)[1:] for r in range(size)]
                on_gpu = put(numbers(seed, rank, dtype, count + 1))[1:]  # at an address that no vector fits
                for x in (on_gpu, on_gpu.clone()):
                    if config is None:
                        out = fused_ops.one_shot_all_reduce(x, "sum", dist.group.WORLD)
                    else:
                        layout = all_reduce_layout(x.nbytes, size, config)
                        choice = choose_sum_on_cuda(x, "sum", group)
                        choice = replace(choice, layout=layout, how=config)
                        call = AllReduceCall(x, "sum", group.group_name)
                        out = run_by_choice(choice, get_heap(group, x.device), call, group)
                    fused()
                    same(f"all-reduce {config}", out, sum(part.float() for part in xs))


def alone(rank: int, size: int, seed: int) -> None:
    """Whole vectors and others; in one epoch, and by rounds, which larger ones take; here of few vectors."""
    few = mock.patch.multiple(
        launch, rounds_launch=lambda *of: rounds.rounds_launch(*of[:2], replace(of[2], epoch=128, blocks=2))
    )
    for place in (nullcontext(), few):
        with place:
            for shape in ((size, 5, 3), (2, size * 3, 7), (4, 2, 8 * size), (16 * size, 150, 16)):
                # Each shape and place is a problem of its own: launchers are kept by what they move.
                more = shape if isinstance(place, nullcontext) else (*shape[:-1], 2 * shape[-1])
                for dim in range(3):
                    for dtype in DTYPES:
                        xs = [numbers(seed, r, dtype, *more) for r in range(size)]
                        gathered = fused_ops.one_shot_all_gather(put(xs[rank]), dim, dist.group.WORLD)
                        fused()
                        same(f"all-gather {more} {dim}", gathered, torch.cat(xs, dim))
                        out = fused_ops.one_shot_gather(put(xs[rank]), dim, dim % size, dist.group.WORLD)
                        fused()
                        if rank == dim % size:
                            same(f"gather {more} {dim}", out, torch.cat(xs, dim))
                        if more[dim] % size == 0:
                            out = fused_ops.one_shot_reduce_scatter(
                                put(xs[rank]), "sum", dim, dist.group.WORLD
                            )
                            fused()
                            want = sum(x.float() for x in xs).chunk(size, dim)[rank]
                            same(f"reduce-scatter {more} {dim}", out, want)
                            out = fused_ops.one_shot_all_to_all(put(xs[rank]), dim, 2 - dim, dist.group.WORLD)
                            fused()
                            want = torch.cat([x.chunk(size, dim)[rank] for x in xs], 2 - dim)
                            same(f"all-to-all {more} {dim}", out, want)


def all_reduce_rms_norm(rank: int, size: int, seed: int) -> None:
    # Rows of a block and of a cluster; few rows in one shot, many in two.
    for rows, hidden in [(3, 72), (5, 4096), (65, 4096)] + [(700, 4096)] * (seed == 0):
        xs = [numbers(seed, r, DTYPES[0], rows, hidden) for r in range(size)]
        residual = numbers(seed + 1, 0, DTYPES[0], rows, hidden)
        weight = torch.ones(hidden, dtype=DTYPES[0])
        normed, sums = fused_ops.fused_all_reduce_rms_norm(
            put(xs[rank]), put(residual), put(weight), 1e-5, dist.group.WORLD
        )
        fused()
        want = sum(x.float() for x in xs) + residual.float()
        same("all-reduce + norm: residual", sums, want)
        scaled = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(normed.cpu().float(), scaled, rtol=2e-2, atol=1e-3)
        # The other switches of the kernel, at once; the weight is one again.
        for given in (put(residual), None):
            normed, sums = fused_ops.fused_all_reduce_rms_norm(
                put(xs[rank]),
                given,
                put(torch.full((hidden,), 0.5)),
                1e-5,
                dist.group.WORLD,
                weight_offset=0.5,
                round_sum=False,
            )
            want = sum(x.float() for x in xs) + (residual.float() if given is not None else 0)
            scaled = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
            torch.testing.assert_close(normed.cpu().float(), scaled, rtol=2e-2, atol=1e-3)
        for scale in (None, put(torch.full((1,), 0.01))):
            quantized, scales, sums = fused_ops.fused_all_reduce_rms_norm_quant(
                put(xs[rank]), put(residual), put(weight), 1e-5, dist.group.WORLD, scale=scale
            )
            fused()
            want = sums.cpu().float()
            scaled = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
            back = quantized.cpu().float() * scales.cpu()
            torch.testing.assert_close(
                back, scaled.clamp(-4.48, 4.48) if scale is not None else scaled, rtol=0.07, atol=2e-2
            )
        for columns in (DTYPES[0], torch.float32):
            bias = numbers(seed + 2, 0, columns, 1, hidden)[0]
            normed, sums = fused_ops.fused_all_reduce_layer_norm(
                put(xs[rank]), put(residual), put(weight.to(columns)), put(bias), 1e-5, dist.group.WORLD
            )
            fused()
            want = torch.nn.functional.layer_norm(sums.cpu().float(), (hidden,), None, bias.float())
            torch.testing.assert_close(normed.cpu().float(), want, rtol=2e-2, atol=2e-2)


def matmul_all_reduce(rank: int, size: int, seed: int) -> None:
    for rows, columns, by_columns in ((300, 72, False), (13, 72, False), (16, 4168, True)):
        As = [numbers(seed, r, DTYPES[0], rows, 64) for r in range(size)]
        Bs = [numbers(seed + 1, r, DTYPES[0], 64, columns) for r in range(size)]
        total = sum(a.float() @ b.float() for a, b in zip(As, Bs, strict=True))
        B = put(Bs[rank].t().contiguous()).t() if by_columns else put(Bs[rank])
        # By itself a small one of many rows is cuBLAS's, with an all-reduce after it.
        for algorithm in (nullcontext(), forced("fused")):
            with algorithm:
                out = fused_ops.fused_matmul_all_reduce(put(As[rank]), B, "sum", dist.group.WORLD)
            fused()
            same(f"matmul + all-reduce, {rows} rows", out, total)


def transfers(rank: int, size: int, seed: int) -> None:
    """Registered tensors: by SMs, with several blocks, by copy engines as vectors do not fit, with strides."""
    right, left = (rank + 1) % size, (rank - 1) % size
    wide = put(torch.zeros(8, 10))
    tensors = [put(torch.zeros(37)), put(torch.zeros(20001)), put(torch.zeros(300))[1:], wide[:, ::2]]
    registered = symm_mem.register(tensors)
    for x in registered:
        for turn in range(2):
            sent = numbers(seed + turn, rank, torch.float32, *x.shapes[right])
            x.signal(left)
            x.put(put(sent), right)
            x.wait(left)
            same("put", x.tensor, numbers(seed + turn, left, torch.float32, *x.shapes[rank]))
            x.signal(left)
            same("get", x.get(put(torch.empty(x.shapes[right])), right), sent)
            x.wait(left)
    symm_mem.batch_signal([(x, left) for x in registered])
    sent = [numbers(seed, rank, torch.float32, *x.shapes[right]) for x in registered]
    symm_mem.batch_put([(x, put(each), right) for x, each in zip(registered, sent, strict=True)])
    symm_mem.batch_wait([(x, left) for x in registered])
    for x in registered:
        same("batch_put", x.tensor, numbers(seed, left, torch.float32, *x.shapes[rank]))
    symm_mem.unregister(registered)


def started(rank: int, size: int, seed: int) -> None:
    """Gathers and scatters that are started and waited for, two on their way: by copy engines and small kernels."""
    ops, name = torch.ops.weft, dist.group.WORLD.group_name
    for n in (40, 20000):
        parts = [numbers(seed, r, torch.float32, size * n) for r in range(size)]
        mine, total = put(parts[rank]), sum(parts).view(size, n)[rank]
        for placed in (False, True):
            gather = ops.all_gather_start(mine, name, placed=placed)
            scatter = ops.reduce_scatter_start(mine, "sum", name)
            gathered = ops.all_gather_wait(gather, mine, name, placed=placed)
            same("all_gather_wait", gathered, torch.cat(parts))
            if placed:
                ops.all_gather_release(gather, gathered, name)
            same("reduce_scatter_wait", ops.reduce_scatter_wait(scatter, mine, name), total)


@triton.jit
def past_the_end(x, n):
    tl.store(x + n, 1.0)


def main() -> None:
    rank, size, port = (int(text) for text in sys.argv[1:4])
    if not CPU:
        gpus = [int(text.removeprefix("--gpus=")) for text in sys.argv if text.startswith("--gpus=")]
        torch.cuda.set_device(rank % gpus[0] if gpus else rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    # No NCCL: its kernels are not ours, and the ops only need the store.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with forced("fused"):
        for use in range(USES):
            for run in (
                all_gather_matmul,
                matmul_reduce_scatter,
                scaled_matmuls,
                all_reduce,
                alone,
                all_reduce_rms_norm,
                matmul_all_reduce,
                experts,
                sent_to_experts,
                transfers,
                started,
            ):
                products = run in (all_gather_matmul, matmul_reduce_scatter) and not CPU
                for algorithm in EVERY if products else EVERY[:1]:
                    begin = time.monotonic()
                    with forced(algorithm) if products else nullcontext():
                        run(rank, size, 10 * use)
                    took = f"{time.monotonic() - begin:.1f} s"
                    print(f"rank {rank}: {run.__name__} {use}, {algorithm}: {took}", flush=True)
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
