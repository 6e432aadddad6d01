"""Ulysses attention: each rank has a part of the sequence, and for the attention itself all of it, of its own heads.

    torchrun --nproc-per-node 2 examples/ulysses.py     # one rank a GPU; where there are fewer, CPU ranks

The result and the gradients are compared with the attention of the whole sequence. The exit status is 1 if they differ.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from weft.fused_ops import one_shot_all_gather, one_shot_all_to_all

TOKENS, HEADS, SIZE = 48, 12, 16  # of the whole sequence; tokens and heads are multiples of the ranks


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of all tokens of some heads: [T, heads, size]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: str | None = None) -> Tensor:
    """The same of this rank's tokens of all heads: [T / W, heads, size]."""
    q, k, v = (one_shot_all_to_all(x, 1, 0, group) for x in (q, k, v))  # [T, heads / W, size]
    return one_shot_all_to_all(causal_attention(q, k, v), 0, 1, group)


def differs(got: Tensor, want: Tensor) -> bool:
    return not torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("ulysses.py runs on several ranks: torchrun --nproc-per-node 2 examples/ulysses.py")
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = TOKENS // world, HEADS, SIZE
    q, k, v = mine = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, device=device)
    q_whole, k_whole, v_whole = whole = [one_shot_all_gather(x.detach(), 0).requires_grad_() for x in mine]
    out, want = ulysses(q, k, v), causal_attention(q_whole, k_whole, v_whole)
    got = torch.autograd.grad(out, mine, gradient)
    wanted = torch.autograd.grad(want, whole, one_shot_all_gather(gradient, 0))
    pairs = [(out, want), *zip(got, wanted, strict=True)]
    wrong = sum(differs(got, want.chunk(world)[rank]) for got, want in pairs)
    print(f"rank {rank}: {list(shape)} of {TOKENS} tokens, {HEADS // world} of {HEADS} heads, {wrong} wrong")
    dist.destroy_process_group()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
