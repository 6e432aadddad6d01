"""Eager layers that call ``torch.ops.symm_mem`` by name: torch's ops, weft in their place, and weft's own functions.

torchrun --nproc-per-node 2 bench/installed.py
torchrun --nproc-per-node 2 bench/installed.py --m-sizes 128,8192 --hidden 4096 --intermediate 14336

A layer is an all-gather + matmul, a ReLU and a matmul + reduce-scatter, as SGLang and torchtitan call them. Each line
has microseconds of a layer: of the host, which launches a round without waiting, and of the device, after a sleep that
lets the host run ahead; the median of the rounds, the slowest rank's. Results are compared with float64 once. Between
CPU ranks, where torch has no ops, one clock measures both.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from statistics import median

import machine
import torch
import torch.distributed as dist
import weft
from torch import Tensor

LAYERS, ROUNDS = 20, 15
AHEAD = 30_000_000  # cycles that the device sleeps: longer than the host needs for a round of torch's ops
WRONG = 0.02  # of bfloat16 or float32, relative to the norm

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_name(group: str) -> Layer:
    ops = torch.ops.symm_mem

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        _, (h,) = ops.fused_all_gather_matmul(x, [up], 0, group, return_A=False)
        return ops.fused_matmul_reduce_scatter(h.relu_(), down, "sum", 0, group)  # type: ignore[no-any-return]

    return layer


def _by_weft(group: str) -> Layer:
    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        _, (h,) = weft.fused_all_gather_matmul(x, [up], 0, group, return_A=False)
        return weft.fused_matmul_reduce_scatter(h.relu_(), down, "sum", 0, group)

    return layer


def _measured(layer: Layer, *operands: Tensor) -> tuple[float, float]:
    """Microseconds of a layer: (host, device)."""
    x, rounds, on_cuda = operands[0], [], operands[0].is_cuda
    for _ in range(ROUNDS + 2):
        dist.barrier()
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        for _ in range(LAYERS):
            layer(*operands)
        host = (time.perf_counter() - start) * 1e6
        device = host
        if on_cuda:
            end.record()
            end.synchronize()
            device = begin.elapsed_time(end) * 1e3
        rounds.append((host / LAYERS, device / LAYERS))
    times = torch.tensor([median(part) for part in zip(*rounds[2:], strict=True)], device=x.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    host, device = times.tolist()
    return host, device


def _error(layer: Layer, x: Tensor, up: Tensor, down: Tensor) -> float:
    """Relative to the norm of the float64 result."""
    whole = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    product = (whole.double() @ up.double()).relu() @ down.double()
    dist.all_reduce(product)
    want = product.chunk(dist.get_world_size())[dist.get_rank()]
    return ((layer(x, up, down).double() - want).norm() / want.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--m-sizes", default="128,512,2048,8192", help="rows of all ranks, by commas")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    given = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # of torch's ops
    device = machine.join_ranks()
    on_gpus = device.type == "cuda"
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group().group_name
    if rank == 0:
        command = shlex.join(["bench/installed.py", *sys.argv[1:]])
        print(command, machine.described(device.type, size))
        print(f"{'rows':>6} {'contender':<18} {'host us':>9} {'device us':>10}")
    if on_gpus:
        import torch.distributed._symmetric_memory as torch_symm

        torch_symm.enable_symm_mem_for_group(group)
    dtype, wrong = torch.bfloat16 if on_gpus else torch.float32, 0
    contenders = {"torch": _by_name(group), "torch's, on weft": _by_name(group), "weft": _by_weft(group)}
    for rows in map(int, given.m_sizes.split(",")):
        sizes = ((rows // size, given.hidden), (given.hidden, given.intermediate // size))
        x, up = (torch.randn(*shape, device=device).to(dtype) for shape in sizes)
        down = (torch.randn(*reversed(sizes[1]), device=device) / given.hidden**0.5).to(dtype)
        for name, layer in contenders.items():
            if name == "torch" and not on_gpus:
                continue
            (weft.drop_in.uninstall if name == "torch" else weft.install)()
            with torch.no_grad():
                error = _error(layer, x, up, down)
                wrong += not error < WRONG
                host, gpu = _measured(layer, x, up, down)
            if rank == 0:
                print(f"{rows:6} {name:<18} {host:9.1f} {gpu:10.1f}{'' if error < WRONG else '  WRONG'}")
    if rank == 0:
        print(*weft.drop_in.installed_calls(), sep="\n")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
