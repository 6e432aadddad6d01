"""The ops in inference mode."""

from __future__ import annotations


import pytest
import torch
from opcommon import DEVICES, check, gather, world
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_all_reduce_rms_norm,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)


def products(rank: int, world_size: int) -> None:
    """Every op once, with or without gradients."""
    grad = not torch.is_inference_mode_enabled()
    A, B = torch.randn(3 * world_size, 5), torch.randn(5, 7)
    parts = [a @ b for a, b in zip(gather(A), gather(B), strict=True)]
    weight = B.clone().requires_grad_(grad)
    _, (gathered,) = fused_all_gather_matmul(A, [weight], 0, world())
    check("all_gather_matmul", gathered, torch.cat(gather(A)) @ B.double(), 1e-6)
    scattered = fused_matmul_reduce_scatter(A, weight, "sum", 0, world())
    check("matmul_reduce_scatter", scattered, sum(parts).chunk(world_size)[rank], 1e-6, parts)
    reduced = fused_matmul_all_reduce(A, weight, "sum", world())
    check("matmul_all_reduce", reduced, sum(parts), 1e-6, parts)
    whole = one_shot_all_reduce(A, "sum", world())
    check("all_reduce", whole, sum(gather(A)), 1e-6)
    _, sums = fused_all_reduce_rms_norm(A, A, A[0], 1e-5, world())
    check("all_reduce_rms_norm", sums, sum(gather(A)) + A.double(), 1e-6)
    if grad:
        (gathered.sum() + scattered.sum() + reduced.sum()).backward()
        assert weight.grad is not None and weight.grad.isfinite().all()
    check("in place", one_shot_all_reduce_(A.clone(), "sum", world()), whole.double(), 0)


def inference(rank: int, world_size: int) -> None:
    """What is made in inference mode, memory on the heap among it, must serve outside of it."""
    with torch.inference_mode():
        products(rank, world_size)
        x = symm_mem.empty(5, group=world())
        peers = symm_mem.rendezvous(x)
    products(rank, world_size)
    right = (rank + 1) % world_size
    peers.tensors[right].copy_(torch.full((5,), float(rank)))
    peers.barrier()
    assert (x == (rank - 1) % world_size).all()
    peers.barrier()
    x.add_(1)
    symm_mem.set_timeout(20)
    symm_mem.reset()
    products(rank, world_size)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode(device: str) -> None:
    run_ranks(inference, 2, device=device, fresh=True)
