"""A feed-forward block sharded by hand: collectives beside products, and the same with weft's ops.

    torchrun --nproc-per-node 4 examples/by_hand.py     # one rank a GPU; where there are fewer, CPU ranks

Activations are cut along the tokens, weights along the hidden dimension. Both ways are compared with the whole block in
float64, results and gradients; the exit status is 1 if weft's are further from it than they may be. Times of CPU ranks,
which are there for tests, say nothing of GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
)

# Tokens, dim and hidden dimension of all ranks together; and how far, relative and in norm, weft may be from float64.
SIZES = {"cpu": (256, 128, 512), "cuda": (8192, 4096, 14336)}
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
STEPS = 20

Block: TypeAlias = Callable[[Tensor, Tensor, Tensor, DeviceMesh], Tensor]


def whole_block(x: Tensor, up: Tensor, down: Tensor, mesh: DeviceMesh) -> Tensor:
    """x [tokens, dim], up [dim, hidden], down [hidden, dim] to [tokens, dim]."""
    return F.silu(x @ up) @ down


def unfused_block(x: Tensor, up: Tensor, down: Tensor, mesh: DeviceMesh) -> Tensor:
    """x [tokens / W, dim], up [dim, hidden / W], down [hidden / W, dim] to [tokens / W, dim]."""
    gathered = funcol.all_gather_tensor_autograd(x, 0, mesh)
    return funcol.reduce_scatter_tensor_autograd(F.silu(gathered @ up) @ down, "sum", 0, mesh)


def fused_block(x: Tensor, up: Tensor, down: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same."""
    _, (hidden,) = fused_all_gather_matmul(x, [up], 0, mesh, return_A=False)
    return fused_matmul_reduce_scatter(F.silu(hidden), down, "sum", 0, mesh)


def run_step(block: Block, given: list[Tensor], weights: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The result, and the gradients of a loss with these weights."""
    x, up, down = (t.detach().requires_grad_() for t in given)
    y = block(x, up, down, mesh)
    found = [y.detach(), *torch.autograd.grad(y, (x, up, down), weights)]
    # torch's collectives are waited for where their results are used, and nobody uses these.
    return [t.wait() if isinstance(t, funcol.AsyncCollectiveTensor) else t for t in found]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest one of all, relative to what is wanted."""
    pairs = zip(got, want, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(STEPS):
        dist.barrier()
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("by_hand.py runs on several ranks: torchrun --nproc-per-node 4 examples/by_hand.py")
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    dtype, (tokens, dim, hidden) = torch.bfloat16 if cuda else torch.float32, SIZES[device.type]
    tokens, hidden = tokens // size * size, hidden // size * size

    generator = torch.Generator(device).manual_seed(1)  # the same on every rank

    def random(rows: int, columns: int, scale: float) -> Tensor:
        x = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device=device)
        return (x * scale).to(dtype)

    x, weights = random(tokens, dim, 1.0), random(tokens, dim, 1.0)
    up, down = random(dim, hidden, dim**-0.5), random(hidden, dim, hidden**-0.5)
    cuts = (0, 1, 0)

    def own(tensors: list[Tensor]) -> list[Tensor]:
        """This rank's parts of x, up and down, or of their gradients."""
        return [t.chunk(size, cut)[rank].contiguous() for t, cut in zip(tensors, cuts, strict=True)]

    everything = [t.double() for t in (x, up, down)]
    y, *grads = run_step(whole_block, everything, weights.double(), mesh)
    want = [y.chunk(size)[rank], *own(grads)]
    given, own_weights = own([x, up, down]), weights.chunk(size)[rank]

    good = True
    for name, block in (("unfused", unfused_block), ("weft", fused_block)):
        error = difference(run_step(block, given, own_weights, mesh), want)
        ms = milliseconds(partial(run_step, block, given, own_weights, mesh), device)
        # Of the slowest rank, and the one that is the furthest away.
        ms, error = one_shot_all_reduce(torch.tensor([ms, error], device=device), "max", mesh).tolist()
        good = good and (block is unfused_block or error <= LIMIT[dtype])
        if rank == 0:
            print(f"{name:10}{ms:10.3f} ms forwards and backwards, {error:.1e} from float64", flush=True)
    if rank == 0:
        print(f"weft's last op ran as {last_plan()}\n{'ok' if good else 'FAILED'}")
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
